"""A cache that has to be fetched while its store says nothing: the right answer, or a typed error.

No query waits longer than its store's deadline; whoever would, fails by the patience here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import ContextNotReady
from kvkeep_service.ports import QueryRequest
from kvkeep_service.stores import Stores
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.errors import ObjectsUnavailable
from kvkeep_storage.faults import Faults, FaultyBackend

from .serving import IDLE, Service, serving
from .test_worker_progress import until
from .workbench import TENANT

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 20
DEADLINE_SECONDS = 0.2
Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every further one has a deadline of its own.
    monkeypatch.setattr("kvkeep_storage.retries.ATTEMPTS", 1)


class Silence:
    """A worker that keeps nothing in memory, and a store that can stop answering."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @contextmanager
    def store_says_nothing(self) -> Iterator[None]:
        objects = self.service.stores.objects
        backend, seconds = objects._backend, objects._deadline_seconds
        objects._backend = FaultyBackend(backend, Faults(delay=1.0, delay_seconds=600))
        objects._deadline_seconds = DEADLINE_SECONDS
        try:
            yield
        finally:
            objects._backend, objects._deadline_seconds = backend, seconds

    async def assert_nothing_is_held(self, request: QueryRequest) -> None:
        await until(lambda: self.service.worker.stats() == IDLE)
        assert await self.service.stores.leases.readers(TENANT, request.cache_id) == 0


@pytest.fixture
async def remote(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Silence]:
    async with serving(stores, tiny, resident_bytes=0) as service:
        yield Silence(service)


@pytest.fixture
async def with_disk(
    stores: Stores, tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Silence, Path]]:
    folder = tmp_path_factory.mktemp("disk")
    disk = DiskTier.open(stores.objects, folder, 2**30)
    async with serving(replace(stores, disk=disk), tiny, resident_bytes=0) as service:
        yield Silence(service), folder
    await disk.close()


async def in_time(call: Awaitable[Result]) -> Result:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await call


@pytest.mark.parametrize("least", [None, 0.1], ids=["one-ratio", "a-lower-one-will-do"])
async def test_a_store_that_says_nothing_is_told_and_nothing_is_held_or_taken_for_wrong(
    remote: Silence, least: float | None
) -> None:
    service = remote.service
    request = replace(await service.ready(), min_ratio=least)
    right = await service.ids(replace(request, min_ratio=None))
    with remote.store_says_nothing():
        outcomes = await in_time(
            asyncio.gather(*(service.ids(request) for _ in range(3)), return_exceptions=True)
        )
    assert [type(outcome) for outcome in outcomes] == [ObjectsUnavailable] * 3
    assert all(outcome.retryable for outcome in outcomes if isinstance(outcome, ObjectsUnavailable))
    await remote.assert_nothing_is_held(request)
    assert await service.status(request) == "ready"
    assert await in_time(service.ids(replace(request, min_ratio=None))) == right


async def test_what_the_disk_has_a_copy_of_is_answered_while_its_store_says_nothing(
    with_disk: tuple[Silence, Path],
) -> None:
    remote, _ = with_disk
    # With token ids, the document would be read too: the disk has no documents.
    request = replace(await remote.service.ready(), return_token_ids=False)
    right = (await remote.service.answer(request)).text
    assert right
    with remote.store_says_nothing():
        answer = await in_time(remote.service.answer(request))
    assert (answer.text, answer.timings.source) == (right, "disk")
    await remote.assert_nothing_is_held(request)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage(root: Path) -> None:
    for path in root.glob("caches/*/*/*/kv-00.safetensors"):
        flip(path)


@pytest.mark.parametrize("harm", [flip, Path.unlink], ids=["wrong", "lost"])
async def test_a_copy_that_is_no_good_is_not_answered_from_where_the_store_says_nothing(
    with_disk: tuple[Silence, Path], harm: Callable[[Path], None]
) -> None:
    remote, folder = with_disk
    service = remote.service
    request = await service.ready()
    right = await service.ids(request)
    [slab] = folder.glob("store-*/caches/*/*/*/kv-00.safetensors")
    harm(slab)
    with remote.store_says_nothing(), pytest.raises(ObjectsUnavailable):
        await in_time(service.ids(request))
    await remote.assert_nothing_is_held(request)
    # Nothing was proven wrong of the store: it is not built again, and its own bytes answer.
    assert await service.status(request) == "ready"
    assert await in_time(service.ids(request)) == right


async def test_a_cache_that_is_built_again_has_the_same_answer_once_its_store_speaks(
    remote: Silence, tmp_path: Path
) -> None:
    service = remote.service
    request = await service.ready()
    right = await service.ids(request)
    damage(tmp_path)
    with remote.store_says_nothing(), pytest.raises(ObjectsUnavailable):
        await in_time(service.ids(request))
    assert await service.status(request) == "ready"
    with pytest.raises(ContextNotReady):
        await in_time(service.ids(request))
    assert (await in_time(service.jobs.next_end())).how == "settled"
    assert await in_time(service.ids(request)) == right
