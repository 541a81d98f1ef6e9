"""A local disk in front of a remote object store: whole objects of committed generations.

    disk_tier   a ``Source``: from the disk, from a fill, or from the store itself
    disk_fill   one object on its way from the store into a file
    disk_files  the files, by the keys of their objects
    disk_parts  files in the making, and their locks
    disk_budget the bytes of all of them, in every process, and what is evicted
    disk_health what is left alone for a while, because it went wrong

Never trusted and never needed: whatever is wrong with a copy or with the disk, the load goes on
from the store. What a load found wrong is forgotten, and for a while its generation is read from
the store alone, so that a bad disk never proves a good generation wrong.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

from kvkeep_storage import keys
from kvkeep_storage.disk_budget import DiskBudget
from kvkeep_storage.disk_files import DiskFiles
from kvkeep_storage.disk_fill import Fill, Limits, Traffic
from kvkeep_storage.disk_health import DiskHealth
from kvkeep_storage.errors import Invalid, ObjectsUnavailable, StorageError
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import Filled
from kvkeep_storage.records import check_name
from kvkeep_storage.sources import Origin

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_REQUESTS_AT_ONCE: Final = 8
_CHUNKS_IN_MEMORY: Final = 32
_THREADS: Final = 8
# A disk that takes longer counts as hung; a read that it delays so long is given up.
_DISK_SECONDS: Final = 20.0
# Sizes that were asked for, and are not asked for again when the object is fetched.
_SIZES_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A snapshot of the disk tier.

    ``entries`` and ``size_bytes`` are those of the directory when it was last looked at; the
    rest is of this process since its start. Hits are reads that were answered by a whole copy,
    misses all others; ``forgotten`` are generations that a load found wrong, wherever from.
    Seconds add up over reads that ran at once.
    """

    entries: int
    size_bytes: int
    budget_bytes: int
    filling: int
    hits: int
    misses: int
    evictions: int
    errors: int
    forgotten: int
    disk_bytes: int
    disk_seconds: float
    store_bytes: int
    store_seconds: float


