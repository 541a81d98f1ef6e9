"""After the kills: what a last worker must be able to finish, and what must be true then.

``finish`` does what the living would have done; ``judge`` looks at all that is left; ``empty``
deletes everything, after which nothing may be left at all.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvkeep_storage import durable, keys
from kvkeep_storage.documents import mirror_context
from kvkeep_storage.errors import NotFound, StorageError
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.manifest import Manifest
from kvkeep_storage.quotas import Usage
from kvkeep_storage.records import ContextRecord
from kvkeep_storage.redis_keys import BUILDS, LEASE_PATTERN

from .building import GIVEN_UP, work
from .notes import Told
from .storage_calls import LEASE_SECONDS, Calls
from .synthetic import TENANTS
from .victim import check_load

_FINISH_SECONDS = 60.0
_EXPIRY_SECONDS_MAX = 2.0
# Whatever the dead held runs out within twelve seconds.
_POLL_SECONDS = 0.1
_HELD_POLLS_MAX = 120


async def finish(calls: Calls, told: Told) -> None:
    """Do what the living would have done: repeat cut deletions, finish builds, sweep."""
    await asyncio.sleep(_EXPIRY_SECONDS_MAX)
    for _ in range(_HELD_POLLS_MAX):
        if not await _leases(calls):
            break
        await asyncio.sleep(_POLL_SECONDS)
    for tenant, context_id in sorted(told.deleting - told.deleted):
        await calls.remove(tenant, context_id)
    stores = calls.stores
    if any(what.startswith("register met") for what in told.counts):
        await _remove_unregistered(calls, told)
    await _mirror_unregistered(calls, told)
    await _ask_all(calls)
    give_up_at = time.monotonic() + _FINISH_SECONDS
    while time.monotonic() < give_up_at:
        await stores.jobs.reconcile(stores.metadata)
        while job := await stores.jobs.claim("the last worker", LEASE_SECONDS):
            await work(calls, job)
        if not await _queue_length(calls):
            break
    await replace(calls, cap_bytes=None).sweep(grace_seconds=0)
    await calls.collect_lone_documents()


async def _ask_all(calls: Calls) -> None:
    """Have built again what sweeps have taken to keep the store under its cap."""
    for tenant in TENANTS:
        for record in (await calls.stores.metadata.contexts(tenant, limit=1000)).records:
            if record.status == "ready" and calls.cap_bytes is not None:
                with suppress(NotFound):
                    await check_load(calls, record, record.ratio)


async def _remove_unregistered(calls: Calls, told: Told) -> None:
    """Delete what refused registrations could not take back from a store that failed again."""
    for tenant in TENANTS:
        for record in (await calls.stores.metadata.contexts(tenant, limit=1000)).records:
            if (tenant, record.id) not in told.registered:
                await calls.remove(tenant, record.id)


async def _mirror_unregistered(calls: Calls, told: Told) -> None:
    """Write what a registration and a commit, killed one after the other, have both left to do.

    Nobody was told of such a context, so it need not outlast its record; `verify --repair` does
    the same.
    """
    for tenant in TENANTS:
        for record in (await calls.stores.metadata.contexts(tenant, limit=1000)).records:
            if (tenant, record.id) not in told.registered:
                key = DocumentKey(tenant, record.id)
                await mirror_context(calls.stores.objects, calls.stores.metadata, key)


@dataclass(slots=True)
class Verdict:
    """Everything found to be wrong; ``checked_loads`` counts what was right."""

    findings: list[str] = field(default_factory=list)
    checked_loads: int = 0
    ready: int = 0
    failed: int = 0


async def judge(calls: Calls, told: Told) -> Verdict:
    """Look at everything that is left, records and files."""
    verdict = Verdict(findings=list(told.wrong))
    records = {
        (record.tenant, record.id): record
        for tenant in TENANTS
        for record in (await calls.stores.metadata.contexts(tenant, limit=1000)).records
    }
    for record in records.values():
        await _judge_context(calls, told, record, verdict)
    for context in sorted(told.must_exist - set(records)):
        verdict.findings.append(f"{context}: acknowledged, and lost")
    for context in sorted(told.must_be_ready & set(records)):
        if records[context].status != "ready":
            status, code = records[context].status, records[context].error_code
            verdict.findings.append(f"{context}: was ready, and is {status} {code}")
    for context in sorted(told.deleted & set(records)):
        verdict.findings.append(f"{context}: deleted, and there again")
    await _judge_documents(calls, set(records), verdict)
    await _judge_caches(calls, verdict)
    await _judge_leftovers(calls, verdict)
    verdict.findings += [f"verify: {problem}" async for problem in calls.problems()]
    return verdict


async def empty(calls: Calls) -> list[str]:
    """Delete every context; return what is left of anything."""
    metadata = calls.stores.metadata
    for tenant in TENANTS:
        for record in (await metadata.contexts(tenant, limit=1000)).records:
            await calls.remove(tenant, record.id)
    # Later starts remove what a start leaves that is killed while it tries the store out.
    ours = (keys.STORE, f"{keys.CHECKS}/")
    left = [name for name in await calls.files() if not name.startswith(ours)]
    charges = {tenant: await metadata.usage(tenant) for tenant in TENANTS}
    left += [f"{tenant}: {usage}" for tenant, usage in charges.items() if usage != Usage(0, 0, 0)]
    pattern = LEASE_PATTERN.partition("lease")[0] + "*"
    return left + [key for key in await metadata.link.keys(pattern) if not key.endswith(":fence")]


async def _judge_context(calls: Calls, told: Told, record: ContextRecord, verdict: Verdict) -> None:
    name = f"{record.tenant}/{record.id}"
    if record.awaits_build:
        verdict.findings.append(f"{name}: forgotten as {record.status}")
    elif record.status == "failed":
        verdict.failed += 1
        if record.error_code != GIVEN_UP:
            verdict.findings.append(f"{name}: failed with {record.error_code}")
    elif record.status == "expired":
        verdict.findings.append(f"{name}: expired, and not swept")
    else:
        verdict.ready += 1
        for ratio in record.ratios_available:
            try:
                await check_load(calls, record, ratio)
                verdict.checked_loads += 1
            except (AssertionError, StorageError) as error:
                verdict.findings.append(f"{name} at {ratio}: {type(error).__name__}: {error}")


async def _judge_documents(calls: Calls, contexts: set[tuple[str, str]], verdict: Verdict) -> None:
    """Exactly the live contexts have documents and mirrors."""
    paths = [name.split("/") for name in await calls.files(keys.DOCUMENTS)]
    for name in ("document.json", "context.json"):
        owners = {(path[1], path[2]) for path in paths if path[3] == name}
        for context in sorted(contexts - owners):
            verdict.findings.append(f"{context}: its {name} is missing")
        for context in sorted(owners - contexts):
            verdict.findings.append(f"{context}: is gone, its {name} is not")


async def _judge_caches(calls: Calls, verdict: Verdict) -> None:
    """Exactly the files that records name are there."""
    named = set()
    for tenant in TENANTS:
        for cache_id, generation in await calls.stores.metadata.live_generations(tenant):
            key = GenerationKey(tenant, cache_id, generation)
            named.add(key.manifest)
            try:
                manifest = Manifest.decode(await calls.stores.objects.get(key.manifest))
            except NotFound:
                continue
            named |= {key.slab(band) for band in range(len(manifest.slabs))}
    found = set(await calls.files(keys.CACHES))
    verdict.findings += [f"{name}: named by nobody" for name in sorted(found - named)]
    verdict.findings += [f"{name}: missing" for name in sorted(named - found)]


async def _judge_leftovers(calls: Calls, verdict: Verdict) -> None:
    stores = calls.stores
    temporary = [n for n in await calls.files() if durable.is_temporary(n.rpartition("/")[2])]
    verdict.findings += [f"{name}: left of a write" for name in temporary]
    for key in await _leases(calls):
        verdict.findings.append(f"{key}: a lease of nobody")
    if length := await _queue_length(calls):
        verdict.findings.append(f"{length} jobs are left in the queue")
    for tenant in TENANTS:
        contexts = (await stores.metadata.contexts(tenant, limit=1000)).records
        wanted = {record.cache_id for record in contexts}
        stored_bytes = 0
        for cache_id, _ in await stores.metadata.live_generations(tenant):
            if cache_id not in wanted:
                verdict.findings.append(f"{tenant}/{cache_id}: a record of a cache for nobody")
            cache = await stores.metadata.cache(tenant, cache_id)
            stored_bytes += cache.stored_bytes if cache else 0
        usage = await stores.metadata.usage(tenant)
        if usage != Usage(len(contexts), 0, stored_bytes):
            verdict.findings.append(f"{tenant}: charged {usage}, has {stored_bytes} bytes")


async def _leases(calls: Calls) -> list[str]:
    return await calls.stores.metadata.link.keys(LEASE_PATTERN)


async def _queue_length(calls: Calls) -> int:
    return int(str(await calls.stores.metadata.link.command("XLEN", BUILDS)))
