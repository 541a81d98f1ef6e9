"""Hundreds of mixed queries, half of them cancelled: all that was held is given back.

``KEPT_QUERIES=2000`` in the environment runs more of them than every run of the tests can.
"""

import asyncio
import gc
import os
import random
import threading
from dataclasses import replace

import pytest

from kvkeep_service.engine.cache import Tail
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import MemoryShort, Overloaded
from kvkeep_service.ports import CompressionSpec, DocumentSpec, QueryRequest
from kvkeep_service.stores import Stores

from ...support.documents import contract
from .engine.gated import PATIENCE_SECONDS
from .serving import IDLE, Service, serving
from .test_worker_progress import until
from .workbench import TENANT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1200)]

QUERIES = int(os.environ.get("KEPT_QUERIES", "160"))
AT_ONCE = 12
RATIOS = (0.1, 0.3, 0.6)


def tails() -> int:
    gc.collect()
    return sum(type(thing) is Tail for thing in gc.get_objects())


def own_threads() -> int:
    """Threads but those of asyncio's pool, which has as many as were ever busy at once."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


def varied(request: QueryRequest, rng: random.Random) -> QueryRequest:
    """One of a few dozen variants, so that most are asked more than once."""
    seed = rng.choice((None, 1, 2))
    return replace(
        request,
        ratio=rng.choice(RATIOS),
        max_tokens=rng.choice((1, 4, 9)),
        temperature=0.0 if seed is None else 1.2,
        top_p=0.95,
        seed=seed,
    )


async def some_contexts(service: Service) -> list[QueryRequest]:
    return [
        await service.ready(DocumentSpec(contract(title, clauses)), CompressionSpec(ratio=0.6))
        for title, clauses in (("One", 10), ("Two", 13), ("Three", 16))
    ]


async def test_nothing_is_held_after_many_mixed_queries_half_of_them_cancelled(
    stores: Stores, tiny: LoadedModel
) -> None:
    rng = random.Random(11)
    before = tails()
    # Room for one cache of three, or two, so that they come and go as well.
    async with serving(stores, tiny, resident_bytes=200_000) as service:
        contexts = await some_contexts(service)
        await service.ids(contexts[0])
        threads = own_threads()
        known: dict[str, tuple[int, ...]] = {}
        room = asyncio.Semaphore(AT_ONCE)
        outcomes = dict.fromkeys(("answered", "cancelled", "refused"), 0)

        async def ask(request: QueryRequest) -> None:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    ids = await service.ids(request)
                assert known.setdefault(repr(request), ids) == ids
                outcomes["answered"] += 1
            except (Overloaded, MemoryShort):
                outcomes["refused"] += 1
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1

        everyone: list[asyncio.Task[None]] = []
        running: list[asyncio.Task[None]] = []
        for number in range(QUERIES):
            await room.acquire()
            running = [task for task in running if not task.done()]
            running.append(asyncio.create_task(ask(varied(rng.choice(contexts), rng))))
            everyone.append(running[-1])
            # Not within: who is cancelled before it began has no end of its own.
            running[-1].add_done_callback(lambda _: room.release())
            if number % 2:
                # At whatever it is doing: reading the question, loading, waiting, decoding.
                for _ in range(rng.randrange(4)):
                    await asyncio.to_thread(int)
                rng.choice(running).cancel()
            if number % 80 == 40:
                # A build in between, of a document that nobody has seen.
                await service.register(DocumentSpec(contract(f"New {number}", 10)))
        await asyncio.wait(everyone)
        for task in everyone:
            # Who was cancelled before it began is cancelled, and whoever awaits it would be too.
            if not task.cancelled():
                task.result()
        assert sum(outcomes.values()) <= QUERIES
        assert outcomes["answered"] > QUERIES / 3
        assert outcomes["cancelled"] > QUERIES / 8
        assert outcomes["refused"] == 0
        await until(lambda: service.worker.stats().running_builds == 0)
        # The engine has seen every cancellation once it has answered one more.
        await service.ids(contexts[0])
        stats = service.worker.stats()
        assert stats == replace(
            IDLE, resident_caches=stats.resident_caches, resident_bytes=stats.resident_bytes
        )
        assert 0 < stats.resident_bytes <= 200_000
        for request in contexts:
            # A load that was given up hands its lease back once its threads have ended: well
            # before the lease would end by itself, which would hide one that is kept.
            async with asyncio.timeout(5):
                while await stores.leases.readers(TENANT, request.cache_id):  # noqa: ASYNC110  # nothing tells
                    await asyncio.sleep(0.01)
        await until(lambda: own_threads() <= threads)
        for tenant, cache_id in service.worker.resident():
            await service.worker.drop(tenant, cache_id)
        assert service.worker.stats() == IDLE
        assert tails() == before


async def test_a_seed_gives_the_same_answer_after_a_restart(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny) as service:
        request = replace(
            await service.ready(), temperature=1.2, top_p=0.9, top_k=300, max_tokens=12
        )
        asked = [replace(request, seed=seed) for seed in range(4)]
        first = await asyncio.gather(*(service.ids(one) for one in asked))
    async with serving(stores, tiny) as service:
        assert [await service.ids(one) for one in reversed(asked)] == first[::-1]
        assert service.worker.cache_counts().loads["store"].loads == 1
    assert len(set(first)) == len(first)
