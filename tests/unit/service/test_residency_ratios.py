"""Loads at exactly what is asked, starts from less, and what is brought in the background."""

import asyncio
from dataclasses import replace

import pytest

from kvkeep_service.bringing import ASIDE_MAX, Brought, Receiver
from kvkeep_service.residency import Residency
from kvkeep_service.shelf import CacheKey
from kvkeep_storage.errors import Corrupt, ObjectsUnavailable

from .loads import ROW_BYTES, Asker, Store, a_context

pytestmark = pytest.mark.anyio

A, B, C = (CacheKey("acme", name) for name in "abc")
LOW = (0.1,)
HIGH = (0.1, 0.3)


@pytest.fixture
async def store() -> Store:
    return Store()


@pytest.fixture
async def failures() -> list[Exception]:
    return []


@pytest.fixture
async def residency(store: Store, failures: list[Exception]) -> Residency:
    return Residency(
        store.bring,
        budget_bytes=25 * ROW_BYTES,
        on_failure=lambda _, error: failures.append(error),
    )


def at_rest(residency: Residency) -> tuple[int, int, int, int]:
    """Caches found, caches in use, rows held, loads running."""
    rows = residency.size_bytes // ROW_BYTES
    return residency.num_caches, residency.num_pinned, rows, residency.num_loads


async def settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_a_query_loads_its_ratio_and_a_higher_one_is_loaded_anew(
    residency: Residency, store: Store
) -> None:
    low = Asker(residency, A, 0.1)
    await store.finish(a_context(3, LOW))
    held = await low.pinned()
    high = Asker(residency, A, 0.3)
    await store.finish(a_context(9, HIGH))
    assert (await high.pinned()).ratio == 0.3
    assert store.asked == [(0.1, 0.1), (0.3, 0.3)]
    # The buffers of a query that runs stay alive, and are all that is left of the older load.
    assert held.context.ratios == LOW
    assert at_rest(residency) == (1, 2, 12, 0)
    await low.let_go()
    await high.let_go()
    assert at_rest(residency) == (1, 0, 9, 0)
    async with residency.pinned(A, 0.1) as again:
        assert (again.ratio, again.source) == (0.1, "resident")


async def test_a_lower_ratio_shares_the_load_of_a_higher_one(
    residency: Residency, store: Store
) -> None:
    askers = [Asker(residency, A, ratio) for ratio in (0.3, 0.1)]
    await store.finish(a_context(9, HIGH))
    assert [(await asker.pinned()).ratio for asker in askers] == [0.3, 0.1]
    assert store.asked == [(0.3, 0.3)]
    for asker in askers:
        await asker.let_go()


async def test_less_that_is_in_memory_answers_at_once_and_the_rest_is_brought(
    residency: Residency, store: Store
) -> None:
    residency.adopt(A, a_context(3, LOW))
    asker = Asker(residency, A, 0.3, min_ratio=0.1)
    pinned = await asker.pinned()
    assert (pinned.ratio, pinned.source) == (0.1, "resident")
    await asker.let_go()
    await store.finish(a_context(9, HIGH))
    assert at_rest(residency) == (1, 0, 9, 0)
    async with residency.pinned(A, 0.3, 0.1) as later:
        assert (later.ratio, later.source) == (0.3, "resident")
    assert store.asked == [(0.3, 0.3)]


async def test_a_load_of_everything_is_not_waited_for_where_less_will_do(
    residency: Residency, store: Store
) -> None:
    patient = Asker(residency, A, 0.3)
    await store.begun()
    hasty = [Asker(residency, A, 0.3, 0.1) for _ in range(2)]
    await store.finish(a_context(3, LOW))
    assert [(await asker.pinned()).ratio for asker in hasty] == [0.1, 0.1]
    await store.end(a_context(9, HIGH), number=0)
    assert (await patient.pinned()).ratio == 0.3
    assert store.asked == [(0.3, 0.3), (0.1, 0.1)]
    for asker in (patient, *hasty):
        await asker.let_go()
    assert at_rest(residency) == (1, 0, 9, 0)


async def test_a_load_is_given_up_once_and_left_alone_while_it_cleans_up(store: Store) -> None:
    interrupted = 0
    entered, done = asyncio.Event(), asyncio.Event()

    async def bring(key: CacheKey, ratio: float, first_ratio: float, receiver: Receiver) -> Brought:
        nonlocal interrupted
        try:
            entered.set()
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            try:
                await done.wait()
            except asyncio.CancelledError:
                interrupted += 1

    residency = Residency(bring, budget_bytes=0, on_failure=lambda *_: None)
    asker = Asker(residency, A)
    await entered.wait()
    await asker.cancel()
    residency.drop(A)
    residency.adopt(B, a_context())
    await settled()
    residency.adopt(B, a_context())
    closing = asyncio.create_task(residency.close())
    await settled()
    done.set()
    await closing
    assert interrupted == 0


