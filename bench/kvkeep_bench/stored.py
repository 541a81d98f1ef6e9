"""One cache committed to a throwaway data directory, and loaded from there again."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from kvkeep_bench.engine import TENANT, EngineSide
from kvkeep_service.config import load_settings
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.ids import new_context_id
from kvkeep_service.plan import BuildPlan
from kvkeep_service.rows import to_engine, to_store
from kvkeep_service.stores import Stores, open_stores
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.commit import commit
from kvkeep_storage.documents import DocumentBody, put_document
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.load import load
from kvkeep_storage.manifest import ManifestFacts
from kvkeep_storage.records import ContextRecord
from kvkeep_storage.sources import ObjectSource, Source


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """What one cache takes. ``rows_bytes``: its K and V alone; ``full_bytes``: uncompressed KV."""

    slab_bytes: int
    manifest_bytes: int
    rows_bytes: int
    full_bytes: int

    @property
    def overhead(self) -> float:
        """Bytes of the slabs beyond K and V, as a fraction of K and V."""
        return self.slab_bytes / self.rows_bytes - 1


@dataclass(frozen=True, slots=True)
class StoredCache:
    """A committed cache; ``bytes`` says what it takes on the disk."""

    stores: Stores
    engine: EngineSide
    cache_id: str
    folder: Path
    bytes: StoredBytes

    async def load(self, source: Source | None = None) -> ResidentContext:
        """Read, verify and hand over, as the server does when a cache is not resident.

        ``source`` is another place with the same objects than the store's own.
        """
        stores = self.stores
        loaded = await load(
            source or ObjectSource(stores.objects),
            stores.objects,
            stores.metadata,
            stores.leases,
            TENANT,
            self.cache_id,
            expected=self.engine.planner.identity,
            ratio=None,
            room_for=stores.memory.room,
        )
        device = self.engine.loaded.language_model.device
        return to_engine(loaded.rows, loaded.manifest.tokens_total, device)

    def forget_pages(self) -> None:
        """Make the kernel drop the files' pages, so that the next load reads the disk."""
        forget_pages(self.folder)


def forget_pages(folder: Path) -> None:
    """Make the kernel drop the pages of every file below a folder."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Pages that are not on the disk yet cannot be dropped.
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@asynccontextmanager
async def committed(
    data: Path, engine: EngineSide, text: str, plan: BuildPlan, built: BuiltCache
) -> AsyncIterator[StoredCache]:
    """Commit a build to a store in ``data``, which must be empty."""
    # Whatever this machine's environment configures for a server is not for a benchmark.
    settings = load_settings({"data": data, "redis_url": None, "store": None})
    async with open_stores(settings) as stores:
        await bind_if_new(stores.objects, stores.metadata)
        record = _record(engine, plan, built)
        body = _document_body(text, plan, record)
        await put_document(stores.objects, DocumentKey(TENANT, record.id), body)
        await stores.metadata.create_context(record)
        lease = await stores.leases.acquire_build(TENANT, record.cache_id, "bench")
        if lease is None:
            raise RuntimeError(f"{data} is not an empty directory: somebody builds in it")
        cache = await commit(
            stores.objects,
            stores.metadata,
            stores.leases,
            lease,
            to_store(built),
            _facts(plan, built, record.ratio),
        )
        folder = data / "objects" / GenerationKey(TENANT, cache.cache_id, cache.generation).prefix
        sizes = _stored_bytes(folder, built, record.full_bytes)
        yield StoredCache(stores, engine, cache.cache_id, folder, sizes)


def _stored_bytes(folder: Path, built: BuiltCache, full_bytes: int) -> StoredBytes:
    return StoredBytes(
        slab_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        manifest_bytes=(folder / "manifest.json").stat().st_size,
        rows_bytes=built.context.size_bytes,
        full_bytes=full_bytes,
    )


def _record(engine: EngineSide, plan: BuildPlan, built: BuiltCache) -> ContextRecord:
    model, document = engine.loaded.language_model, plan.document
    return ContextRecord(
        tenant=TENANT,
        id=new_context_id(),
        cache_id=plan.fingerprint.digest,
        model=engine.loaded.info.name,
        status="queued",
        created_at=time.time(),
        tokens_document=len(document.ids),
        tokens_protected=plan.num_protected,
        tokens_total=document.num_tokens,
        policy="kvzip",
        policy_applied=built.policy_applied,
        ratio=built.selection.ratios[-1],
        scoring=str(plan.fingerprint.policy_parameters["scoring"]),
        quantization="none",
        full_bytes=model.shape.full_bytes(document.num_tokens, model.dtype),
    )


def _document_body(text: str, plan: BuildPlan, record: ContextRecord) -> DocumentBody:
    return DocumentBody(
        text=text,
        system=None,
        instructions=None,
        protect=(),
        prefix_text=plan.prefix_text,
        policy=record.policy,
        ratio=record.ratio,
        scoring=record.scoring,
    )


def _facts(plan: BuildPlan, built: BuiltCache, ratio: float) -> ManifestFacts:
    return ManifestFacts(
        fingerprint=plan.fingerprint,
        tokens_total=plan.document.num_tokens,
        tokens_protected=plan.num_protected,
        ratio=ratio,
        ratio_achieved=built.selection.ratio_achieved,
        policy_applied=built.policy_applied,
        timings=built.timings,
        versions={"kvkeep": version("kvkeep")},
    )
