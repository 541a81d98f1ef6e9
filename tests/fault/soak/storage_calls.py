"""The product's own functions as the soak calls them: the one file to change with their form."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from kvkeep_service.config import Settings
from kvkeep_service.ports import CompressionSpec, DocumentSpec, ModelInfo, Prepared
from kvkeep_service.rebuilding import rebuild
from kvkeep_service.recovery import Recovery
from kvkeep_service.registration import Registration, register
from kvkeep_service.removal import Remover
from kvkeep_service.stores import Stores, open_stores
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.commit import commit
from kvkeep_storage.documents import get_document
from kvkeep_storage.errors import Invalid, NotFound
from kvkeep_storage.fingerprint import Fingerprint
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.load import LoadedCache, load
from kvkeep_storage.lone_documents import delete_lone_document, lone_documents
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import BuildLease, ContextRecord, Expiry
from kvkeep_storage.reindex import ReindexReport, reindex
from kvkeep_storage.sweeper import Sweeper, SweepReport
from kvkeep_storage.verify import Verifier

from ...support.scripted_worker import MODEL
from ...support.stores import files_below
from .synthetic import facts_of, rows_of, text_of

# Short, so that what a killed process held comes free while the soak goes on.
LEASE_SECONDS = 1.0
_BEAT_SECONDS = 0.25
# Longer than any write here takes, as the sweeper asks for.
GRACE_SECONDS = 2.0


class SyntheticWorker:
    """As much of the worker's port as registering, rebuilding and deleting use."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @property
    def model(self) -> ModelInfo:
        return replace(MODEL, name="smol")

    async def prepare(
        self, tenant: str, document: DocumentSpec, compression: CompressionSpec
    ) -> Prepared:
        facts = facts_of(tenant, document.text, compression.ratio)
        return Prepared(
            prefix_text=facts.fingerprint.prefix_text,
            document_tokens=900,
            protected_tokens=facts.tokens_protected,
            total_tokens=facts.tokens_total,
            policy_applied=facts.policy_applied,
            ratio=facts.ratio,
            full_bytes=1_000_000,
            fingerprint=facts.fingerprint,
        )

    async def planned(self, tenant: str, context_id: str) -> Fingerprint:
        """What every worker here makes of the document that is stored."""
        body = await get_document(self._objects, DocumentKey(tenant, context_id))
        return facts_of(tenant, body.text, body.ratio).fingerprint

    async def drop(self, tenant: str, cache_id: str) -> None:
        """Nothing is resident here."""

    async def forget(self, tenant: str, context_id: str) -> None:
        """Nothing is answered here."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where records and objects are; ``disk`` is the disk tier's, in front of a remote store.

    ``faults`` are for the store to have, as operators can ask for; ``cap_bytes`` is what sweeps
    leave of the caches.
    """

    redis_url: str
    store_url: str
    disk: Path | None = None
    faults: str | None = None
    cap_bytes: int | None = None

    @property
    def root(self) -> Path | None:
        """The directory of the objects; None when they are on a server."""
        parts = urlsplit(self.store_url)
        return Path(parts.path) if parts.scheme == "file" else None

    @classmethod
    def local(cls, redis_url: str, root: Path) -> "Place":
        return cls(redis_url, root.as_uri())


