"""The connection to Redis or Valkey: the only file that imports redis.

One server, the primary that sentinels name, or a cluster: what the callers see is the same.
Every command and script has a deadline, is sent at most once, and fails as MetadataUnavailable.
Sent at most once, because the answer to a lost reply is not known here: a script that deleted
the last reference says so only the first time. (A node that refuses a command because another
one serves its key has not carried it out, so the command goes on to that one.) A connection that
the server closed while idle is replaced before it is used, so a restarted server is found again
by the next call; in a cluster by the call after that, and a new primary once it is elected.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Self, TypeAlias

from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

from kvkeep_storage.errors import Invalid, MetadataUnavailable
from kvkeep_storage.redis_url import (
    CLUSTER_SCHEME,
    SENTINEL_SCHEME,
    ClusterAddress,
    check_database,
    parse_cluster,
    parse_sentinel,
    scheme_of,
)

Word: TypeAlias = str | int | float
Reply: TypeAlias = "int | str | list[Reply] | None"

SCHEMES: Final = ("redis", "rediss", "unix", SENTINEL_SCHEME, CLUSTER_SCHEME)
# Calls that are under way at once, and so connections to one server; further calls wait.
_MAX_CONNECTIONS: Final = 64
_SCAN_SECONDS: Final = 60.0
_HASHES_AT_ONCE: Final = 100

# How often a script over the references of a cache is tried while they keep changing.
MAX_RACES: Final = 20

# KEYS hash ...    -> {{field, value, ...}, ...}
_HASHES: Final = """
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('HGETALL', key) end
return found
"""


class RedisLink:
    """Connections to one store of records, and the scripts sent over them.

    Safe for any number of tasks of one event loop; not for several event loops.
    """

    def __init__(
        self, client: Redis | RedisCluster, timeout_seconds: float, sentinel: Sentinel | None = None
    ) -> None:
        """``timeout_seconds`` bounds connecting, and each read and write."""
        self._client = client
        self._sentinel = sentinel
        self.timeout_seconds = timeout_seconds
        self._room = asyncio.Semaphore(_MAX_CONNECTIONS)

    @classmethod
    def open(cls, url: str, timeout_seconds: float) -> Self:
        """Prepare connections to a URL of SCHEMES; none is made before the first command.

        Raises: Invalid for another scheme or a malformed URL. The URL may hold a password, so
        nothing of it but the scheme is ever repeated.
        """
        scheme = scheme_of(url)
        if scheme not in SCHEMES:
            raise Invalid("redis url", f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
        options = _options(timeout_seconds)
        if scheme == CLUSTER_SCHEME:
            return cls(_cluster(parse_cluster(url), options), timeout_seconds)
        if scheme == SENTINEL_SCHEME:
            address = parse_sentinel(url)
            # redis-py leaves this constructor unannotated.
            sentinel = Sentinel(  # type: ignore[no-untyped-call]
                address.sentinels, sentinel_kwargs=options, **options
            )
            primary: Redis = sentinel.master_for(
                address.service,
                db=address.database,
                username=address.username,
                password=address.password,
                max_connections=_MAX_CONNECTIONS,
            )
            return cls(primary, timeout_seconds, sentinel)
        if scheme != "unix":
            check_database(url)
        try:
            pool = ConnectionPool.from_url(url, max_connections=_MAX_CONNECTIONS, **options)
        except ValueError:
            # The message may quote a part of the password.
            reason = "it cannot be read; are all special characters of the password encoded?"
            raise Invalid("redis url", reason) from None
        _check_options(pool, options)
        return cls(Redis.from_pool(pool), timeout_seconds)

    async def close(self) -> None:
        """Close every connection. Modifies: this link, which cannot be used again."""
        await self._client.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Word] = ()) -> Reply:
        """Run a Lua script whose keys are all in ``keys``, and in one slot.

        Raises: MetadataUnavailable.
        """
        digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        words = (len(keys), *keys, *args)
        async with self._call("script"):
            try:
                return await self._send("EVALSHA", digest, *words)
            except NoScriptError:
                # Not carried out, so this is no repetition.
                return await self._send("EVAL", script, *words)

    async def command(self, *words: Word) -> Reply:
        """Send one command whose reply is a number, a text or a list of them.

        Raises: MetadataUnavailable.
        """
        async with self._call(str(words[0])):
            return await self._send(*words)

    async def hashes(self, keys: Sequence[str]) -> list[Mapping[str, str]]:
        """Read hashes of one slot; a missing one is empty. A hundred at a time, each atomic.

        Raises: MetadataUnavailable.
        """
        found: list[Mapping[str, str]] = []
        for first in range(0, len(keys), _HASHES_AT_ONCE):
            reply = await self.run(_HASHES, keys[first : first + _HASHES_AT_ONCE])
            for flat in reply if isinstance(reply, list) else []:
                words = texts(flat)
                found.append(dict(zip(words[::2], words[1::2], strict=True)))
        return found

    async def members(self, key: str) -> list[str]:
        """The members of a set, sorted; a missing set is empty. Raises: MetadataUnavailable."""
        async with self._call("SMEMBERS"):
            found: Any = await self._client.smembers(key)
        return sorted(str(member) for member in found)

    async def keys(self, pattern: str) -> list[str]:
        """Every key that matches a glob, on every node. Raises: MetadataUnavailable.

        A key that exists all the while is found; one that comes or goes is found or not.
        """
        async with self._call("SCAN", _SCAN_SECONDS):
            scan = self._client.scan_iter(match=pattern, count=1000)
            found = {str(key) async for key in scan}
        return sorted(found)

    async def wait_for_entry(self, stream: str, after_id: str, seconds: float) -> None:
        """Return when a stream has an entry after ``after_id``, or ``seconds`` have passed.

        It takes nothing, so it may be cancelled at any moment. ``seconds`` must stay below the
        timeout. Raises: MetadataUnavailable.
        """
        words = ("XREAD", "BLOCK", max(1, round(seconds * 1000)), "STREAMS", stream, after_id)
        async with self._call("XREAD", seconds):
            if isinstance(self._client, RedisCluster):
                # redis-py would ask a server where in this command the key stands, every time.
                await self._client.initialize()
                node = self._client.get_node_from_key(stream)
                await self._client.execute_command(*words, target_nodes=node)
            else:
                await self._send(*words)

    async def infos(self) -> list[Mapping[str, str]] | None:
        """What every primary says of itself (INFO); None when this user may not ask.

        Raises: MetadataUnavailable.
        """
        async with self._call("INFO"):
            try:
                if not isinstance(self._client, RedisCluster):
                    return [_texts_of(await self._client.info())]
                await self._client.initialize()
                return [
                    _texts_of(await self._client.execute_command("INFO", target_nodes=node))
                    for node in self._client.get_primaries()
                ]
            except ResponseError:
                return None

    async def _send(self, *words: Word) -> Reply:
        reply: Reply = await self._client.execute_command(*words)
        return reply

    @asynccontextmanager
    async def _call(self, operation: str, more_seconds: float = 0.0) -> AsyncIterator[None]:
        task = asyncio.current_task()
        cancellations = task.cancelling() if task else 0
        # Waiting for a connection, opening it, and the command itself.
        deadline_seconds = 3 * self.timeout_seconds + more_seconds
        failed: Exception | None = None
        try:
            async with asyncio.timeout(deadline_seconds), self._room:
                yield
        except (RedisError, RedisClusterException, OSError) as error:
            failed = error
        # redis-py sends under asyncio.wait_for, which before Python 3.12 forgets a cancellation
        # that comes as the sending ends, whether the call then succeeds or not; the caller would
        # wait for this task for ever.
        if task and task.cancelling() > cancellations:
            raise asyncio.CancelledError
        if failed is not None:
            raise MetadataUnavailable(f"redis {operation}", _reason(failed)) from failed


def _options(timeout_seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "decode_responses": True,
        # Text from outside may hold a lone surrogate; it must not break a record.
        "encoding_errors": "surrogatepass",
    }


def _check_options(pool: ConnectionPool, options: Mapping[str, Any]) -> None:
    """Refuse options of a URL that are none, or that what is promised here rests on.

    Raises: Invalid, without repeating any of it.
    """
    if any(pool.connection_kwargs[name] != value for name, value in options.items()):
        raise Invalid("redis url", f"these are not to be set: {', '.join(sorted(options))}")
    try:
        # Sends nothing; only making a connection tells which options there are.
        pool.make_connection()  # type: ignore[no-untyped-call]  # unannotated there
    except (TypeError, ValueError, RedisError):
        raise Invalid(
            "redis url", "an option after ? is none of redis-py, or has no such value"
        ) from None


def _cluster(address: ClusterAddress, options: Mapping[str, Any]) -> RedisCluster:
    return RedisCluster(
        startup_nodes=[ClusterNode(*host) for host in address.nodes],
        # Those of all calls may go to one node, where asking for the layout takes one too.
        max_connections=_MAX_CONNECTIONS + 1,
        username=address.username,
        password=address.password,
        **options,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, MasterNotFoundError):
        # Its own message describes every connection that was tried.
        return "no sentinel that answers knows a primary of this name that is up"
    return str(error) or type(error).__name__


def _texts_of(info: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: str(value) for name, value in info.items()}


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
