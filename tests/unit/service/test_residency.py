"""Caches in memory: loaded once, shared, never taken from a query, gone when nobody wants them."""

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest

from kvkeep_service.bringing import Brought, Receiver
from kvkeep_service.residency import Residency
from kvkeep_service.shelf import CacheKey
from kvkeep_storage.errors import NotFound, ObjectsUnavailable

from .loads import ROW_BYTES, Asker, Store, a_context

pytestmark = pytest.mark.anyio

A, B, C = (CacheKey("acme", name) for name in "abc")


@pytest.fixture
async def store() -> Store:
    return Store()


@pytest.fixture
async def residency(store: Store) -> Residency:
    return Residency(store.bring, budget_bytes=25 * ROW_BYTES, on_failure=unheard)


def unheard(key: CacheKey, error: Exception) -> None:
    raise AssertionError(f"{key} failed with nobody to hear it") from error


def counts(residency: Residency) -> tuple[int, int, int]:
    """Caches found, caches in use, rows held."""
    return residency.num_caches, residency.num_pinned, residency.size_bytes // ROW_BYTES


async def test_a_cache_is_loaded_once_and_found_afterwards(
    residency: Residency, store: Store
) -> None:
    context = a_context()
    first = Asker(residency, A)
    await store.finish(context)
    pinned = await first.pinned()
    assert (pinned.context, pinned.source) == (context, "store")
    second = Asker(residency, A)
    pinned = await second.pinned()
    assert (pinned.context, pinned.source) == (context, "resident")
    assert counts(residency) == (1, 1, 10)
    await first.let_go()
    assert counts(residency) == (1, 1, 10)
    await second.let_go()
    assert counts(residency) == (1, 0, 10)
    assert store.calls == [A]


async def test_who_asks_during_a_load_shares_it_and_the_entry(
    residency: Residency, store: Store
) -> None:
    askers = [Asker(residency, A) for _ in range(5)]
    await store.finish(a_context())
    assert {id((await asker.pinned()).context) for asker in askers} == {
        id((await askers[0].pinned()).context)
    }
    assert store.calls == [A]
    assert counts(residency) == (1, 1, 10)
    for asker in askers:
        await asker.let_go()
    assert counts(residency) == (1, 0, 10)


async def test_one_waiter_that_goes_away_does_not_take_the_load_from_the_others(
    residency: Residency, store: Store
) -> None:
    first, second, third = (Asker(residency, A) for _ in range(3))
    await store.started.wait()
    await first.cancel()
    await third.cancel()
    await store.finish(a_context())
    assert (await second.pinned()).source == "store"
    assert (store.calls, store.cancelled) == ([A], [])
    await second.let_go()
    assert counts(residency) == (1, 0, 10)


async def test_a_load_that_nobody_waits_for_any_more_ends_and_leaves_nothing(
    residency: Residency, store: Store
) -> None:
    askers = [Asker(residency, A) for _ in range(2)]
    await store.started.wait()
    store.started.clear()
    for asker in askers:
        await asker.cancel()
    again = Asker(residency, A)
    await store.finish(a_context())
    await again.pinned()
    assert (store.calls, store.cancelled) == ([A, A], [A])
    await again.let_go()


async def test_a_load_done_as_its_only_waiter_goes_away_is_no_hidden_memory(
    residency: Residency, store: Store
) -> None:
    asker = Asker(residency, A)
    await store.finish(a_context())
    await asker.cancel()
    assert counts(residency) == (1, 0, 10)
    again = Asker(residency, A)
    assert (await again.pinned()).source == "resident"
    await again.let_go()


async def test_a_failed_load_is_told_to_all_who_waited_and_to_nobody_later(
    residency: Residency, store: Store
) -> None:
    askers = [Asker(residency, A) for _ in range(3)]
    trouble = ObjectsUnavailable("get", "away")
    await store.finish(trouble)
    for asker in askers:
        with pytest.raises(ObjectsUnavailable) as told:
            await asker.pinned()
        assert told.value is trouble
    assert counts(residency) == (0, 0, 0)
    later = Asker(residency, A)
    await store.finish(a_context())
    assert (await later.pinned()).source == "store"
    await later.let_go()


