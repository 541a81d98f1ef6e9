"""An object store, its records and its leases together, and one context in them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep_storage.arrival import LoadObserver
from kvkeep_storage.artifact import CacheRows, RowBytes
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.commit import commit
from kvkeep_storage.documents import DocumentBody, mirror_context, put_document
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.load import LoadedCache, load
from kvkeep_storage.manifest import ManifestFacts
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import BuildLease, CacheRecord, ContextRecord
from kvkeep_storage.sources import ObjectSource, Source
from kvkeep_storage.spare_memory import Room

TENANT = "acme"


def files_below(root: Path, folder: str = "") -> list[str]:
    """Every file, temporary ones included, by its path below ``root``.

    What a deletion takes away while this looks is passed over: ``Path.rglob`` raises there.
    """
    return sorted(
        os.path.relpath(os.path.join(parent, name), root)
        for parent, _, names in os.walk(root / folder)
        for name in names
    )


def entries_below(root: Path) -> list[str]:
    """Every file and directory, by its path below ``root``."""
    return sorted(
        os.path.relpath(os.path.join(parent, name), root)
        for parent, folders, names in os.walk(root)
        for name in (*folders, *names)
    )


def a_document(text: str = "Clause 1.") -> DocumentBody:
    return DocumentBody(
        text=text,
        system=None,
        instructions=None,
        protect=(),
        prefix_text="<|system|>",
        policy="kvzip",
        ratio=0.3,
        scoring="local",
    )


def context_for(facts: ManifestFacts, context_id: str, **changes: Any) -> ContextRecord:
    """The record of a context that waits for the cache which ``facts`` describe."""
    content: dict[str, Any] = {
        "tenant": TENANT,
        "id": context_id,
        "cache_id": facts.fingerprint.digest,
        "model": facts.fingerprint.model,
        "status": "queued",
        "created_at": 1_790_000_000.5,
        "tokens_document": 900,
        "tokens_protected": facts.tokens_protected,
        "tokens_total": facts.tokens_total,
        "policy": "kvzip",
        "policy_applied": facts.policy_applied,
        "ratio": facts.ratio,
        "scoring": "local",
        "quantization": "none",
        "full_bytes": 1_000_000,
    }
    return ContextRecord(**(content | changes))


def used_room(size_bytes: int) -> RowBytes:
    """Memory as a load may get it: full of another cache's bytes, here of NaN."""
    return np.full(size_bytes, 0xFF, np.uint8)


@dataclass(slots=True)
class Stores:
    """Everything that commit, load, sweeper and reindex work on; ``root`` holds the objects."""

    objects: Objects
    metadata: Metadata
    leases: Leases
    root: Path

    @classmethod
    async def open(cls, root: Path, metadata: Metadata) -> "Stores":
        objects = Objects.open(f"file://{root}")
        await bind_if_new(objects, metadata)
        return cls(objects, metadata, Leases(metadata), root)

    async def register(
        self, facts: ManifestFacts, context_id: str = "ctx_01", **changes: Any
    ) -> DocumentKey:
        record = context_for(facts, context_id, **changes)
        key = DocumentKey(record.tenant, record.id)
        await put_document(self.objects, key, a_document())
        await self.metadata.create_context(record)
        await mirror_context(self.objects, self.metadata, key)
        return key

    async def lease(self, facts: ManifestFacts, tenant: str = TENANT) -> BuildLease:
        lease = await self.leases.acquire_build(tenant, facts.fingerprint.digest, "builder")
        assert lease is not None
        return lease

    async def build(self, rows: CacheRows, facts: ManifestFacts) -> CacheRecord:
        lease = await self.lease(facts)
        try:
            return await commit(self.objects, self.metadata, self.leases, lease, rows, facts)
        finally:
            await self.leases.release(lease)

    async def load(
        self,
        facts: ManifestFacts,
        ratio: float | None = None,
        tenant: str = TENANT,
        *,
        source: Source | None = None,
        first_ratio: float | None = None,
        observer: LoadObserver | None = None,
        room_for: Room = used_room,
    ) -> LoadedCache:
        return await load(
            source or ObjectSource(self.objects),
            self.objects,
            self.metadata,
            self.leases,
            tenant,
            facts.fingerprint.digest,
            expected=facts.fingerprint.model_identity,
            ratio=ratio,
            first_ratio=first_ratio,
            observer=observer,
            room_for=room_for,
        )

    def folder(self, cache: CacheRecord) -> Path:
        """Where the committed generation lies."""
        return self.root / GenerationKey(cache.tenant, cache.cache_id, cache.generation).prefix
