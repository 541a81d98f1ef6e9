"""Builds: each ends as a ready cache, a failed context or a job in the queue, and none is lost."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import BuildMismatch
from kvkeep_service.ids import new_context_id
from kvkeep_service.plan import BANDS, BuildPlan, Planner
from kvkeep_service.policies import kvzip
from kvkeep_service.policies.head_scores import HeadScores
from kvkeep_service.ports import CompressionSpec, DocumentSpec, Quantization, Span
from kvkeep_service.recovery import Recovery
from kvkeep_service.registration import Registration
from kvkeep_service.registry import Registry
from kvkeep_service.sessions import Sessions
from kvkeep_service.worker import LocalWorker
from kvkeep_storage.documents import DocumentBody, get_mirror
from kvkeep_storage.jobs import MAX_ATTEMPTS
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.records import ContextRecord

from ...support.caches import assert_equal_rows
from ...support.documents import contract
from .tiny import LONG, SHORT
from .workbench import TENANT, End, Workbench, generations

pytestmark = pytest.mark.anyio


class CountingPlanner(Planner):
    """Counts how often a stored document was planned again."""

    count = 0

    def plan_stored(self, tenant: str, body: DocumentBody) -> BuildPlan:
        self.count += 1
        return super().plan_stored(tenant, body)


async def test_a_queued_document_becomes_a_stored_and_resident_cache(
    bench: Workbench, tmp_path: Path
) -> None:
    record = await bench.register()
    assert record.status == "queued"
    bench.builder.start()
    assert await bench.jobs.next_end() == End("settled", record.id, 1)
    record = await bench.record(record.id)
    assert (record.status, record.policy_applied) == ("ready", "kvzip")
    assert record.ratios_available == (0.05, 0.1, 0.15, 0.2, 0.3)
    assert record.ratio_achieved == pytest.approx(0.3, abs=1e-3)
    assert set(record.timings) == {
        "queue_s",
        "prefill_s",
        "score_s",
        "remainder_s",
        "fidelity_s",
        "compact_s",
    }
    assert len(generations(tmp_path)) == 1
    assert bench.residency.num_caches == 1
    assert bench.residency.num_pinned == 0
    assert bench.builder.num_running == 0
    assert not await bench.stores.leases.is_building(TENANT, record.cache_id)
    assert await bench.stores.metadata.unfinished() == []


async def test_progress_is_written_as_the_engine_goes(bench: Workbench) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    while (told := await bench.record(record.id)).stage is None:
        assert told.status in ("queued", "building")
    assert (told.status, told.stage) == ("building", "prefill")
    assert 0.0 < told.fraction < 0.5
    assert bench.builder.num_running == 1
    bench.model.release()
    await bench.jobs.next_end()
    assert (await bench.record(record.id)).fraction == 1.0


async def test_a_builder_that_waits_for_work_stops_at_once(bench: Workbench) -> None:
    bench.builder.start()
    await bench.builder.stop()
    await bench.builder.stop()


async def test_a_context_of_another_identity_waits_for_its_own(
    bench: Workbench, tiny: LoadedModel
) -> None:
    record = await bench.register()
    # The same name over other weights, since the document was registered.
    changed = replace(tiny, info=replace(tiny.info, weights_digest="sha256:other"))
    planner = CountingPlanner(changed)
    another = bench.another(planner=planner)
    another.start()
    ends = [await bench.jobs.next_end() for _ in range(2 * MAX_ATTEMPTS)]
    assert {end.how for end in ends} == {"postponed"}
    await another.stop()
    assert bench.model.batches == [], "nothing was computed for it"
    assert planner.count == 1, "it is the same document every time"
    # Stopped as it claimed again, perhaps.
    await bench.jobs.void_owners()
    bench.builder.start()
    await bench.until_settled()
    assert (await bench.record(record.id)).status == "ready"


async def test_what_no_running_server_can_build_fails_and_says_what_differs(
    bench: Workbench, tiny: LoadedModel
) -> None:
    record = await bench.register()
    job = await bench.jobs.claim("away", 0)
    assert job is not None
    await bench.jobs.retry_later(job, counted=False)
    bench.jobs.wait_refused(0)
    changed = replace(tiny, info=replace(tiny.info, weights_digest="sha256:other"))
    another = bench.another(planner=Planner(changed))
    another.start()
    # The other server is heard of, and has not said that it cannot.
    ends = [await bench.jobs.next_end() for _ in range(2 * MAX_ATTEMPTS)]
    assert {end.how for end in ends} == {"postponed"}
    await bench.forget_builder("away")
    await bench.until_settled()
    await another.stop()
    failed = await bench.record(record.id)
    assert (failed.status, failed.error_code) == ("failed", "build_mismatch")
    assert failed.error_detail is not None
    assert "no running server could build it" in failed.error_detail
    assert "weights" in failed.error_detail
    assert bench.model.batches == [], "nothing was computed for it"


async def _settled_by(bench: Workbench, planner: Planner, record: ContextRecord) -> ContextRecord:
    """The record as another server leaves it, which plans like this."""
    another = bench.another(planner=planner)
    another.start()
    await bench.until_settled()
    await another.stop()
    return await bench.record(record.id)


async def test_what_another_version_scores_in_other_chunks_is_told_so(
    bench: Workbench, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await bench.register(LONG)
    bench.jobs.wait_refused(0)
    monkeypatch.setitem(kvzip.CHUNK_TOKENS, "local", 100)
    failed = await _settled_by(bench, Planner(tiny), record)
    assert (failed.status, failed.error_code) == ("failed", "build_mismatch")
    assert "policy parameters" in (failed.error_detail or "")


async def test_a_context_of_a_model_that_nobody_serves_fails_in_the_end(
    bench: Workbench, tiny: LoadedModel
) -> None:
    record = await bench.register()
    bench.jobs.wait_refused(0)
    renamed = replace(tiny, info=replace(tiny.info, name="another"))
    failed = await _settled_by(bench, Planner(renamed), record)
    assert (failed.status, failed.error_code) == ("failed", "context_model_mismatch")


async def test_a_ready_context_that_nobody_can_build_afresh_keeps_its_cache(
    bench: Workbench, tiny: LoadedModel, tmp_path: Path
) -> None:
    bench.builder.start()
    record = await bench.build()
    await bench.builder.stop()
    await bench.forget_builder("builder")
    before = generations(tmp_path)
    bench.jobs.wait_refused(0)
    await bench.stores.metadata.rebuild_context(TENANT, record.id)
    await bench.jobs.enqueue(TENANT, record.id)
    changed = replace(tiny, info=replace(tiny.info, weights_digest="sha256:other"))
    another = bench.another(planner=Planner(changed))
    another.start()
    await bench.until_settled()
    await another.stop()
    kept = await bench.record(record.id)
    assert (kept.status, kept.awaits_build, kept.error_code) == ("ready", False, None)
    assert generations(tmp_path) == before


async def test_another_calibration_is_told_before_anything_waits(
    bench: Workbench, tiny: LoadedModel
) -> None:
    def server(digest: str) -> LocalWorker:
        scores = HeadScores(((0.5, 0.25), (0.125, 0.75)), digest)
        recovery, sessions = Recovery(bench.stores, rebuilds=True), Sessions(0, 60)
        options = {"owner": digest, "max_queue": 1, "resident_bytes": 0, "head_scores": scores}
        return LocalWorker(tiny, bench.stores, recovery, sessions=sessions, **options)

    wanted = Registration(SHORT, CompressionSpec("kvzip_head", 0.6), None, {}, None, None)
    before, after = (Registry(bench.stores, server(digest)) for digest in ("older", "newer"))
    record = await before.register(TENANT, wanted)
    scores = HeadScores(((0.5, 0.25), (0.125, 0.75)), "older")
    builder = bench.another(planner=Planner(tiny, scores))
    builder.start()
    await bench.until_settled()
    await builder.stop()
    with pytest.raises(BuildMismatch, match="head scores: older then, newer here"):
        await after.rebuild(TENANT, record.id)
    assert not (await bench.record(record.id)).awaits_build
    assert (await before.rebuild(TENANT, record.id)).awaits_build


async def test_whole_heads_wait_for_a_server_that_knows_their_scores(
    bench: Workbench, tiny: LoadedModel
) -> None:
    scores = HeadScores(((0.5, 0.25), (0.125, 0.75)), "digest")
    options = {"owner": "calibrated", "max_queue": 1, "resident_bytes": 0, "head_scores": scores}
    recovery, sessions = Recovery(bench.stores, rebuilds=True), Sessions(0, 60)
    worker = LocalWorker(tiny, bench.stores, recovery, sessions=sessions, **options)
    compression = CompressionSpec("kvzip_head", 0.6)
    wanted = Registration(SHORT, compression, None, {}, None, None)
    record = await Registry(bench.stores, worker).register(TENANT, wanted)
    bench.builder.start()
    ends = [await bench.jobs.next_end() for _ in range(2 * MAX_ATTEMPTS)]
    assert {end.how for end in ends} == {"postponed"}
    await bench.builder.stop()
    await bench.jobs.void_owners()
    knowing = bench.another(planner=Planner(tiny, scores))
    knowing.start()
    await bench.until_settled()
    await knowing.stop()
    record = await bench.record(record.id)
    assert (record.status, record.policy_applied) == ("ready", "kvzip_head")


async def test_equal_documents_are_built_once(bench: Workbench, tmp_path: Path) -> None:
    first, second = await bench.register(), await bench.register()
    assert first.cache_id == second.cache_id
    bench.builder.start()
    for _ in range(2):
        await bench.jobs.next_end()
    forwards = len(bench.model.batches)
    assert {(await bench.record(one.id)).status for one in (first, second)} == {"ready"}
    assert (await bench.build()).status == "ready"
    assert len(bench.model.batches) == forwards
    assert len(generations(tmp_path)) == 1


async def test_a_registration_cut_short_beside_its_committed_cache_needs_no_build(
    bench: Workbench,
) -> None:
    bench.builder.start()
    ready = await bench.build()
    forwards = len(bench.model.batches)
    left = replace(ready, id=new_context_id(), status="queued", ready_at=None)
    await bench.stores.metadata.create_context(left)
    assert await bench.jobs.reconcile(bench.stores.metadata) == 1
    assert await bench.jobs.next_end() == End("settled", left.id, 1)
    assert (await bench.record(left.id)).status == "ready"
    assert len(bench.model.batches) == forwards
    mirror = await get_mirror(bench.stores.objects, DocumentKey(TENANT, left.id))
    assert mirror.record.status == "ready"


async def test_a_cache_that_another_process_builds_is_left_to_it(bench: Workbench) -> None:
    record = await bench.register()
    leases = bench.stores.leases
    lease = await leases.acquire_build(TENANT, record.cache_id, "elsewhere")
    assert lease is not None
    bench.builder.start()
    ends = [await bench.jobs.next_end() for _ in range(2 * MAX_ATTEMPTS)]
    assert {end.how for end in ends} == {"postponed"}
    assert bench.model.batches == []
    await leases.release(lease)
    await bench.until_settled()
    assert (await bench.record(record.id)).status == "ready"


async def test_a_context_of_another_model_is_left_to_its_servers(
    bench: Workbench, tiny: LoadedModel
) -> None:
    record = await bench.register()
    other = replace(tiny, info=replace(tiny.info, name="another-model"))
    planner = CountingPlanner(other)
    another = bench.another(planner=planner)
    another.start()
    ends = [await bench.jobs.next_end() for _ in range(2 * MAX_ATTEMPTS)]
    assert {end.how for end in ends} == {"postponed"}
    await another.stop()
    assert (await bench.record(record.id)).status == "queued"
    assert planner.count == 0


@pytest.mark.parametrize("kind", ["none", "int8", "int4", "fp8"])
async def test_a_higher_ratio_is_a_new_generation_that_keeps_older_cuts(
    bench: Workbench, kind: Quantization
) -> None:
    bench.builder.start()
    low = await bench.build(SHORT, CompressionSpec(ratio=0.27, quantization=kind))
    assert low.ratios_available == (0.05, 0.1, 0.15, 0.2, 0.27)
    before = {ratio: await bench.load(low, ratio) for ratio in (0.1, 0.27)}
    high = await bench.build(SHORT, CompressionSpec(ratio=0.6, quantization=kind))
    assert high.cache_id == low.cache_id
    assert low.quantization == high.quantization == kind
    assert high.ratios_available == (0.05, 0.1, 0.15, 0.2, 0.27, 0.3, 0.4, 0.5, 0.6)
    for ratio, old in before.items():
        new = await bench.load(high, ratio)
        assert new.cache.generation != old.cache.generation
        assert_equal_rows(new.rows, old.rows)
    low = await bench.record(low.id)
    assert (low.status, low.ratios_available) == ("ready", (0.05, 0.1, 0.15, 0.2, 0.27))
    # And a lower one later is ready at once.
    assert (
        await bench.register(SHORT, CompressionSpec(ratio=0.4, quantization=kind))
    ).status == "ready"


async def test_caches_scored_in_other_ways_are_built_beside_the_plain_one(
    bench: Workbench,
) -> None:
    bench.builder.start()
    plain = await bench.build(SHORT, CompressionSpec(ratio=0.3))
    plus = await bench.build(SHORT, CompressionSpec(ratio=0.3, normalization="kvzip_plus"))
    beside = await bench.build(SHORT, CompressionSpec(ratio=0.3, neighbours=1))
    assert len({plain.cache_id, plus.cache_id, beside.cache_id}) == 3
    rows, other = (await bench.load(plus, None)).rows, (await bench.load(plain, None)).rows
    with pytest.raises(AssertionError):
        assert_equal_rows(rows, other)


async def test_a_ratio_between_the_cuts_of_a_larger_cache_gets_a_cut_of_its_own(
    bench: Workbench,
) -> None:
    bench.builder.start()
    large = await bench.build(SHORT, CompressionSpec(ratio=0.72))
    between = await bench.build(SHORT, CompressionSpec(ratio=0.47))
    assert between.ratios_available[-1] == 0.47
    rows = (await bench.load(between, None)).rows
    assert {0.47, 0.72} <= set(rows.ratios)
    still = await bench.stores.metadata.context(TENANT, large.id)
    assert still is not None
    assert still.ratios_available[-1] == 0.72


@pytest.mark.parametrize(
    ("document", "compression", "policy"),
    [
        pytest.param(SHORT, CompressionSpec(policy="none"), "none", id="no policy"),
        pytest.param(DocumentSpec("A few words."), CompressionSpec(), "none", id="short"),
        pytest.param(
            replace(SHORT, protect=(Span(0, len(SHORT.text)),)),
            CompressionSpec(),
            "none",
            id="all protected",
        ),
    ],
)
async def test_where_nothing_is_evicted_all_is_kept(
    bench: Workbench, document: DocumentSpec, compression: CompressionSpec, policy: str
) -> None:
    bench.builder.start()
    record = await bench.build(document, compression)
    assert (record.status, record.policy_applied) == ("ready", policy)
    assert record.ratio_achieved == 1.0
    rows = (await bench.load(record, None)).rows
    assert rows.ratios == (1.0,)
    assert set(rows.counts.flatten().tolist()) == {record.tokens_total}


async def test_every_band_of_a_whole_ratio_can_be_asked_for(bench: Workbench) -> None:
    bench.builder.start()
    record = await bench.build(SHORT, CompressionSpec(ratio=1.0))
    assert record.ratios_available == BANDS


async def test_documents_of_several_contexts_are_built_in_order(bench: Workbench) -> None:
    records = [await bench.register(DocumentSpec(contract(f"No {n}", 3))) for n in range(4)]
    bench.builder.start()
    ends = [await bench.jobs.next_end() for _ in records]
    assert [end.context_id for end in ends] == [record.id for record in records]


async def test_a_ready_context_is_built_afresh_and_ready_all_the_while(
    bench: Workbench, tmp_path: Path
) -> None:
    bench.builder.start()
    record = await bench.build()
    old = await bench.stores.metadata.cache(TENANT, record.cache_id)
    rows = (await bench.load(record, None)).rows
    bench.model.hold_after(1)
    await bench.registry.rebuild(TENANT, record.id)
    await bench.held()
    assert (await bench.record(record.id)).status == "ready"
    bench.model.release()
    assert (await bench.jobs.next_end()).how == "settled"
    rebuilt = await bench.record(record.id)
    assert (rebuilt.status, rebuilt.refresh_requested_at) == ("ready", None)
    new = await bench.stores.metadata.cache(TENANT, record.cache_id)
    assert old is not None
    assert new is not None
    assert new.generation != old.generation
    assert_equal_rows((await bench.load(rebuilt, None)).rows, rows)
    assert await bench.stores.metadata.unfinished() == []


async def test_a_ready_context_that_cannot_be_built_afresh_keeps_its_cache(
    bench: Workbench, tmp_path: Path
) -> None:
    bench.builder.start()
    record = await bench.build()
    rows = (await bench.load(record, None)).rows
    await bench.builder.stop()
    await bench.registry.rebuild(TENANT, record.id)
    (tmp_path / "documents" / TENANT / record.id / "document.json").write_text("{}")
    bench.another().start()
    assert (await bench.jobs.next_end()).how == "settled"
    kept = await bench.record(record.id)
    assert (kept.status, kept.error_code, kept.refresh_requested_at) == ("ready", None, None)
    assert_equal_rows((await bench.load(kept, None)).rows, rows)
    assert await bench.stores.metadata.unfinished() == []