async def test_the_least_recently_used_goes_first_and_none_in_use(residency: Residency) -> None:
    for key in (A, B):
        residency.adopt(key, a_context())
    async with residency.pinned(A, 0.3):
        pass
    residency.adopt(C, a_context())
    assert counts(residency) == (2, 0, 20)
    async with residency.pinned(A, 0.3) as pinned:
        assert pinned.source == "resident"
        # B went; now A is in use, so C has to go for it.
        residency.adopt(B, a_context())
        assert counts(residency) == (2, 1, 20)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(residency.pinned(B, 0.3))
            residency.adopt(C, a_context(30))
            # Nothing that is not in use is left, and those in use stay.
            assert counts(residency) == (2, 2, 20)
    assert counts(residency) == (2, 0, 20)


async def test_more_than_the_budget_is_held_while_it_is_in_use_only(
    residency: Residency, store: Store
) -> None:
    askers = []
    for key in (A, B, C):
        askers.append(Asker(residency, key))
        await store.finish(a_context(20))
        await askers[-1].pinned()
    assert counts(residency) == (3, 3, 60)
    for asker, left in zip(askers, (40, 20, 20), strict=True):
        await asker.let_go()
        assert residency.size_bytes == left * ROW_BYTES
    assert counts(residency) == (1, 0, 20)


async def test_without_a_budget_a_cache_serves_its_query_and_goes(store: Store) -> None:
    residency = Residency(store.bring, budget_bytes=0, on_failure=unheard)
    asker = Asker(residency, A)
    await store.finish(a_context())
    await asker.pinned()
    assert counts(residency) == (1, 1, 10)
    await asker.let_go()
    assert counts(residency) == (0, 0, 0)


async def test_field_18_a_dropped_cache_stays_with_its_query_and_is_found_by_nobody(
    residency: Residency, store: Store
) -> None:
    residency.adopt(A, a_context())
    asker = Asker(residency, A)
    held = await asker.pinned()
    residency.drop(A)
    assert counts(residency) == (0, 1, 10)
    other = Asker(residency, A)
    await store.finish(a_context())
    assert (await other.pinned()).context is not held.context
    assert counts(residency) == (1, 2, 20)
    await asker.let_go()
    assert counts(residency) == (1, 1, 10)
    await other.let_go()
    residency.drop(A)
    residency.drop(A)
    assert counts(residency) == (0, 0, 0)


async def test_dropped_during_the_load_it_serves_who_waited_once_and_is_not_kept(
    residency: Residency, store: Store
) -> None:
    waiting = [Asker(residency, A) for _ in range(2)]
    await store.started.wait()
    residency.drop(A)
    await store.finish(a_context())
    contexts = [(await asker.pinned()).context for asker in waiting]
    assert contexts[0] is contexts[1]
    assert counts(residency) == (0, 1, 10)
    later = Asker(residency, A)
    await store.finish(a_context())
    assert (await later.pinned()).context is not contexts[0]
    assert store.calls == [A, A]
    for asker in (*waiting, later):
        await asker.let_go()
    assert counts(residency) == (1, 0, 10)


async def test_a_built_cache_replaces_an_older_one_that_stays_with_its_query(
    residency: Residency,
) -> None:
    old, new = a_context(5), a_context(8, ratios=(0.3, 0.5))
    residency.adopt(A, old)
    asker = Asker(residency, A)
    assert (await asker.pinned()).context is old
    residency.adopt(A, new)
    assert counts(residency) == (1, 1, 13)
    async with residency.pinned(A, 0.3) as pinned:
        assert pinned.context is new
        assert counts(residency) == (1, 2, 13)
    await asker.let_go()
    assert counts(residency) == (1, 0, 8)


