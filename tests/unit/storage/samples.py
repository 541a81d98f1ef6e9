"""Records for tests: valid ones, with whatever the test is about put in."""

from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import BuildLease, CacheRecord, ContextRecord

TENANT = "acme"
CACHE = "c" * 64

_CONTEXT = ContextRecord(
    tenant=TENANT,
    id="ctx_01",
    cache_id=CACHE,
    model="smol",
    status="queued",
    created_at=1_790_000_000.123456,
    tokens_document=900,
    tokens_protected=12,
    tokens_total=930,
    policy="kvzip",
    policy_applied="kvzip",
    ratio=0.3,
    scoring="local",
    quantization="none",
    full_bytes=1_000_000,
)
_CACHE = CacheRecord(
    tenant=TENANT,
    cache_id=CACHE,
    generation="gen1",
    manifest_sha256="a" * 64,
    ratio=0.3,
    ratio_achieved=0.3001,
    ratios=(0.05, 0.1, 0.15, 0.2, 0.3),
    policy_applied="kvzip",
    stored_bytes=300_123,
    model="smol",
    committed_at=1_790_000_100.5,
    timings={"prefill_ms": 12.5, "score_ms": 30.25},
)


def a_context(context_id: str = "ctx_01", **changes: Any) -> ContextRecord:
    return replace(_CONTEXT, id=context_id, **changes)


def a_cache(**changes: Any) -> CacheRecord:
    return replace(_CACHE, **changes)


async def stored(metadata: Metadata, context_id: str, tenant: str = TENANT) -> ContextRecord:
    """The context as it reads now; it must be there."""
    record = await metadata.context(tenant, context_id)
    assert record is not None
    return record


def a_lease_nobody_gave(cache_id: str = CACHE) -> BuildLease:
    return BuildLease(TENANT, cache_id, "stranger", 1)


async def every_key(redis: Redis) -> set[str]:
    """Every key that belongs to a tenant."""
    keys = [str(key) for key in await redis.keys("*")]
    return {key for key in keys if not key.startswith("{kvkeep}")}
