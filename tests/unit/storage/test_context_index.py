import asyncio
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from kvkeep_storage.errors import (
    Invalid,
    RecordCorrupt,
)
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.redis_keys import TenantKeys

from .samples import TENANT, a_context, stored

pytestmark = pytest.mark.anyio
NOW = 1_790_000_500.75
KEYS = TenantKeys(TENANT)


async def test_a_tenant_does_not_see_anothers_context(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    assert await metadata.context("other", "ctx_01") is None
    assert (await metadata.contexts("other", limit=10)).records == ()
    assert not (await metadata.delete_context("other", "ctx_01")).existed
    assert (await stored(metadata, "ctx_01")).id == "ctx_01"


async def test_a_damaged_record_is_an_error_and_not_half_a_context(
    metadata: Metadata, redis: Redis
) -> None:
    await metadata.create_context(a_context())
    await redis.hdel(KEYS.context("ctx_01"), "ratio")
    with pytest.raises(RecordCorrupt, match="ratio"):
        await metadata.context(TENANT, "ctx_01")


async def test_a_context_reads_as_expired_before_anything_sweeps_it(metadata: Metadata) -> None:
    await metadata.create_context(a_context("ctx_01", expires_at=time.time() - 1))
    await metadata.create_context(a_context("ctx_02", expires_at=time.time() + 1000))
    assert (await stored(metadata, "ctx_01")).status == "expired"
    assert (await stored(metadata, "ctx_02")).status == "queued"
    page = await metadata.contexts(TENANT, limit=10, status="expired")
    assert [record.id for record in page.records] == ["ctx_01"]


async def test_the_sweeper_is_told_what_expired_up_to_its_limit(metadata: Metadata) -> None:
    for tenant in ("a", "b"):
        for number in range(3):
            await metadata.create_context(
                a_context(f"ctx_{number}", tenant=tenant, expires_at=NOW + number)
            )
    assert await metadata.expired(NOW - 1, 10) == []
    assert await metadata.expired(NOW, 10) == [("a", "ctx_0"), ("b", "ctx_0")]
    assert await metadata.expired(NOW + 9, 4) == [
        ("a", "ctx_0"),
        ("a", "ctx_1"),
        ("a", "ctx_2"),
        ("b", "ctx_0"),
    ]
    assert await metadata.expired(NOW + 9, 0) == []


async def walk(
    table: Metadata, limit: int, *, descending: bool = False, **filters: Any
) -> list[str]:
    ids: list[str] = []
    after: str | None = None
    while True:
        page = await table.contexts(
            TENANT, limit=limit, after=after, descending=descending, **filters
        )
        assert len(page.records) <= limit
        ids += [record.id for record in page.records]
        if not page.has_more:
            return ids
        assert len(page.records) == limit
        after = ids[-1]


@pytest.mark.parametrize("count", [0, 1, 3, 99, 100, 101, 205])
async def test_every_page_size_lists_each_context_once_in_order(
    metadata: Metadata, count: int
) -> None:
    ids = [f"ctx_{number:04}" for number in range(count)]
    await asyncio.gather(*(metadata.create_context(a_context(item)) for item in reversed(ids)))
    for limit in (1, 7, 100, 1000) if count < 100 else (50, 100, 1000):
        assert await walk(metadata, limit) == ids
        assert await walk(metadata, limit, descending=True) == ids[::-1]


async def test_pages_are_right_when_contexts_are_deleted_between_them(metadata: Metadata) -> None:
    ids = [f"ctx_{number:02}" for number in range(10)]
    for context_id in ids:
        await metadata.create_context(a_context(context_id))
    first = await metadata.contexts(TENANT, limit=4)
    assert [record.id for record in first.records] == ids[:4]
    # One already seen, the cursor itself, and one still to come.
    for gone in (ids[0], ids[3], ids[5]):
        await metadata.delete_context(TENANT, gone)
    second = await metadata.contexts(TENANT, limit=4, after=ids[3])
    assert [record.id for record in second.records] == [ids[4], ids[6], ids[7], ids[8]]
    assert second.has_more
    last = await metadata.contexts(TENANT, limit=4, after=ids[8])
    assert ([record.id for record in last.records], last.has_more) == ([ids[9]], False)


async def test_a_list_is_filtered_by_status_and_by_every_metadata_pair(metadata: Metadata) -> None:
    for number in range(250):
        await metadata.create_context(
            a_context(
                f"ctx_{number:03}",
                status="failed" if number % 2 else "queued",
                metadata={"tens": str(number // 10), "rest": str(number % 10)},
            )
        )
    assert await walk(metadata, 3, status="queued", metadata={"tens": "24"}) == [
        "ctx_240",
        "ctx_242",
        "ctx_244",
        "ctx_246",
        "ctx_248",
    ]
    assert await walk(metadata, 3, metadata={"tens": "24", "rest": "1"}) == ["ctx_241"]
    assert await walk(metadata, 3, metadata={"tens": "24", "other": "1"}) == []
    assert await walk(metadata, 3, status="ready") == []
    assert len(await walk(metadata, 60, status="failed")) == 125


async def test_a_page_of_nothing_is_refused(metadata: Metadata) -> None:
    with pytest.raises(Invalid, match="limit"):
        await metadata.contexts(TENANT, limit=0)