async def test_a_load_does_not_replace_more_that_was_built_meanwhile(
    residency: Residency, store: Store
) -> None:
    asker = Asker(residency, A, ratio=0.3)
    await store.started.wait()
    built = a_context(8, ratios=(0.3, 0.5))
    residency.adopt(A, built)
    await store.finish(a_context(5))
    assert (await asker.pinned()).context is built
    await asker.let_go()
    assert counts(residency) == (1, 0, 8)


async def test_a_resident_cache_that_holds_too_little_is_loaded_again(
    residency: Residency, store: Store
) -> None:
    residency.adopt(A, a_context(5))
    asker = Asker(residency, A, ratio=0.5)
    await store.finish(a_context(8, ratios=(0.3, 0.5)))
    assert (await asker.pinned()).context.ratios == (0.3, 0.5)
    await asker.let_go()
    assert counts(residency) == (1, 0, 8)


async def test_a_resident_cache_that_is_not_cut_at_the_ratio_is_loaded_again(
    residency: Residency, store: Store
) -> None:
    # Never rounded up: the answer would depend on what others had asked for.
    residency.adopt(A, a_context(8, ratios=(0.5,)))
    asker = Asker(residency, A, ratio=0.3)
    await store.finish(a_context(8, ratios=(0.3, 0.5)))
    assert (await asker.pinned()).context.ratios == (0.3, 0.5)
    await asker.let_go()


async def test_a_store_that_holds_too_little_is_as_if_it_held_nothing(
    residency: Residency, store: Store
) -> None:
    asker = Asker(residency, A, ratio=0.5)
    await store.finish(a_context(5))
    with pytest.raises(NotFound):
        await asker.pinned()
    assert residency.num_pinned == 0


async def test_an_error_of_the_query_lets_go_of_the_cache(residency: Residency) -> None:
    residency.adopt(A, a_context())
    with pytest.raises(KeyError):
        async with residency.pinned(A, 0.3):
            raise KeyError("broken")
    assert counts(residency) == (1, 0, 10)


async def test_nothing_is_in_use_after_any_mixture_of_queries(store: Store) -> None:
    rng = random.Random(3)

    ratios = (0.1, 0.3, 0.5)
    failures: list[Exception] = []

    async def some_time() -> None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            raise ObjectsUnavailable("get", "away")

    async def bring(key: CacheKey, ratio: float, first_ratio: float, receiver: Receiver) -> Brought:
        await some_time()
        context = a_context(rng.randint(1, 20), ratios[: ratios.index(ratio) + 1])
        receiver.room(context.size_bytes)
        await some_time()
        if rng.random() < 0.5:
            bands = ratios.index(first_ratio) + 1
            receiver.usable(replace(context, ratios=ratios[:bands]), "store")
            await some_time()
            receiver.first()
        await some_time()
        return Brought(context, "store", 1)

    residency = Residency(
        bring,
        budget_bytes=25 * ROW_BYTES,
        on_failure=lambda _, error: failures.append(error),
    )

    async def ask() -> None:
        ratio = rng.choice(ratios)
        lowest = rng.choice((None, rng.choice(ratios[: ratios.index(ratio) + 1])))
        with suppress(ObjectsUnavailable, NotFound):
            async with residency.pinned(rng.choice((A, B, C)), ratio, lowest) as pinned:
                assert (lowest or ratio) <= pinned.ratio <= ratio
                assert pinned.ratio in pinned.context.ratios
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)

    for _ in range(200):
        askers = [asyncio.create_task(ask()) for _ in range(8)]
        for asker in askers:
            await asyncio.sleep(0)
            match rng.randrange(5):
                case 0:
                    asker.cancel()
                case 1:
                    residency.drop(rng.choice((A, B, C)))
                case 2:
                    residency.adopt(rng.choice((A, B, C)), a_context(rng.randint(1, 20)))
                case 3:
                    residency.prefetch(rng.choice((A, B, C)), rng.choice(ratios))
        outcomes = await asyncio.gather(*askers, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
        for _ in range(40):
            await asyncio.sleep(0)
        assert residency.num_loads == 0
        assert residency.num_pinned == 0
        assert residency.size_bytes <= 25 * ROW_BYTES
    assert failures
