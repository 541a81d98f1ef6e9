"""The connection to Redis or Valkey: the only file that imports redis.

Every command and script has a deadline, is sent at most once, and fails as MetadataUnavailable.
Sent at most once, because the answer to a lost reply is not known here: a script that deleted
the last reference says so only the first time. A connection that the server closed while idle is
replaced before it is used, so a restarted server is found again by the next call.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from kvkeep_storage.errors import Invalid, MetadataUnavailable

Word: TypeAlias = str | int | float
Reply: TypeAlias = "int | str | list[Reply] | None"

SCHEMES: Final = ("redis", "rediss", "unix")
_MAX_CONNECTIONS: Final = 64
_SCAN_SECONDS: Final = 60.0

# How often a script over the references of a cache is tried while they keep changing.
MAX_RACES: Final = 20


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry of a stream."""

    id: str
    fields: Mapping[str, str]


class RedisLink:
    """A pool of connections to one server, and the scripts it has been told.

    Safe for any number of tasks of one event loop; not for several event loops.
    """

    def __init__(self, redis: Redis, timeout_seconds: float) -> None:
        """``timeout_seconds`` bounds connecting, and each read and write."""
        self._redis = redis
        self.timeout_seconds = timeout_seconds
        self._scripts: dict[str, AsyncScript] = {}

    @classmethod
    def open(cls, url: str, timeout_seconds: float) -> Self:
        """Prepare connections to a URL; none is made before the first command.

        Raises: Invalid for a scheme other than redis, rediss and unix, or a malformed URL.
        The URL may hold a password, so it is never repeated.
        """
        scheme = urlsplit(url).scheme
        if scheme not in SCHEMES:
            raise Invalid("redis url", f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=timeout_seconds,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                decode_responses=True,
                # Text from outside may hold a lone surrogate; it must not break a record.
                encoding_errors="surrogatepass",
            )
        except ValueError as error:
            raise Invalid("redis url", str(error)) from error
        return cls(Redis.from_pool(pool), timeout_seconds)

    async def close(self) -> None:
        """Close every connection. Modifies: this link, which cannot be used again."""
        await self._redis.aclose()

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Word] = ()) -> Reply:
        """Run a Lua script whose keys are all in ``keys``. Raises: MetadataUnavailable."""
        prepared = self._scripts.get(script)
        if prepared is None:
            prepared = self._scripts[script] = self._redis.register_script(script)
        async with self._call("script"):
            reply: Reply = await prepared(keys=list(keys), args=list(args))
        return reply

    async def command(self, *words: Word) -> Reply:
        """Send one command whose reply is a number, a text or a list of them.

        Raises: MetadataUnavailable.
        """
        async with self._call(str(words[0])):
            # redis-py leaves this one method unannotated.
            sent = self._redis.execute_command(*words)  # type: ignore[no-untyped-call]
            reply: Reply = await sent
        return reply

    async def hashes(self, keys: Sequence[str]) -> list[Mapping[str, str]]:
        """Read hashes, one round trip for all; a missing one is empty. Not atomic.

        Raises: MetadataUnavailable.
        """
        async with self._call("HGETALL"):
            pipeline = self._redis.pipeline(transaction=False)
            for key in keys:
                pipeline.hgetall(key)
            found: list[Mapping[str, str]] = await pipeline.execute()
        return found

    async def members(self, key: str) -> list[str]:
        """The members of a set, sorted; a missing set is empty. Raises: MetadataUnavailable."""
        async with self._call("SMEMBERS"):
            found = await self._redis.smembers(key)
        return sorted(str(member) for member in found)

    async def keys(self, pattern: str) -> list[str]:
        """Every key of the server that matches a glob. Raises: MetadataUnavailable.

        A key that exists all the while is found; one that comes or goes is found or not.
        """
        async with self._call("SCAN", _SCAN_SECONDS):
            found = {str(key) async for key in self._redis.scan_iter(match=pattern, count=1000)}
        return sorted(found)

    async def next_entry(
        self, stream: str, group: str, consumer: str, block_seconds: float
    ) -> StreamEntry | None:
        """Wait for an entry of a stream that no consumer of the group was given before.

        ``block_seconds`` must stay below the timeout. Raises: MetadataUnavailable.
        """
        block_ms = max(1, round(block_seconds * 1000))
        async with self._call("XREADGROUP", block_seconds):
            # The reply's type in redis-py depends on the protocol version.
            streams: Any = await self._redis.xreadgroup(
                group, consumer, {stream: ">"}, count=1, block=block_ms
            )
        for _, entries in streams or []:
            for entry_id, fields in entries:
                return StreamEntry(str(entry_id), dict(fields))
        return None

    @asynccontextmanager
    async def _call(self, operation: str, more_seconds: float = 0.0) -> AsyncIterator[None]:
        task = asyncio.current_task()
        cancellations = task.cancelling() if task else 0
        # Waiting for a connection, opening it, and the command itself.
        deadline_seconds = 3 * self.timeout_seconds + more_seconds
        try:
            async with asyncio.timeout(deadline_seconds):
                yield
        except (RedisError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise MetadataUnavailable(f"redis {operation}", reason) from error
        # redis-py sends under asyncio.wait_for, which before Python 3.12 forgets a cancellation
        # that comes as the sending ends; the caller would wait for this task for ever.
        if task and task.cancelling() > cancellations:
            raise asyncio.CancelledError


class RedisTable:
    """A family of keys behind one link; ``clock`` tells epoch seconds."""

    def __init__(self, link: RedisLink, clock: Callable[[], float]) -> None:
        """Keep the link, which the caller closes."""
        self._link = link
        self._clock = clock


def texts(reply: Reply) -> list[str]:
    """A flat list reply as texts; nil is empty."""
    if reply is None:
        return []
    items = reply if isinstance(reply, list) else [reply]
    return [str(item) for item in items]