async def test_the_first_bands_answer_as_soon_as_they_are_there_and_the_rest_follows(
    residency: Residency, store: Store
) -> None:
    whole = a_context(9, HIGH)
    patient, hasty = Asker(residency, A, 0.3, 0.1), Asker(residency, A, 0.1)
    receiver = await store.begun()
    assert store.asked[0] == (0.3, 0.1)
    receiver.room(whole.size_bytes)
    assert not patient.task.done()
    first = replace(whole, ratios=LOW)
    receiver.usable(first, "disk")
    receiver.first()
    pinned = await patient.pinned()
    assert (pinned.context, pinned.ratio, pinned.source) == (first, 0.1, "disk")
    await patient.let_go()
    await hasty.let_go()
    # It goes on without them, and whoever comes meanwhile finds what there is.
    assert at_rest(residency) == (1, 0, 9, 1)
    async with residency.pinned(A, 0.3, 0.1) as found:
        assert (found.ratio, found.source) == (0.1, "resident")
    whole_asker = Asker(residency, A, 0.3)
    await settled()
    await store.end(whole)
    assert (await whole_asker.pinned()).ratio == 0.3
    await whole_asker.let_go()
    assert at_rest(residency) == (1, 0, 9, 0)
    assert store.asked == [(0.3, 0.1)]


async def test_layers_that_are_still_arriving_can_be_asked_by_who_waits_for_them_only(
    residency: Residency, store: Store
) -> None:
    whole = a_context(9, HIGH)
    asker = Asker(residency, A, 0.3)
    receiver = await store.begun()
    receiver.usable(whole, "store")
    assert (await asker.pinned()).context is whole
    assert residency.num_caches == 0
    assert at_rest(residency) == (0, 1, 9, 1)
    await store.end(whole)
    assert at_rest(residency) == (1, 1, 9, 0)
    await asker.let_go()
    assert at_rest(residency) == (1, 0, 9, 0)


async def test_a_question_that_ends_before_its_load_is_no_reason_to_throw_that_away(
    residency: Residency, store: Store
) -> None:
    whole = a_context(9, HIGH)
    asker = Asker(residency, A, 0.3)
    receiver = await store.begun()
    receiver.usable(whole, "store")
    receiver.first()
    await asker.pinned()
    await asker.let_go()
    await store.end(whole)
    assert at_rest(residency) == (1, 0, 9, 0)


async def test_a_load_whose_layers_nobody_uses_any_more_ends(
    residency: Residency, store: Store
) -> None:
    asker = Asker(residency, A, 0.3)
    (await store.begun()).usable(a_context(9, HIGH), "store")
    await asker.pinned()
    await asker.let_go()
    await settled()
    assert store.cancelled == [A]
    assert at_rest(residency) == (0, 0, 0, 0)


@pytest.mark.parametrize("used", [True, False])
async def test_field_14_a_load_that_fails_after_its_first_bands_leaves_no_trace(
    residency: Residency, store: Store, failures: list[Exception], used: bool
) -> None:
    whole = a_context(9, HIGH)
    asker = Asker(residency, A, 0.3, 0.1)
    receiver = await store.begun()
    receiver.usable(replace(whole, ratios=LOW), "store")
    receiver.first()
    await asker.pinned()
    if not used:
        await asker.let_go()
    wrong = Corrupt("kv-01", "its digest differs", cache_id="a", generation="g")
    await store.end(wrong)
    assert failures == [wrong]
    assert residency.num_caches == 0
    if used:
        assert at_rest(residency) == (0, 1, 9, 0)
        await asker.let_go()
    assert at_rest(residency) == (0, 0, 0, 0)
    again = Asker(residency, A, 0.1)
    await store.finish(a_context(3, LOW))
    assert (await again.pinned()).ratio == 0.1
    await again.let_go()
    assert residency.counts().misses["corrupt"] == 1


async def test_a_start_from_less_that_nobody_waits_for_any_more_ends(
    residency: Residency, store: Store
) -> None:
    asker = Asker(residency, A, 0.3, 0.1)
    (await store.begun()).room(9 * ROW_BYTES)
    await asker.cancel()
    await settled()
    assert store.cancelled == [A]
    assert at_rest(residency) == (0, 0, 0, 0)


async def test_buffers_that_cannot_grow_in_place_are_brought_twice(store: Store) -> None:
    residency = Residency(
        store.bring,
        budget_bytes=25 * ROW_BYTES,
        grows_in_place=False,
        on_failure=lambda _, error: None,
    )
    asker = Asker(residency, A, 0.3, 0.1)
    await store.finish(a_context(3, LOW))
    assert (await asker.pinned()).ratio == 0.1
    await store.finish(a_context(9, HIGH))
    assert store.asked == [(0.1, 0.1), (0.3, 0.3)]
    await asker.let_go()
    assert at_rest(residency) == (1, 0, 9, 0)


