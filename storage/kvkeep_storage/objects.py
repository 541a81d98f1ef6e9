"""The object store: bytes under keys, with a deadline on every operation.

What stores the bytes is a ``Backend``: a local directory or a server. Deadlines, errors and
the store's identity are the same for all of them, and here.
"""

import asyncio
import errno
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Self

from kvkeep_storage import keys
from kvkeep_storage.backends import Backend, ObjectInfo, RemoteTrouble
from kvkeep_storage.errors import Conflict, Corrupt, Full, NotFound, ObjectsUnavailable
from kvkeep_storage.faults import Faults, FaultyBackend
from kvkeep_storage.local_backend import LocalBackend
from kvkeep_storage.pieces import Filled
from kvkeep_storage.remote_backend import RemoteBackend
from kvkeep_storage.retries import ATTEMPTS, retrying
from kvkeep_storage.store_url import LocalUrl, parse_store_url

__all__ = ["ObjectInfo", "Objects"]

# Below this rate a transfer counts as stalled; the deadline of an operation grows with its size.
_SLOWEST_BYTES_PER_SECOND = 4 * 1024 * 1024
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_STORE_SCHEMA = 1
# No check takes as long, whatever the difference between clocks.
_CHECK_SECONDS_MAX = 3600.0


class Objects:
    """One object store. Safe to use from many tasks of one event loop.

    Every operation raises ObjectsUnavailable when the store does not answer in time or cannot
    be reached: the caller may retry it. A write that ran into its deadline may still arrive.
    """

    def __init__(self, backend: Backend, *, deadline_seconds: float = 30.0) -> None:
        """``deadline_seconds`` is for an operation that moves no bytes worth mentioning."""
        self._backend = backend
        self._deadline_seconds = deadline_seconds

    @classmethod
    def open(
        cls, url: str, *, deadline_seconds: float = 30.0, faults: Faults | None = None
    ) -> Self:
        """Open a store by URL (see ``docs/stores.md``), with ``faults`` one that misbehaves.

        A local directory is made when missing; to a server nothing is sent yet.
        Raises: Invalid for a URL that names no store; ObjectsUnavailable for a directory that
        cannot be made.
        """
        where = parse_store_url(url)
        backend: Backend
        if isinstance(where, LocalUrl):
            try:
                where.root.mkdir(mode=0o750, parents=True, exist_ok=True)
            except OSError as error:
                raise ObjectsUnavailable("open", f"{where}: {error.strerror}") from error
            backend = LocalBackend(where.root)
        else:
            backend = RemoteBackend.open(where, deadline_seconds=deadline_seconds)
        if faults is not None:
            backend = FaultyBackend(backend, faults)
        return cls(backend, deadline_seconds=deadline_seconds)

    @property
    def is_remote(self) -> bool:
        """Whether every read goes over a network; False for a local directory."""
        return self._backend.is_remote

    async def put(self, key: str, content: bytes) -> None:
        """Store an object, over whatever is there: only for keys that have one writer.

        Readers see the old or the new object, whole. May be retried.
        Raises: Full, ObjectsUnavailable.
        """
        async with self._operation("put", key, len(content)):
            await self._backend.put(key, content)

    async def put_if_absent(self, key: str, content: bytes) -> None:
        """Store a small object unless there is one.

        A retry after ObjectsUnavailable may meet its own earlier attempt: compare the content.
        Raises: Conflict when there is one; Full, ObjectsUnavailable.
        """
        async with self._operation("put_if_absent", key, len(content)):
            await self._backend.put_if_absent(key, content)

    async def get(self, key: str) -> bytes:
        """Read a small object whole. Raises: NotFound, ObjectsUnavailable."""
        async with self._operation("get", key, 0):
            return await self._backend.get(key)

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        """Fill buffers, one after the other, with the bytes of an object from ``start`` on.

        One read of a local file, straight into the buffers, or one ranged request. The views
        are writable and of bytes. ``on_filled`` hears of each piece in a helper thread.

        Modifies: ``into``. After a cancellation, and after an error that is ``abandoned``, bytes
        may still arrive there, so it must not be used again; after any other error nothing does.
        Raises: NotFound; Corrupt when the object ends before the last buffer is full, and its
        size says so too; ObjectsUnavailable, also for a read that came short on the way.
        """
        size_bytes = sum(map(len, into))
        try:
            async with self._operation("read", key, size_bytes):
                await self._backend.read(key, start, into, on_filled)
        except ObjectsUnavailable as error:
            if not isinstance(error.__cause__, EOFError):
                raise
            stored_bytes = await self.size(key)
            if stored_bytes < start + size_bytes:
                reason = f"{stored_bytes} bytes are stored, {start + size_bytes} were written"
                raise Corrupt(key, reason) from error
            raise

    async def size(self, key: str) -> int:
        """Size of an object in bytes. Raises: NotFound, ObjectsUnavailable."""
        async with self._operation("head", key, 0):
            return await self._backend.size(key)

    async def delete(self, key: str) -> None:
        """Remove an object; one that is missing counts as removed.

        Local directories that it leaves empty go as well. Raises: ObjectsUnavailable.
        """
        async with self._operation("delete", key, 0):
            await self._backend.delete(key)

    async def objects_below(self, prefix: str) -> list[ObjectInfo]:
        """Every object in a directory and below it, unordered. Raises: ObjectsUnavailable."""
        found: list[ObjectInfo] = []
        async for page in self._pages(prefix):
            found.extend(page)
        return found

    async def directories_below(self, prefix: str) -> list[str]:
        """Names of the directories right below a directory that hold an object, however deep.

        Found by going through all objects: some servers go on naming directories whose last
        object was deleted. Raises: ObjectsUnavailable.
        """
        names: set[str] = set()
        start = len(prefix) + 1 if prefix else 0
        async for page in self._pages(prefix):
            below = (item.key[start:].partition("/") for item in page)
            names.update(name for name, slash, _ in below if slash)
        return sorted(names)

    async def check(self, *, deadline_seconds: float) -> None:
        """Try once, at the start, what everything later relies on.

        Lists, writes, writes on a condition and deletes an object that nobody reads; what a
        crash in the middle leaves, empty, a later check removes. Raises: ObjectsUnavailable, in
        one line: where the store is, and what it does not do.
        """
        where = self._backend.location
        try:
            async with asyncio.timeout(deadline_seconds):
                await retrying(self._check)
        except TimeoutError as error:
            reason = f"{where}: no answer in {deadline_seconds:g} s"
            raise ObjectsUnavailable("object store", reason) from error
        except ObjectsUnavailable as error:
            raise ObjectsUnavailable("object store", f"{where}: {error.reason}") from error

    async def probe_space(self, size_bytes: int) -> None:
        """Write and delete an object of so many bytes. Raises: Full, ObjectsUnavailable."""
        probe = f"{keys.CHECKS}/{secrets.token_hex(8)}"
        try:
            await self.put(probe, bytes(size_bytes))
        finally:
            await self.delete(probe)

    async def _check(self) -> None:
        probe = f"{keys.CHECKS}/{secrets.token_hex(8)}"
        try:
            async with aclosing(self._pages(keys.DOCUMENTS)) as pages:
                await anext(pages, None)
        except ObjectsUnavailable as error:
            raise _because("cannot be read", error) from error
        try:
            await self._delete_old_checks()
            await self.put(probe, b"")
            try:
                await self.put_if_absent(probe, b"")
            except Conflict:
                return
            finally:
                await self.delete(probe)
        except Full:
            # What is stored can be read all the same; writes say what is the matter.
            return
        except ObjectsUnavailable as error:
            raise _because("cannot be written to", error) from error
        raise ObjectsUnavailable(
            "put_if_absent", "overwrites an object that was to be left alone", attempts=ATTEMPTS
        )

    async def _delete_old_checks(self) -> None:
        before = time.time() - _CHECK_SECONDS_MAX
        for item in await self.objects_below(keys.CHECKS):
            if item.modified_at < before:
                await self.delete(item.key)

    async def find_store_id(self) -> str | None:
        """The identity of this store, None when it has none yet.

        Raises: Corrupt when ``store.json`` is not one; ObjectsUnavailable.
        """
        try:
            content = await self.get(keys.STORE)
        except NotFound:
            return None
        try:
            described = json.loads(content)
            if described["schema"] != _STORE_SCHEMA:
                raise Corrupt(keys.STORE, f"schema is {described['schema']!r}")
            return str(described["store_id"])
        except (ValueError, TypeError, KeyError) as error:
            raise Corrupt(keys.STORE, "not a store description") from error

    async def store_id(self) -> str:
        """The identity of this store, given to it now when it has none.

        Raises: Corrupt, Full, ObjectsUnavailable.
        """
        if (found := await self.find_store_id()) is not None:
            return found
        store_id = secrets.token_hex(16)
        content = json.dumps({"store_id": store_id, "schema": _STORE_SCHEMA}).encode()
        try:
            await self.put_if_absent(keys.STORE, content)
        except Conflict:
            # Somebody was faster, or this is a retry: what is stored decides.
            return await self.store_id()
        return store_id

    async def delete_temporary_files(self, older_than_seconds: float) -> list[int]:
        """Remove what crashed writes left in a local store; return the size of each file.

        Remote stores keep unfinished uploads out of sight; their own life-cycle rules end them.
        Raises: ObjectsUnavailable.
        """
        async with self._operation("delete", "temporary files", 0):
            return await self._backend.delete_temporary_files(older_than_seconds)

    async def _pages(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        async with aclosing(self._backend.pages(prefix)) as pages:
            while True:
                # Each page has a deadline of its own: a long listing is not a stalled one.
                async with self._operation("list", prefix, 0):
                    page = await anext(pages, None)
                if page is None:
                    return
                yield page

    @asynccontextmanager
    async def _operation(self, name: str, key: str, size_bytes: int) -> AsyncIterator[None]:
        """Give what stands inside a deadline, and translate what goes wrong in it."""
        seconds = self._deadline_seconds + size_bytes / _SLOWEST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            # Waited for long enough: nobody is to wait as long again, `attempts` times.
            raise ObjectsUnavailable(
                name,
                f"{key}: no answer in {round(seconds, 2):g} s",
                attempts=ATTEMPTS,
                abandoned=True,
            ) from error
        except FileNotFoundError as error:
            raise NotFound("object", key) from error
        except FileExistsError as error:
            raise Conflict("object", key, "there is one already") from error
        except RemoteTrouble as error:
            raise ObjectsUnavailable(name, f"{key}: {error}", attempts=error.attempts) from error
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise Full(key, size_bytes) from error
            raise ObjectsUnavailable(name, f"{key}: {error}") from error
        except EOFError as error:
            raise ObjectsUnavailable(name, f"{key}: {error}") from error


def _because(problem: str, error: ObjectsUnavailable) -> ObjectsUnavailable:
    return ObjectsUnavailable(
        error.operation, f"{problem}: {error.reason}", attempts=error.attempts
    )
