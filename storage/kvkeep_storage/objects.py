"""The object store: bytes under keys, with a deadline on every operation.

The only place that knows obstore. Local directories are written and read through
``durable.py`` instead, because obstore's local store never syncs what it writes.
"""

import asyncio
import errno
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

from kvkeep_storage import durable, keys
from kvkeep_storage.errors import Conflict, Corrupt, Full, Invalid, NotFound, ObjectsUnavailable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

RANGE_BYTES = 8 * 1024 * 1024
# Below this rate a transfer counts as stalled; the deadline of an operation grows with its size.
_SLOWEST_BYTES_PER_SECOND = 4 * 1024 * 1024
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_STORE_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object; ``modified_at`` is epoch seconds by the store's clock."""

    key: str
    size_bytes: int
    modified_at: float


class Objects:
    """One object store. Safe to use from many tasks of one event loop.

    Every operation raises ObjectsUnavailable when the store does not answer in time or cannot
    be reached: the caller may retry it. A write that ran into its deadline may still arrive.
    """

    def __init__(
        self, store: "ObjectStore", *, root: Path | None, deadline_seconds: float = 30.0
    ) -> None:
        """``root`` is the directory of a local store, None for every other kind."""
        self._store = store
        self._root = root
        self._deadline_seconds = deadline_seconds

    @property
    def is_remote(self) -> bool:
        """Whether every read goes over a network; False for a local directory."""
        return self._root is None

    @classmethod
    def open(cls, url: str, *, deadline_seconds: float = 30.0) -> Self:
        """Open a store by URL; a local directory (``file:///…``) is made when missing.

        Raises: Invalid for a URL that names no store.
        """
        parts = urlsplit(url)
        if parts.scheme == "file":
            if parts.netloc or not parts.path.startswith("/"):
                raise Invalid("objects_url", f"{url!r} must be file:///absolute/path")
            root = Path(unquote(parts.path)).resolve()
            root.mkdir(mode=0o750, parents=True, exist_ok=True)
            return cls(LocalStore(root), root=root, deadline_seconds=deadline_seconds)
        try:
            store = from_url(url)
        except (BaseError, ValueError) as error:
            raise Invalid("objects_url", _first_line(error)) from error
        return cls(store, root=None, deadline_seconds=deadline_seconds)

    async def put(self, key: str, content: bytes) -> None:
        """Store an object, over whatever is there: only for keys that have one writer.

        Readers see the old or the new object, whole. May be retried.
        Raises: Full, ObjectsUnavailable.
        """
        async with self._operation("put", key, len(content)):
            if self._root is not None:
                await asyncio.to_thread(durable.replace, self._root / key, content, root=self._root)
            else:
                await obstore.put_async(self._store, key, content, chunk_size=RANGE_BYTES)

    async def put_if_absent(self, key: str, content: bytes) -> None:
        """Store a small object unless there is one.

        A retry after ObjectsUnavailable may meet its own earlier attempt: compare the content.
        Raises: Conflict when there is one; Full, ObjectsUnavailable.
        """
        async with self._operation("put_if_absent", key, len(content)):
            if self._root is not None:
                await asyncio.to_thread(durable.create, self._root / key, content, root=self._root)
            else:
                await obstore.put_async(self._store, key, content, mode="create")

    async def get(self, key: str) -> bytes:
        """Read a small object whole. Raises: NotFound, ObjectsUnavailable."""
        async with self._operation("get", key, 0):
            result = await obstore.get_async(self._store, key)
            return bytes(await result.bytes_async())

    async def read_ranges(self, key: str, start: int, into: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other, with the bytes of an object from ``start`` on.

        One read of a local file, straight into the buffers, or one ranged request. The views
        are writable and of bytes.

        Modifies: ``into``. After a cancellation, and after an error that is ``abandoned``, bytes
        may still arrive there, so it must not be used again; after any other error nothing does.
        Raises: NotFound; Corrupt when the object ends before the last buffer is full, and its
        size says so too; ObjectsUnavailable, also for a read that came short on the way.
        """
        size_bytes = sum(len(view) for view in into)
        try:
            async with self._operation("read", key, size_bytes):
                await self._fill(key, start, into, size_bytes)
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
            meta = await obstore.head_async(self._store, key)
            return meta["size"]

    async def delete(self, key: str) -> None:
        """Remove an object; one that is missing counts as removed.

        Local directories that it leaves empty go as well. Raises: ObjectsUnavailable.
        """
        async with self._operation("delete", key, 0):
            if self._root is not None:
                await asyncio.to_thread(durable.delete, self._root / key, root=self._root)
                return
            try:
                await obstore.delete_async(self._store, key)
            except FileNotFoundError:
                return

    async def objects_below(self, prefix: str) -> list[ObjectInfo]:
        """Every object in a directory and below it, unordered. Raises: ObjectsUnavailable."""
        found: list[ObjectInfo] = []
        stream = aiter(obstore.list(self._store, prefix))
        while True:
            # Each page has a deadline of its own: a long listing is not a stalled one.
            async with self._operation("list", prefix, 0):
                page = await anext(stream, None)
            if page is None:
                return found
            found.extend(
                ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for meta in page
                if not durable.is_temporary(meta["path"].rpartition("/")[2])
            )

    async def directories_below(self, prefix: str) -> list[str]:
        """Names of the directories right below a directory. Raises: ObjectsUnavailable."""
        async with self._operation("list", prefix, 0):
            listing = await obstore.list_with_delimiter_async(self._store, prefix)
            return [path.rpartition("/")[2] for path in listing["common_prefixes"]]

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
        if self._root is None:
            return []
        async with self._operation("delete", "temporary files", 0):
            return await asyncio.to_thread(_delete_temporary, self._root, older_than_seconds)

    async def _fill(
        self, key: str, start: int, into: Sequence[memoryview], size_bytes: int
    ) -> None:
        """Raises: EOFError when fewer bytes come; whatever the store fails with."""
        if self._root is not None:
            await asyncio.to_thread(durable.read_scattered, self._root / key, into, start)
            return
        stored_bytes = (await obstore.head_async(self._store, key))["size"]
        if stored_bytes < start + size_bytes:
            raise EOFError(f"{stored_bytes} bytes are stored")
        if not size_bytes:
            return
        content = memoryview(
            await obstore.get_range_async(self._store, key, start=start, length=size_bytes)
        )
        if len(content) != size_bytes:
            raise EOFError(f"{len(content)} of {size_bytes} bytes arrived")
        done = 0
        for view in into:
            view[:] = content[done : done + len(view)]
            done += len(view)

    @asynccontextmanager
    async def _operation(self, name: str, key: str, size_bytes: int) -> AsyncIterator[None]:
        """Give what stands inside a deadline, and translate what goes wrong in it."""
        seconds = self._deadline_seconds + size_bytes / _SLOWEST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            reason = f"{key}: no answer in {seconds:.0f} s"
            raise ObjectsUnavailable(name, reason, abandoned=True) from error
        except FileNotFoundError as error:
            raise NotFound("object", key) from error
        except (FileExistsError, AlreadyExistsError) as error:
            raise Conflict("object", key, "there is one already") from error
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise Full(key, size_bytes) from error
            raise ObjectsUnavailable(name, f"{key}: {_first_line(error)}") from error
        except (BaseError, EOFError) as error:
            raise ObjectsUnavailable(name, f"{key}: {_first_line(error)}") from error


def _delete_temporary(root: Path, older_than_seconds: float) -> list[int]:
    removed = []
    for file in durable.temporary_files(root):
        if file.age_seconds >= older_than_seconds:
            durable.delete(file.path, root=root)
            removed.append(file.size_bytes)
    return removed


def _first_line(error: BaseException) -> str:
    """The message without obstore's dump of its internals."""
    return str(error).partition("\n")[0]