async def test_field_21_a_prefetch_is_in_memory_for_the_next_query_and_holds_nothing(
    residency: Residency, store: Store
) -> None:
    assert residency.prefetch(A, 0.3)
    assert residency.prefetch(A, 0.3)
    (await store.begun()).room(9 * ROW_BYTES)
    await store.end(a_context(9, HIGH))
    assert at_rest(residency) == (1, 0, 9, 0)
    assert residency.prefetch(A, 0.3)
    async with residency.pinned(A, 0.3) as pinned:
        assert pinned.source == "resident"
    assert store.asked == [(0.3, 0.3)]


async def test_a_query_shares_what_is_being_prefetched(residency: Residency, store: Store) -> None:
    assert residency.prefetch(A, 0.3)
    asker = Asker(residency, A, 0.3)
    await store.finish(a_context(9, HIGH))
    assert (await asker.pinned()).source == "store"
    await asker.let_go()
    assert store.calls == [A]


async def test_a_prefetch_keeps_a_load_whose_question_goes_away(
    residency: Residency, store: Store
) -> None:
    asker = Asker(residency, A, 0.3)
    await store.begun()
    assert residency.prefetch(A, 0.3)
    await asker.cancel()
    await store.end(a_context(9, HIGH))
    assert (store.calls, store.cancelled) == ([A], [])
    assert at_rest(residency) == (1, 0, 9, 0)


async def test_only_so_many_are_prefetched_at_once(residency: Residency, store: Store) -> None:
    keys = [CacheKey("acme", str(number)) for number in range(ASIDE_MAX + 1)]
    assert [residency.prefetch(key, 0.3) for key in keys] == [True] * ASIDE_MAX + [False]
    await store.begun()
    residency.drop(keys[0])
    await settled()
    assert store.cancelled == [keys[0]]
    assert residency.prefetch(keys[-1], 0.3)
    await residency.close()
    assert at_rest(residency) == (0, 0, 0, 0)


async def test_a_prefetch_displaces_nothing_in_use_and_nothing_dearer(
    residency: Residency, store: Store
) -> None:
    residency.adopt(A, a_context(20), build_seconds=60.0)
    assert residency.prefetch(B, 0.3)
    (await store.begun()).room(20 * ROW_BYTES)
    await settled()
    assert store.cancelled == [B]
    assert at_rest(residency) == (1, 0, 20, 0)
    assert residency.prefetch(B, 0.3)
    (await store.begun()).room(5 * ROW_BYTES)
    await store.end(a_context(5))
    assert at_rest(residency) == (2, 0, 25, 0)


async def test_a_prefetch_that_fails_is_told_to_no_query(
    residency: Residency, store: Store, failures: list[Exception]
) -> None:
    residency.prefetch(A, 0.3)
    trouble = ObjectsUnavailable("get", "away")
    await store.finish(trouble)
    assert failures == [trouble]
    assert at_rest(residency) == (0, 0, 0, 0)


async def test_what_is_cheap_to_bring_back_goes_before_what_was_long_in_the_making(
    residency: Residency,
) -> None:
    residency.adopt(A, a_context(10), build_seconds=60.0)
    residency.adopt(B, a_context(10), build_seconds=1.0)
    residency.adopt(C, a_context(10), build_seconds=60.0)
    async with residency.pinned(A, 0.3) as first, residency.pinned(C, 0.3) as last:
        assert (first.source, last.source) == ("resident", "resident")
    assert residency.num_caches == 2


async def test_the_reason_of_every_miss_is_counted(residency: Residency, store: Store) -> None:
    async def ask(key: CacheKey, ratio: float, context_ratios: tuple[float, ...]) -> None:
        asker = Asker(residency, key, ratio)
        await store.finish(a_context(20, context_ratios))
        await asker.pinned()
        await asker.let_go()

    await ask(A, 0.1, LOW)
    await ask(A, 0.3, HIGH)
    residency.adopt(B, a_context(20), build_seconds=3600.0)
    await ask(A, 0.1, LOW)
    residency.drop(A)
    await ask(A, 0.1, LOW)
    async with residency.pinned(B, 0.3):
        pass
    stats = residency.counts()
    assert stats.misses == {"absent": 1, "ratio": 1, "evicted": 1, "dropped": 1, "corrupt": 0}
    assert (stats.hits, stats.evictions) == (1, 3)
    assert stats.loads["store"].loads == 4
    assert stats.loads["store"].read_bytes == 4 * 20 * ROW_BYTES
