"""Questions on caches that are not in memory, or not all of them: what is read, and when."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import ContextNotReady, Overloaded
from kvkeep_service.ports import AnswerEvent, CompressionSpec, QueryRequest
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.errors import ObjectsUnavailable

from .engine.gated import PATIENCE_SECONDS
from .held_source import Reads, watch_reads
from .serving import IDLE, Service, serving
from .tiny import LONG, SHORT
from .workbench import TENANT

pytestmark = pytest.mark.anyio


@pytest.fixture
async def service(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    async with serving(stores, tiny) as started:
        yield started


@pytest.fixture
async def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return watch_reads(monkeypatch)


async def cold(service: Service, *, ratio: float = 0.3) -> QueryRequest:
    """A question on a context whose cache is in the store alone."""
    request = await service.ready(SHORT, CompressionSpec(ratio=ratio))
    await service.worker.drop(TENANT, request.cache_id)
    return request


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        # What is waited for happens in other threads, and says so to nobody.
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def at_rest(service: Service) -> None:
    """Return once nothing is being loaded."""
    await until(lambda: service.worker.stats().running_loads == 0)


def is_high(name: str, start: int) -> bool:
    """Whether a read is of bands above 0.1, of those a cache at 0.3 has."""
    return name > "kv-01.safetensors"


def stored_bytes(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in root.glob("caches/*/*/*/*")}


async def test_a_cold_question_reads_the_slabs_up_to_its_ratio_and_no_other_byte(
    service: Service, reads: Reads, tmp_path: Path
) -> None:
    request = await cold(service)
    stored = stored_bytes(tmp_path)
    manifest = stored.pop("manifest.json")
    assert sorted(stored) == [f"kv-0{band}.safetensors" for band in range(5)]
    low = await service.answer(replace(request, ratio=0.1))
    assert low.ratio == 0.1
    assert low.timings.source == "store"
    wanted = {name: stored[name] for name in sorted(stored)[:2]}
    assert reads.read_bytes == wanted
    counted = service.worker.cache_counts().loads["store"]
    assert (counted.loads, counted.read_bytes) == (1, sum(wanted.values()) + manifest)
    again = await service.answer(replace(request, ratio=0.05))
    assert again.timings.source == "resident"
    assert reads.read_bytes == wanted


async def test_a_question_that_takes_less_is_answered_before_the_rest_is_read(
    service: Service, reads: Reads
) -> None:
    request = await cold(service)
    low, high = [await service.ids(replace(request, ratio=ratio)) for ratio in (0.1, 0.3)]
    await service.worker.drop(TENANT, request.cache_id)
    reads.holds = is_high
    hasty = replace(request, ratio=0.3, min_ratio=0.1)
    answer = await service.answer(hasty)
    assert (answer.ratio, answer.token_ids) == (0.1, low)
    assert reads.held.is_set() or service.worker.stats().running_loads == 1
    assert service.worker.stats().pinned_caches == 0
    reads.released.set()
    await at_rest(service)
    later = await service.answer(hasty)
    assert (later.ratio, later.token_ids, later.timings.source) == (0.3, high, "resident")
    assert service.worker.stats() == replace(
        IDLE, resident_caches=1, resident_bytes=service.worker.stats().resident_bytes
    )


async def test_a_running_answer_keeps_its_ratio_while_more_arrives(
    service: Service, reads: Reads
) -> None:
    request = replace(await cold(service), max_tokens=24)
    low = await service.ids(replace(request, ratio=0.1))
    await service.worker.drop(TENANT, request.cache_id)
    reads.holds = is_high
    hasty = replace(request, ratio=0.3, min_ratio=0.1)
    events = service.worker.query(hasty)
    pieces = [await anext(events)]
    reads.released.set()
    await at_rest(service)
    pieces += [event async for event in events]
    answer = pieces[-1]
    assert isinstance(answer, AnswerEvent)
    assert (answer.ratio, answer.token_ids) == (0.1, low)


def damage_high(root: Path) -> None:
    for path in root.rglob("kv-04.safetensors"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def remove_high(root: Path) -> None:
    for path in root.rglob("kv-04.safetensors"):
        path.unlink()


@pytest.mark.parametrize("harm", [damage_high, remove_high])
async def test_a_bad_high_slab_answers_lower_only_where_that_is_allowed_and_is_rebuilt(
    service: Service, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    request = await cold(service)
    whole = await service.ids(request)
    low = await service.ids(replace(request, ratio=0.1))
    await service.worker.drop(TENANT, request.cache_id)
    harm(tmp_path)
    answer = await service.answer(replace(request, ratio=0.3, min_ratio=0.1))
    assert (answer.ratio, answer.token_ids) == (0.1, low)
    assert (await service.jobs.next_end()).how == "settled"
    await at_rest(service)
    assert await service.status(request) == "ready"
    assert await service.ids(request) == whole
    await service.worker.drop(TENANT, request.cache_id)
    harm(tmp_path)
    with pytest.raises(ContextNotReady):
        await service.answer(request)
    assert (await service.jobs.next_end()).how == "settled"
    assert await service.ids(request) == whole


async def test_field_14_a_failed_load_leaves_no_trace_and_later_answers_are_right(
    service: Service, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await cold(service)
    right = await service.ids(request)
    await service.worker.drop(TENANT, request.cache_id)

    def break_off(name: str, start: int) -> bool:
        if name == "kv-03.safetensors":
            raise ObjectsUnavailable("read", "away")
        return False

    reads.holds = break_off
    for least in (None, 0.3):
        with pytest.raises(ObjectsUnavailable):
            await service.answer(replace(request, min_ratio=least))
    assert service.worker.stats() == IDLE
    reads.holds = lambda name, start: False
    assert await service.ids(request) == right


async def test_field_22_prefetched_caches_are_found_and_nothing_is_held_at_idle(
    service: Service, reads: Reads
) -> None:
    request = await cold(service)
    await service.worker.prefetch(TENANT, request.cache_id, request.ratio)
    await at_rest(service)
    answer = await service.answer(request)
    assert answer.timings.source == "resident"
    await service.worker.drop(TENANT, request.cache_id)
    reads.holds = lambda name, start: True
    await service.worker.prefetch(TENANT, request.cache_id, request.ratio)
    await service.worker.prefetch(TENANT, "another", 0.3)
    with pytest.raises(Overloaded):
        await service.worker.prefetch(TENANT, "a third", 0.3)
    await service.worker.drop(TENANT, request.cache_id)
    await at_rest(service)
    assert service.worker.stats() == IDLE
    assert await service.stores.leases.readers(TENANT, request.cache_id) == 0


async def test_a_damaged_cache_is_rebuilt_when_a_prefetch_finds_it(
    service: Service, tmp_path: Path
) -> None:
    request = await cold(service)
    damage_high(tmp_path)
    await service.worker.prefetch(TENANT, request.cache_id, request.ratio)
    assert (await service.jobs.next_end()).how == "settled"
    assert await service.status(request) == "ready"
    assert (await service.answer(request)).timings.source == "resident"


async def test_a_lone_question_is_read_while_later_layers_arrive(
    service: Service, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranges so small that the layers of a tiny cache come in different ones.
    monkeypatch.setattr("kvkeep_storage.range_plan.RANGE_BYTES", 512)
    request = await cold(service)
    whole = await service.ids(request)
    await service.worker.drop(TENANT, request.cache_id)
    other = await service.ready(LONG)
    other_ids = await service.ids(other)
    # Reads are begun in the order of the layers they are needed for.
    last = reads.begun[-1]
    reads.holds = lambda name, start: (name, start) == last
    forwards = len(service.model.batches)
    asking = asyncio.create_task(service.answer(request))
    await until(lambda: len(service.model.batches) > forwards)
    # The engine waits inside the question's forward, and another question does not wait for it.
    assert service.worker._residency._shelf.find(CacheKey(TENANT, request.cache_id)) is None
    assert await service.ids(other) == other_ids
    assert not asking.done()
    reads.released.set()
    answer = await asking
    assert answer.token_ids == whole
    assert answer.timings.source == "store"


async def test_an_answer_says_whether_its_cache_came_from_the_disk_tier_or_the_store(
    stores: Stores, tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    disk = DiskTier.open(stores.objects, tmp_path_factory.mktemp("disk"), 2**30)
    async with serving(replace(stores, disk=disk), tiny) as service:
        request = await cold(service)
        sources, answers = [], []
        for ratio in (0.1, 0.1, 0.3):
            answer = await service.answer(replace(request, ratio=ratio))
            sources.append(answer.timings.source)
            answers.append(answer.token_ids)
            await at_rest(service)
            await service.worker.drop(TENANT, request.cache_id)
        assert sources[:2] == ["store", "disk"]
        assert answers[0] == answers[1]
        counted = service.worker.cache_counts().loads
        assert (counted["store"].loads, counted["disk"].loads) == (
            sources.count("store"),
            sources.count("disk"),
        )
    await disk.close()


async def test_an_answer_does_not_say_disk_when_the_copy_there_was_wrong(
    stores: Stores, tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    disk = DiskTier.open(stores.objects, folder, 2**30)
    async with serving(replace(stores, disk=disk), tiny) as service:
        request = await cold(service)
        right = await service.ids(request)
        await at_rest(service)
        await service.worker.drop(TENANT, request.cache_id)
        [manifest] = folder.glob("store-*/caches/*/*/*/manifest.json")
        manifest.write_bytes(b"{}")
        answer = await service.answer(request)
        assert (answer.token_ids, answer.timings.source) == (right, "store")
    await disk.close()


async def test_whatever_arrives_while_whatever_is_asked_every_answer_is_that_of_its_ratio(
    stores: Stores, tiny: LoadedModel, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Layers of a cache come in different reads, slowly, to a memory with room for one or two.
    monkeypatch.setattr("kvkeep_storage.range_plan.RANGE_BYTES", 2048)
    ratios = (0.05, 0.1, 0.3)
    rng = random.Random(5)
    async with serving(stores, tiny, resident_bytes=2**18) as service:
        requests = [replace(await service.ready(doc), max_tokens=4) for doc in (SHORT, LONG)]
        right = {
            (number, ratio): await service.ids(replace(request, ratio=ratio))
            for number, request in enumerate(requests)
            for ratio in ratios
        }
        reads.delay = lambda: asyncio.sleep(rng.choice((0, 0, 0.001, 0.004)))

        async def ask() -> None:
            number, ratio = rng.randrange(2), rng.choice(ratios)
            least = rng.choice((None, *(r for r in ratios if r <= ratio)))
            await asyncio.sleep(rng.random() / 20)
            request = replace(requests[number], ratio=ratio, min_ratio=least)
            if rng.random() < 0.2:
                await service.worker.drop(TENANT, request.cache_id)
            if rng.random() < 0.2:
                with suppress(Overloaded):
                    await service.worker.prefetch(TENANT, request.cache_id, ratio)
            answer = await service.answer(request)
            assert (least or ratio) <= answer.ratio <= ratio
            assert answer.token_ids == right[number, answer.ratio]

        for _ in range(6):
            asking = [asyncio.create_task(ask()) for _ in range(8)]
            await asyncio.sleep(rng.random() / 20)
            for task in asking[:2]:
                task.cancel()
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
            await at_rest(service)
            await until(lambda: service.worker.stats().running_queries == 0)
            stats = service.worker.stats()
            assert (stats.pinned_caches, stats.waiting_queries) == (0, 0)
            assert stats.resident_bytes <= 2**18
        for request in requests:
            assert await stores.leases.readers(TENANT, request.cache_id) == 0
        assert service.worker.cache_counts().failures == {}