class DiskTier:
    """Reads through a directory that other processes and stores may share. One event loop.

    Implements ``sources.Source``. Anything that is not an object of a generation passes through.
    """

    def __init__(self, objects: Objects, root: Path, budget_bytes: int) -> None:
        """``root`` must exist; see ``open``."""
        self._objects = objects
        self._root = root
        self._budget_bytes = budget_bytes
        self._budget = DiskBudget(root, budget_bytes)
        self._found: DiskFiles | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvkeep-disk")
        self._limits = Limits(
            requests=asyncio.Semaphore(_REQUESTS_AT_ONCE),
            chunks=asyncio.Semaphore(_CHUNKS_IN_MEMORY),
        )
        self._fills: dict[str, Fill] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sizes: dict[str, int] = {}
        self._health = DiskHealth()
        self._hits = self._misses = 0
        self._read, self._fetched = Traffic(), Traffic()

    @classmethod
    def open(cls, objects: Objects, root: Path, budget_bytes: int) -> Self:
        """Use a directory on a local file system; it is made when missing.

        Raises: Invalid when it cannot be written to.
        """
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            tier = cls(objects, root, budget_bytes)
            tier._budget.recount()
        except OSError as error:
            raise Invalid("disk cache", f"{root}: {error.strerror}") from error
        return tier

    async def close(self) -> None:
        """End what is being fetched; whoever still reads goes on from the store."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def get(self, key: str) -> bytes:
        """As ``Source.get``; what comes from the store is kept."""
        files = await self._files_for(key)
        if files is None:
            return await self._objects.get(key)
        content = await self._attempt(files.content, key)
        if content is not None:
            self._hits += 1
            return content
        self._misses += 1
        started = time.perf_counter()
        content = await self._objects.get(key)
        if self._health.may_fill(key):
            cost_seconds = time.perf_counter() - started
            await self._attempt(_keep, files, key, content, cost_seconds, is_write=True)
        return content

    async def size(self, key: str) -> int:
        """As ``Source.size``."""
        files = await self._files_for(key)
        kept = None if files is None else await self._attempt(files.size, key)
        if kept is not None:
            return kept
        size_bytes = await self._objects.size(key)
        if len(self._sizes) >= _SIZES_KEPT:
            self._sizes.clear()
        self._sizes[key] = size_bytes
        return size_bytes

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        """As ``Source.read_ranges``; an object that is not here is fetched whole, once."""
        files = await self._files_for(key)
        if files is not None and await self._read_near(files, key, start, into, on_filled):
            return
        await self._objects.read_ranges(key, start, into, on_filled)

    async def forget(self, prefix: str) -> None:
        """As ``Source.forget``: for ten minutes, this process reads it from the store alone."""
        self._health.distrust(prefix)
        await self._drop(prefix)

    async def origin(self, prefix: str) -> Origin:
        """As ``Source.origin``."""
        if self._health.may_read(prefix) and (files := await self._files()) is not None:
            return "disk" if await self._attempt(files.has_slabs, prefix) else "store"
        return "store"

    async def drop(self, key: GenerationKey) -> None:
        """Remove the copies of a generation, also those on their way in this process."""
        await self._drop(key.prefix)

    async def generations(self) -> list[GenerationKey]:
        """Every generation of this store of which something is here."""
        files = await self._files()
        return [] if files is None else await self._attempt(files.generations) or []

    async def reclaim(self) -> None:
        """Remove what crashes and other stores have left, and count anew."""
        if (files := await self._files()) is not None:
            await self._attempt(files.reclaim, is_write=True)

    def stats(self) -> DiskStats:
        """Counts as of now."""
        usage = self._budget.usage()
        return DiskStats(
            entries=usage.entries,
            size_bytes=usage.size_bytes,
            budget_bytes=self._budget_bytes,
            filling=len(self._fills),
            hits=self._hits,
            misses=self._misses,
            evictions=usage.evictions,
            errors=self._health.errors,
            forgotten=self._health.forgotten,
            disk_bytes=self._read.size_bytes,
            disk_seconds=self._read.seconds,
            store_bytes=self._fetched.size_bytes,
            store_seconds=self._fetched.seconds,
        )

    async def _drop(self, prefix: str) -> None:
        for key, fill in self._fills.items():
            if key.startswith(f"{prefix}/"):
                fill.drop()
        if (files := await self._files()) is not None:
            await self._attempt(files.remove, prefix, is_write=True)

    async def _read_near(
        self,
        files: DiskFiles,
        key: str,
        start: int,
        into: Sequence[memoryview],
        on_filled: Filled | None,
    ) -> bool:
        """Read from the disk, or through it. False: ``into`` is to be filled elsewhere."""
        try:
            fill = self._fills.get(key)
            if fill is None and await self._read_copy(files, key, start, into, on_filled):
                self._hits += 1
                return True
            self._misses += 1
            fill = self._fills.get(key)
            if fill is None and not self._health.may_fill(key):
                return False
            fill = fill or self._begin(files, key)
            # A fill that another process has finished meanwhile leaves a copy.
            return await fill.read(start, into, on_filled) or await self._read_copy(
                files, key, start, into, on_filled
            )
        except TimeoutError as error:
            self._health.has_failed(error, is_write=False)
            # A thread may still write into the buffers: they must not be filled again.
            reason = f"{key}: no answer of the disk cache in {_DISK_SECONDS:.0f} s"
            raise ObjectsUnavailable("read", reason, abandoned=True) from error
        except EOFError:
            self._health.was_cut_short(key)
            await self._attempt(files.remove, key, is_write=True)
        except OSError as error:
            self._health.has_failed(error, is_write=False)
        return False

    async def _read_copy(
        self,
        files: DiskFiles,
        key: str,
        start: int,
        into: Sequence[memoryview],
        on_filled: Filled | None,
    ) -> bool:
        started = time.perf_counter()
        found = await self._in_thread(files.read, key, start, into, on_filled)
        if found:
            self._read.add(sum(len(view) for view in into), time.perf_counter() - started)
        return found

    def _begin(self, files: DiskFiles, key: str) -> Fill:
        fill = Fill(
            self._objects,
            files,
            key,
            in_thread=self._in_thread,
            limits=self._limits,
            fetched=self._fetched,
        )
        self._fills[key] = fill
        task = asyncio.create_task(self._run(fill, key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return fill

    async def _run(self, fill: Fill, key: str) -> None:
        try:
            await fill.run(self._sizes.pop(key, None))
        except StorageError as error:
            # Whoever wants the object asks the store itself next, and is told.
            _log.info("not kept on the disk: %s", error)
        except OSError as error:
            self._health.has_failed(error, is_write=True)
        finally:
            del self._fills[key]
            # Where there is a copy now, it is found first.
            self._health.refuse(key)

    async def _files_for(self, key: str) -> DiskFiles | None:
        """Where copies of an object are; None when it is to be read from the store alone."""
        if not _is_of_generation(key) or not self._health.may_read(key.rpartition("/")[0]):
            return None
        return await self._files()

    async def _files(self) -> DiskFiles | None:
        """None until the store has an identity, which it has before it has any generation."""
        if self._found is None:
            with suppress(StorageError):
                if (store_id := await self._objects.find_store_id()) is not None:
                    self._found = DiskFiles(self._root, store_id, self._budget)
        return self._found

    async def _attempt(
        self, call: Callable[..., Result], *args: object, is_write: bool = False
    ) -> Result | None:
        """Do what the caller can do without; None when the disk fails."""
        try:
            return await self._in_thread(call, *args)
        except OSError as error:
            self._health.has_failed(error, is_write=is_write)
            return None

    async def _in_thread(self, call: Callable[..., Result], *args: object) -> Result:
        try:
            done = asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args))
        except RuntimeError as error:
            raise OSError(errno.ESHUTDOWN, "the disk cache is closed") from error
        async with asyncio.timeout(_DISK_SECONDS):
            return await done


def _keep(files: DiskFiles, key: str, content: bytes, cost_seconds: float) -> None:
    try:
        part = files.begin(key, len(content))
    except BlockingIOError:
        return
    if part is None:
        return
    try:
        part.write(memoryview(content), 0)
        files.finish(part, cost_seconds)
    finally:
        files.close(part)


def _is_of_generation(key: str) -> bool:
    folder, *names = key.split("/")
    if folder != keys.CACHES or len(names) != 4:
        return False
    with suppress(Invalid):
        GenerationKey(*names[:3])
        check_name("object", names[3])
        return True
    return False
