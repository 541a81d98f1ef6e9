"""Changing context records in Redis: every change of several keys is one script."""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from kvkeep_storage import redis_scripts as scripts
from kvkeep_storage.cache_scripts import ATTACH
from kvkeep_storage.context_index import ContextIndex
from kvkeep_storage.errors import Conflict, Gone, Invalid, NotFound, QuotaExceeded
from kvkeep_storage.quotas import NO_QUOTAS, Quotas
from kvkeep_storage.record_codec import encode, pairs
from kvkeep_storage.records import (
    ContextRecord,
    Expiry,
    Released,
    Status,
    sources,
)
from kvkeep_storage.redis_keys import TENANTS, TenantKeys
from kvkeep_storage.redis_link import MAX_RACES, Word, texts

_ERROR_DETAIL_CHARS_MAX: Final = 2000


class Unset(Enum):
    """The value of an argument that was not given, where None means "remove it"."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class ContextTable(ContextIndex):
    """Create, change and delete the contexts of tenants.

    All methods raise MetadataUnavailable.
    """

    async def create_context(self, record: ContextRecord, quotas: Quotas = NO_QUOTAS) -> None:
        """Write a new context, its list and expiry entries and its reference to the cache.

        The tenant is charged for its cache at once, by estimate while it is not committed. The
        quotas are compared in the same step, so requests at one time cannot pass them together.
        Raises: QuotaExceeded; Conflict when the id is taken; nothing is changed then. Also
        Conflict when an earlier call with this record was carried out and its reply lost.
        """
        _admitted(record, await self._create(record, quotas))

    async def check_quotas(self, record: ContextRecord, quotas: Quotas) -> None:
        """Return when ``create_context`` would admit this record now. Modifies nothing.

        A quick no before anything is stored; only creating decides. Raises: as creating does.
        """
        if quotas != NO_QUOTAS:
            _admitted(record, await self._try(scripts.ADMIT, record, quotas))

    async def restore_context(self, record: ContextRecord) -> bool:
        """Write a context unless its id is taken; False when it is. Asks for no quota."""
        return (await self._create(record, NO_QUOTAS))[0] == "ok"

    async def _create(self, record: ContextRecord, quotas: Quotas) -> list[str]:
        # Before the record: a tenant without contexts is harmless, a context whose tenant is
        # unknown would never expire nor be built.
        await self._link.command("SADD", TENANTS, record.tenant)
        return await self._try(scripts.CREATE, record, quotas)

    async def _try(self, script: str, record: ContextRecord, quotas: Quotas) -> list[str]:
        if record.status == "expired":
            raise Invalid("context.status", "'expired' is derived from expires_at, never stored")
        keys = TenantKeys(record.tenant)
        stored = record.to_hash()
        reply = await self._link.run(
            script,
            [
                keys.context(record.id),
                keys.contexts,
                keys.unfinished,
                keys.expiry,
                keys.references(record.cache_id),
                keys.cache(record.cache_id),
                keys.waiting(record.cache_id),
                keys.charges,
            ],
            [
                record.id,
                record.cache_id,
                stored.get("expires_at", ""),
                *quotas.limits("contexts", "queued", "bytes"),
                *pairs(stored),
            ],
        )
        return texts(reply)

    async def patch_context(
        self,
        tenant: str,
        context_id: str,
        *,
        name: str | Unset | None = UNSET,
        metadata: Mapping[str, str] | Unset = UNSET,
        expires: Expiry | Unset | None = UNSET,
    ) -> ContextRecord:
        """Change what was given and answer the whole record; None removes name or expiry.

        A new expiry counts from the creation or the last use, so it may lie in the past; the
        answer then reads "expired". Raises: NotFound, Gone, RecordCorrupt.
        """
        change: dict[str, str] = {}
        if metadata is not UNSET:
            change["metadata"] = encode("metadata", metadata)
        if name is not UNSET and name is not None:
            change["name"] = name
        expiry: list[Word] = ["keep", "", ""]
        if expires is None:
            expiry = ["never", "", ""]
        elif expires is not UNSET:
            expiry = ["set", expires.anchor, expires.seconds]
        removed = ["name"] if name is None else []
        keys = TenantKeys(tenant)
        outcome, *rest = texts(
            await self._link.run(
                scripts.PATCH,
                [keys.context(context_id), keys.expiry],
                [context_id, self._clock(), *expiry, len(change), *pairs(change), *removed],
            )
        )
        if outcome == "missing":
            raise NotFound("context", context_id)
        if outcome == "gone":
            raise Gone("context", context_id, float(rest[0]))
        return self._read(dict(zip(rest[::2], rest[1::2], strict=True)))

    async def touch_context(self, tenant: str, context_id: str, now: float) -> bool:
        """Count a query at ``now``; an expiry anchored at the last use moves with it.

        False, and nothing written, when the context is missing or has expired: use never
        brings a context back.
        """
        keys = TenantKeys(tenant)
        reply = await self._link.run(
            scripts.TOUCH, [keys.context(context_id), keys.expiry], [context_id, now]
        )
        return reply == 1

    async def progress(self, tenant: str, context_id: str, stage: str, fraction: float) -> bool:
        """Say how far a build is, 0 to 1. False, and nothing written, unless one runs."""
        if not 0.0 <= fraction <= 1.0:
            raise Invalid("fraction", f"{fraction} is outside 0 to 1")
        key = TenantKeys(tenant).context(context_id)
        return await self._link.run(scripts.PROGRESS, [key], [stage, fraction]) == 1

    async def set_building(self, tenant: str, context_id: str, *, rebuilding: bool) -> None:
        """Mark that a build of this context runs now, from its start.

        Raises: NotFound; Conflict when it is ready, failed, or ``rebuilding`` does not fit.
        """
        status: Status = "rebuilding" if rebuilding else "building"
        outcome = await self._move(tenant, context_id, status, {"fraction": "0.0"})
        if outcome == "missing":
            raise NotFound("context", context_id)
        if outcome != "ok":
            raise Conflict("context", context_id, f"it is {outcome} and cannot become {status}")

    async def fail_context(self, tenant: str, context_id: str, code: str, detail: str) -> bool:
        """End the build of a context for good, with the error users will see.

        False when it is missing, ready, or has failed already. A ready one that was to be built
        afresh keeps its cache and waits no longer; nothing else is written in these cases.
        """
        error = {"error_code": code, "error_detail": detail[:_ERROR_DETAIL_CHARS_MAX]}
        return await self._move(tenant, context_id, "failed", error) == "ok"

    async def find_ratio(self, tenant: str, context_id: str, ratio: float) -> bool:
        """Settle the ratio of a context that was registered with a loss instead.

        False, and nothing written, when it is missing or its ratio is known already. The tenant
        is charged anew, no more than before.
        """
        keys = TenantKeys(tenant)
        for _ in range(MAX_RACES):
            cache_id = await self._cache_id(keys, context_id)
            reply = await self._link.run(
                scripts.FIND_RATIO,
                self._waiting_keys(keys, context_id, cache_id),
                [context_id, cache_id, encode("ratio", ratio)],
            )
            if reply != "retry":
                return bool(reply == "ok")
        raise Conflict("context", context_id, f"its cache changed {MAX_RACES} times")

    async def attach(self, tenant: str, context_id: str, now: float) -> ContextRecord | None:
        """Make a waiting context ready when its cache is committed and cut at its ratio.

        None, and nothing written, when it is missing or does not wait, or when the cache is not
        committed or cannot be read at exactly that ratio. Raises: RecordCorrupt.
        """
        keys = TenantKeys(tenant)
        cache_id = await self._cache_id(keys, context_id)
        attached = await self._link.run(
            ATTACH,
            [
                keys.context(context_id),
                keys.cache(cache_id),
                keys.unfinished,
                keys.waiting(cache_id),
                keys.charges,
            ],
            [context_id, cache_id, now],
        )
        return await self.context(tenant, context_id) if attached == 1 else None

    async def delete_context(self, tenant: str, context_id: str) -> Released:
        """Remove a context, its index entries and its reference to the cache, at once.

        When that was the last reference, the cache record goes too. Deleting a missing context
        changes nothing else and says ``existed=False``. A call whose reply was lost has removed
        everything; its repetition says ``existed=False`` and leaves the objects to the sweeper.
        """
        keys = TenantKeys(tenant)
        for _ in range(MAX_RACES):
            cache_id = await self._cache_id(keys, context_id)
            outcome, *rest = texts(
                await self._link.run(
                    scripts.DELETE,
                    [
                        keys.context(context_id),
                        keys.contexts,
                        keys.unfinished,
                        keys.expiry,
                        keys.references(cache_id),
                        keys.cache(cache_id),
                        keys.caches,
                        keys.waiting(cache_id),
                        keys.charges,
                    ],
                    [context_id, cache_id],
                )
            )
            if outcome == "last":
                return Released(cache_id, rest[0] or None)
            if outcome != "retry":
                return Released(None, None, existed=outcome == "shared")
        raise Conflict(
            "context", context_id, f"its cache changed {MAX_RACES} times during a delete"
        )

    async def rebuild_context(
        self, tenant: str, context_id: str, quotas: Quotas = NO_QUOTAS
    ) -> ContextRecord:
        """Let a context wait for a new build, and answer the record as it is then.

        A failed one becomes "queued"; a ready one stays ready, and answers from the generation
        it has until the new one is committed. One that waits already is left as it is. The
        caller enqueues it. Raises: NotFound, Gone, QuotaExceeded, RecordCorrupt.
        """
        keys = TenantKeys(tenant)
        for _ in range(MAX_RACES):
            cache_id = await self._cache_id(keys, context_id)
            outcome, *rest = texts(
                await self._link.run(
                    scripts.REBUILD,
                    self._waiting_keys(keys, context_id, cache_id),
                    [context_id, cache_id, self._clock(), *quotas.limits("queued", "bytes")],
                )
            )
            match outcome:
                case "ok":
                    return self._read(dict(zip(rest[::2], rest[1::2], strict=True)))
                case "missing":
                    raise NotFound("context", context_id)
                case "gone":
                    raise Gone("context", context_id, float(rest[0]))
                case "quota":
                    raise _quota_exceeded(rest)
        raise Conflict("context", context_id, f"its cache changed {MAX_RACES} times")

    async def _move(
        self, tenant: str, context_id: str, status: Status, fields: Mapping[str, str]
    ) -> str:
        keys = TenantKeys(tenant)
        for _ in range(MAX_RACES):
            cache_id = await self._cache_id(keys, context_id)
            reply = await self._link.run(
                scripts.MOVE,
                self._waiting_keys(keys, context_id, cache_id),
                [context_id, cache_id, status, ",".join(sources(status)), *pairs(fields)],
            )
            if reply != "retry":
                return str(reply)
        raise Conflict("context", context_id, f"its cache changed {MAX_RACES} times")

    def _waiting_keys(self, keys: TenantKeys, context_id: str, cache_id: str) -> list[str]:
        return [
            keys.context(context_id),
            keys.unfinished,
            keys.cache(cache_id),
            keys.waiting(cache_id),
            keys.charges,
        ]

    async def _cache_id(self, keys: TenantKeys, context_id: str) -> str:
        # Empty when there is no such context; the scripts look at the record again.
        found = await self._link.command("HGET", keys.context(context_id), "cache_id")
        return "" if found is None else str(found)


def _admitted(record: ContextRecord, reply: list[str]) -> None:
    outcome, *rest = reply
    if outcome == "quota":
        raise _quota_exceeded(rest)
    if outcome == "taken":
        raise Conflict("context", record.id, "this id is taken")


def _quota_exceeded(reply: list[str]) -> QuotaExceeded:
    quota, limit, used, asked = reply
    return QuotaExceeded(quota, int(limit), int(used), int(asked))
