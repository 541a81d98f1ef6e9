"""Finding context records in Redis: one hash each, with the indexes of a tenant."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvkeep_storage.errors import Invalid
from kvkeep_storage.hash_fields import hash_fields
from kvkeep_storage.records import ContextRecord, Page
from kvkeep_storage.redis_keys import TENANTS, TenantKeys
from kvkeep_storage.redis_link import RedisLink, RedisTable, texts

_SCAN_RECORDS: Final = 200
_ID_PAGE: Final = 1000


class ContextIndex(RedisTable):
    """Read and list the contexts of tenants; an index entry is a hint, checked on use.

    All methods raise MetadataUnavailable.
    """

    async def context(self, tenant: str, context_id: str) -> ContextRecord | None:
        """Read a context, "expired" when its time has passed; None when there is none.

        Raises: RecordCorrupt.
        """
        (stored,) = await self._link.hashes([TenantKeys(tenant).context(context_id)])
        return self._read(stored) if stored else None

    async def contexts(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        descending: bool = False,
        status: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Page:
        """List a tenant's contexts by id, from the one after ``after``, which may be deleted.

        ``status`` and every pair of ``metadata`` must match. A context deleted or created while
        the pages are read is in them or not; every other one is in them exactly once.
        Raises: Invalid for a limit below 1; RecordCorrupt.
        """
        if limit < 1:
            raise Invalid("limit", f"{limit} must be at least 1")
        keys, pairs = TenantKeys(tenant), metadata or {}
        is_filtered = status is not None or bool(pairs)
        count = _SCAN_RECORDS if is_filtered else min(limit + 1, _SCAN_RECORDS)
        found: list[ContextRecord] = []
        while True:
            ids = await self._ids_after(keys, after, count, descending=descending)
            some = await self._may_match(keys, ids, status, pairs) if is_filtered else ids
            for stored in await self._link.hashes([keys.context(item) for item in some]):
                record = self._read(stored) if stored else None
                if record is None or not _matches(record, status, pairs):
                    continue
                found.append(record)
                if len(found) > limit:
                    return Page(tuple(found[:limit]), has_more=True)
            if len(ids) < count:
                return Page(tuple(found), has_more=False)
            after = ids[-1]

    async def context_ids(self, tenant: str) -> list[str]:
        """The ids of every context of a tenant, ascending; those that come or go may be missing."""
        return await context_ids(self._link, tenant)

    async def expired(self, now: float, limit: int) -> list[tuple[str, str]]:
        """At most ``limit`` (tenant, context id) whose expiry lies at or before ``now``."""
        found: list[tuple[str, str]] = []
        for tenant in await self.tenants():
            wanted = limit - len(found)
            if wanted <= 0:
                break
            key = TenantKeys(tenant).expiry
            ids = await self._link.command("ZRANGEBYSCORE", key, "-inf", now, "LIMIT", 0, wanted)
            found += [(tenant, context_id) for context_id in texts(ids)]
        return found

    async def unfinished(self) -> list[tuple[str, str]]:
        """Every (tenant, context id) that waits for a build or is being built."""
        return [
            (tenant, context_id)
            for tenant in await self.tenants()
            for context_id in await self._link.members(TenantKeys(tenant).unfinished)
        ]

    async def tenants(self) -> list[str]:
        """Every tenant that ever had a context, sorted."""
        return await self._link.members(TENANTS)

    async def _may_match(
        self, keys: TenantKeys, ids: list[str], status: str | None, metadata: Mapping[str, str]
    ) -> list[str]:
        """Leave out what cannot match, without reading whole records; the record decides."""
        contexts = [keys.context(item) for item in ids]
        found = await hash_fields(self._link, contexts, "status", "expires_at", "metadata")
        return [
            context_id
            for context_id, (stored_as, expires_at, text) in zip(ids, found, strict=True)
            if (status is None or status == stored_as or (status == "expired" and expires_at))
            and all(json.dumps(value, ensure_ascii=False) in text for value in metadata.values())
        ]

    async def _ids_after(
        self, keys: TenantKeys, after: str | None, count: int, *, descending: bool
    ) -> list[str]:
        # All scores are 0, so the order is that of the ids, and a deleted id still marks a place.
        command, start, end = "ZRANGEBYLEX", "-", "+"
        if descending:
            command, start, end = "ZREVRANGEBYLEX", "+", "-"
        if after is not None:
            start = f"({after}"
        return texts(
            await self._link.command(command, keys.contexts, start, end, "LIMIT", 0, count)
        )

    def _read(self, stored: Mapping[str, str]) -> ContextRecord:
        record = ContextRecord.from_hash(stored)
        if record.expires_at is not None and record.expires_at <= self._clock():
            return replace(record, status="expired")
        return record


async def context_ids(link: RedisLink, tenant: str) -> list[str]:
    """As ``ContextIndex.context_ids``, page by page, so that a long list holds nobody up."""
    key, start, found = TenantKeys(tenant).contexts, "-", list[str]()
    while page := texts(await link.command("ZRANGEBYLEX", key, start, "+", "LIMIT", 0, _ID_PAGE)):
        found += page
        start = f"({page[-1]}"
    return found


def _matches(record: ContextRecord, status: str | None, metadata: Mapping[str, str]) -> bool:
    if status is not None and record.status != status:
        return False
    return all(record.metadata.get(name) == value for name, value in metadata.items())
