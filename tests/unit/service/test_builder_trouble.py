"""Builds that meet trouble: retried, failed with a reason, or left to others; none is lost."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvkeep_service.ports import Span
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import delete_document, get_mirror
from kvkeep_storage.errors import Full, MetadataUnavailable, ObjectsUnavailable
from kvkeep_storage.jobs import MAX_ATTEMPTS, Job
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.records import ContextRecord

from ...support.registering import breaking
from ...support.stores import files_below
from .tiny import LONG, SHORT
from .workbench import TENANT, End, WatchedJobs, Workbench, generations

pytestmark = pytest.mark.anyio


async def forwards_of_a_whole_build(bench: Workbench) -> int:
    """Build the long document under another identity, with nothing else in the engine."""
    before = len(bench.model.batches)
    assert (await bench.build(replace(LONG, protect=(Span(0, 1),)))).status == "ready"
    return len(bench.model.batches) - before


async def test_stopped_in_the_middle_it_returns_to_the_queue_uncounted(
    bench: Workbench, tmp_path: Path
) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    await bench.builder.stop()
    assert await bench.jobs.next_end() == End("postponed", record.id, 1)
    assert bench.builder.num_running == 0
    assert (await bench.record(record.id)).status == "building"
    assert not await bench.stores.leases.is_building(TENANT, record.cache_id)
    bench.model.release()
    # The next process takes it from the start, as its first attempt.
    another = bench.another()
    another.start()
    assert await bench.jobs.next_end() == End("settled", record.id, 1)
    assert (await bench.record(record.id)).status == "ready"
    assert len(generations(tmp_path)) == 1
    # Of the first build there were the one forward, and the one in progress.
    forwards = len(bench.model.batches)
    assert forwards == 2 + await forwards_of_a_whole_build(bench)
    await another.stop()


@pytest.mark.parametrize("damage", ["flipped", "missing"])
async def test_a_damaged_document_fails_the_context(
    bench: Workbench, tmp_path: Path, damage: str
) -> None:
    record = await bench.register()
    path = tmp_path / DocumentKey(TENANT, record.id).body
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"payment", b"paymint", 1))
    bench.builder.start()
    assert (await bench.jobs.next_end()).how == "settled"
    await _assert_failed(bench, record, "document_corrupt")


async def test_a_build_that_meets_a_deletion_half_way_fails_nothing(bench: Workbench) -> None:
    record = await bench.register()
    key = DocumentKey(TENANT, record.id)
    await delete_document(bench.stores.objects, key)
    bench.builder.start()
    assert await bench.jobs.next_end() == End("given back", record.id, 1)
    assert (await bench.record(record.id)).status == "queued"
    # The rest of the deletion.
    await bench.registry.delete(TENANT, record.id)
    await bench.until_settled()
    assert bench.builder.counter.counts.ended == {}


async def test_a_deletion_that_died_half_way_keeps_nobody_waiting_and_is_still_one(
    bench: Workbench, tmp_path: Path
) -> None:
    record = await bench.register()
    await delete_document(bench.stores.objects, DocumentKey(TENANT, record.id))
    bench.builder.start()
    ends = [(await bench.jobs.next_end()).how for _ in range(MAX_ATTEMPTS)]
    assert ends == ["given back"] * (MAX_ATTEMPTS - 1) + ["settled"]
    failed = await bench.record(record.id)
    assert (failed.status, failed.error_code) == ("failed", "document_corrupt")
    assert failed.error_detail == "its deletion was begun and never ended: delete it again"
    # A mirror would make a loss of it.
    assert files_below(tmp_path, "documents") == []


async def test_documents_missing_from_a_store_of_others_are_waited_for(
    bench: Workbench, tmp_path: Path
) -> None:
    record = await bench.register()
    path = tmp_path / DocumentKey(TENANT, record.id).body
    hidden, identity = path.read_bytes(), (tmp_path / "store.json").read_bytes()
    path.unlink()
    (tmp_path / "store.json").unlink()
    bench.builder.start()
    # More often than there are attempts.
    ends = [await bench.jobs.next_end() for _ in range(2 * MAX_ATTEMPTS)]
    assert {end.how for end in ends} == {"postponed"}
    (tmp_path / "store.json").write_bytes(identity)
    path.write_bytes(hidden)
    await bench.until_settled()
    assert (await bench.record(record.id)).status == "ready"


async def test_an_outage_of_the_object_store_uses_up_no_attempts(bench: Workbench) -> None:
    record = await bench.register()
    away = breaking(bench.stores, "objects", "get", ObjectsUnavailable("get", "away"))
    another = bench.another(stores=away)
    another.start()
    ends = [await bench.jobs.next_end() for _ in range(2 * MAX_ATTEMPTS)]
    assert {end.how for end in ends} == {"postponed"}
    await another.stop()
    # Stopped as it claimed again, perhaps.
    await bench.jobs.void_owners()
    bench.builder.start()
    await bench.until_settled()
    assert (await bench.record(record.id)).status == "ready"


async def test_a_failing_build_is_tried_again_and_given_up_with_the_reason(
    bench: Workbench,
) -> None:
    record = await bench.register()
    bench.model.error = MemoryError("out of memory at: the text of a document")
    bench.builder.start()
    ends = [await bench.jobs.next_end() for _ in range(MAX_ATTEMPTS)]
    assert [end.how for end in ends] == ["given back"] * (MAX_ATTEMPTS - 1) + ["settled"]
    assert [end.attempts for end in ends] == [1, 2, 3]
    failed = await _assert_failed(bench, record, "build_failed")
    assert failed.error_detail == "given up after 3 attempts, the last ended with too little memory"
    # The builder and the engine go on.
    bench.model.error = None
    assert (await bench.build(LONG)).status == "ready"


async def test_a_full_store_fails_no_context_and_builds_wait_for_space(bench: Workbench) -> None:
    record = await bench.register()
    full = breaking(bench.stores, "objects", "put", Full("kv-00.safetensors", 10))
    another = bench.another(stores=full)
    another.start()
    assert (await bench.jobs.next_end()).how == "postponed"
    forwards_of_one_build = len(bench.model.batches)
    for _ in range(MAX_ATTEMPTS):
        assert (await bench.jobs.next_end()).how == "postponed"
    await another.stop()
    assert len(bench.model.batches) == forwards_of_one_build > 0
    assert another.space.is_full
    assert (await bench.record(record.id)).status in ("queued", "building")
    # It was there for the first questions, had there been any.
    assert bench.residency.num_caches == 0
    bench.builder.start()
    await bench.until_settled()
    assert (await bench.record(record.id)).status == "ready"


async def test_after_too_many_crashes_the_context_fails_without_another_try(
    bench: Workbench,
) -> None:
    record = await bench.register()
    for _ in range(MAX_ATTEMPTS):
        job = await bench.jobs.claim("crashed", 0)
        assert job is not None
        await bench.jobs.void_owners()
    bench.builder.start()
    assert await bench.jobs.next_end() == End("settled", record.id, MAX_ATTEMPTS + 1)
    await _assert_failed(bench, record, "build_failed")
    assert bench.model.batches == []


async def test_a_context_deleted_in_the_middle_leaves_nothing(
    bench: Workbench, tmp_path: Path
) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    await bench.registry.delete(TENANT, record.id)
    bench.model.release()
    assert await bench.jobs.next_end() == End("settled", record.id, 1)
    assert files_below(tmp_path, "caches") == []
    assert files_below(tmp_path, "documents") == []
    assert bench.residency.num_caches == 0
    assert (await bench.build(SHORT)).status == "ready"


async def test_a_cache_deleted_between_commit_and_adoption_is_not_kept_in_memory(
    bench: Workbench, tmp_path: Path
) -> None:
    record = await bench.register()

    async def deleting(answer: Any) -> Any:
        await bench.registry.delete(TENANT, record.id)
        return answer

    another = bench.another(stores=_after(bench.stores, "metadata", "flip", deleting))
    another.start()
    assert (await bench.jobs.next_end()).how == "settled"
    await another.stop()
    assert bench.residency.num_caches == 0
    assert bench.residency.size_bytes == 0
    # Its bytes go once the builder has given its lease back, which nothing tells.
    async with asyncio.timeout(60):
        while files_below(tmp_path, "caches"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_build_that_lost_its_lease_is_abandoned_and_never_committed(
    bench: Workbench, tmp_path: Path
) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    await bench.stores.leases.void_all()
    assert await bench.jobs.next_end() == End("given back", record.id, 1)
    assert generations(tmp_path) == []
    # Whoever is next, here the same process, builds it anew.
    bench.model.release()
    assert await bench.jobs.next_end() == End("settled", record.id, 2)
    assert (await bench.record(record.id)).status == "ready"
    assert len(generations(tmp_path)) == 1
    # Of the first build there were the one forward, and the one in progress.
    forwards = len(bench.model.batches)
    assert forwards == 2 + await forwards_of_a_whole_build(bench)


async def test_a_job_taken_over_by_another_is_not_touched(bench: Workbench) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    await bench.jobs.void_owners()
    taken = await bench.jobs.claim("elsewhere", 0)
    assert taken is not None
    assert (await bench.jobs.next_end()).how == "given back"
    # Given back by who no longer had it: it still is the other's.
    await bench.jobs.heartbeat(taken, "elsewhere")
    assert (await bench.record(record.id)).status == "building"
    assert not await bench.stores.leases.is_building(TENANT, record.cache_id)


async def test_the_last_attempt_that_lost_its_lease_does_not_fail_what_another_builds(
    bench: Workbench,
) -> None:
    record = await bench.register(LONG)
    for _ in range(MAX_ATTEMPTS - 1):
        await bench.jobs.claim("crashed", 0)
        await bench.jobs.void_owners()
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    await bench.stores.leases.void_all()
    lease = await bench.stores.leases.acquire_build(TENANT, record.cache_id, "elsewhere")
    assert lease is not None
    assert await bench.jobs.next_end() == End("given back", record.id, MAX_ATTEMPTS)
    for _ in range(3):
        assert (await bench.jobs.next_end()).how == "postponed"
    assert (await bench.record(record.id)).status == "building"


async def test_an_engine_that_stops_uses_up_no_attempt(bench: Workbench) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    assert not bench.scheduler.stop(deadline_seconds=0)
    bench.model.release()
    assert await bench.jobs.next_end() == End("postponed", record.id, 1)
    # Nor does one that has stopped.
    assert (await bench.jobs.next_end()).how == "postponed"


async def test_an_answer_lost_in_the_commit_is_looked_for_in_the_record(
    bench: Workbench, tmp_path: Path
) -> None:
    record = await bench.register()

    async def lost(_: Any) -> None:
        raise MetadataUnavailable("redis script", "no reply")

    another = bench.another(stores=_after(bench.stores, "metadata", "flip", lost))
    another.start()
    assert await bench.jobs.next_end() == End("postponed", record.id, 1)
    assert (await bench.jobs.next_end()).how == "settled"
    await another.stop()
    assert (await bench.record(record.id)).status == "ready"
    assert len(generations(tmp_path)) == 1


async def test_a_queue_in_trouble_of_any_kind_is_asked_again(bench: Workbench) -> None:
    record = await bench.register()
    troubles: list[Exception] = [MetadataUnavailable("redis", "away"), TypeError("unforeseen")]

    class TroubledJobs(WatchedJobs):
        async def claim(self, owner: str, block_seconds: float) -> Job | None:
            if troubles:
                raise troubles.pop()
            return await super().claim(owner, block_seconds)

    jobs = TroubledJobs(bench.stores.metadata)
    another = bench.another(stores=replace(bench.stores, jobs=jobs))
    another.start()
    assert await jobs.next_end() == End("settled", record.id, 1)
    await another.stop()
    assert troubles == []


async def _assert_failed(bench: Workbench, record: ContextRecord, code: str) -> ContextRecord:
    failed = await bench.record(record.id)
    assert (failed.status, failed.error_code) == ("failed", code)
    mirror = await get_mirror(bench.stores.objects, DocumentKey(TENANT, record.id))
    assert mirror.record.error_code == code
    assert await bench.jobs.claim("test", 0) is None
    return failed


def _after(stores: Stores, store: str, method: str, then: Callable[[Any], Any]) -> Stores:
    """The same stores; what one of their methods answers goes through ``then`` first."""

    class Between:
        def __getattr__(self, name: str) -> Any:
            inner = getattr(getattr(stores, store), name)
            if name != method:
                return inner

            async def call(*args: Any, **named: Any) -> Any:
                return await then(await inner(*args, **named))

            return call

    between: Any = Between()
    return replace(stores, **{store: between})