@dataclass(frozen=True, slots=True)
class Calls:
    """One process's hold on the stores."""

    stores: Stores
    remover: Remover
    root: Path | None
    cap_bytes: int | None

    @classmethod
    @asynccontextmanager
    async def open(cls, place: Place) -> AsyncIterator["Calls"]:
        settings = Settings(
            redis_url=place.redis_url,
            store=place.store_url,
            disk_cache=place.disk,
            faults=place.faults,
        )
        async with open_stores(settings) as opened:
            leases = Leases(opened.metadata, ttl_seconds=LEASE_SECONDS, renew_seconds=_BEAT_SECONDS)
            jobs = Jobs(
                opened.metadata,
                ttl_seconds=LEASE_SECONDS,
                heartbeat_seconds=_BEAT_SECONDS,
                retry_seconds=_BEAT_SECONDS,
            )
            stores = replace(opened, leases=leases, jobs=jobs)
            await bind_if_new(stores.objects, stores.metadata)
            remover = Remover(stores, SyntheticWorker(stores.objects))
            try:
                yield cls(stores, remover, place.root, place.cap_bytes)
            finally:
                await remover.close()

    def on(self, objects: Objects) -> "Calls":
        """The same, with the objects of another store."""
        stores = replace(self.stores, objects=objects)
        remover = Remover(stores, SyntheticWorker(stores.objects))
        return replace(self, stores=stores, remover=remover)

    async def register(
        self, tenant: str, number: int, ratio: float, expires_seconds: int | None
    ) -> ContextRecord:
        wanted = Registration(
            document=DocumentSpec(text_of(number)),
            compression=CompressionSpec(ratio=ratio),
            name=None,
            metadata={"number": str(number)},
            model=None,
            expires=None if expires_seconds is None else Expiry("created_at", expires_seconds),
        )
        worker = SyntheticWorker(self.stores.objects)
        return await register(
            self.stores,
            worker,
            self.remover,
            tenant,
            wanted,
            time.time(),
        )

    async def remove(self, tenant: str, context_id: str) -> None:
        await self.remover.remove_context(tenant, context_id)

    async def rebuild(self, record: ContextRecord) -> None:
        await rebuild(self.stores, SyntheticWorker(self.stores.objects), record)

    async def commit(self, lease: BuildLease, text: str, ratio: float) -> None:
        rows, facts = rows_of(lease.tenant, text, ratio), facts_of(lease.tenant, text, ratio)
        stores = self.stores
        await commit(stores.objects, stores.metadata, stores.leases, lease, rows, facts)

    async def load(self, tenant: str, text: str, ratio: float) -> LoadedCache:
        stores, expected = self.stores, facts_of(tenant, text, ratio).fingerprint
        try:
            return await load(
                stores.source,
                stores.objects,
                stores.metadata,
                stores.leases,
                tenant,
                expected.digest,
                expected=expected.model_identity,
                ratio=ratio,
            )
        except Invalid as error:
            # Built again for others, at their ratio: as good as nothing, as for the service.
            raise NotFound("cache", f"{expected.digest} at ratio {ratio}") from error

    async def recover(self, record: ContextRecord, error: NotFound) -> None:
        """What a question does that finds no cache: have it built again."""
        recovery = Recovery(self.stores, rebuilds=True)
        await recovery.recover(record.tenant, record.cache_id, record.id, error)

    async def sweep(self, grace_seconds: float = GRACE_SECONDS) -> SweepReport:
        stores = self.stores
        sweeper = Sweeper(
            stores.objects,
            stores.metadata,
            stores.leases,
            grace_seconds,
            store_bytes=self.cap_bytes,
        )
        return await sweeper.run_once()

    async def reindex(self) -> ReindexReport:
        return await reindex(self.stores.objects, self.stores.metadata)

    async def collect_lone_documents(self) -> None:
        """What an operator's gc does, when no registration or deletion is under way."""
        objects, metadata = self.stores.objects, self.stores.metadata
        for lone in await lone_documents(objects, metadata, grace_seconds=0):
            await delete_lone_document(objects, metadata, lone.key)

    async def problems(self) -> AsyncIterator[str]:
        """What an operator's verify finds."""
        stores = self.stores
        verifier = Verifier(
            stores.objects, stores.metadata, stores.leases, stores.jobs, repairs=False
        )
        async for checked in verifier.run():
            if checked.problem is not None:
                yield f"{checked.what} {checked.name}: {checked.problem}"

    async def files(self, folder: str = "") -> list[str]:
        """Everything stored in a folder and below it; in a directory, unfinished writes too."""
        if self.root is not None:
            return files_below(self.root, folder)
        return sorted(item.key for item in await self.stores.objects.objects_below(folder))
