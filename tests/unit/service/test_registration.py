"""Registering over real stores, each step failing in turn."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep_service.errors import QuotaExceeded
from kvkeep_service.registration import Answered
from kvkeep_service.registry import Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import Full, MetadataUnavailable, ObjectsUnavailable
from kvkeep_storage.objects import Objects
from kvkeep_storage.quotas import Quotas
from kvkeep_storage.records import Expiry

from ...support.registering import AWAY, WANTED, breaking, built, stored
from ...support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.anyio


async def test_a_registration_stores_document_record_mirror_and_job(
    registry: Registry, stores: Stores, tmp_path: Path
) -> None:
    record = await registry.register("default", replace(WANTED, expires=Expiry("created_at", 60)))
    assert record == await registry.context("default", record.id)
    assert record.expires_at == record.created_at + 60
    job = await stores.jobs.claim("me", 0)
    assert job is not None
    assert (job.tenant, job.context_id) == ("default", record.id)
    folder = tmp_path / "documents" / "default" / record.id
    document = json.loads((folder / "document.json").read_text())["body"]
    assert document["text"] == WANTED.document.text
    assert document["prefix_text"] == "<s>"
    mirror = json.loads((folder / "context.json").read_text())["body"]
    assert (mirror["record"]["id"], mirror["generation"]) == (record.id, None)


async def test_an_equal_cache_makes_it_ready_without_a_job_and_the_mirror_knows(
    registry: Registry, worker: ScriptedWorker, stores: Stores, tmp_path: Path
) -> None:
    await built(registry, worker)
    record = await registry.register("default", WANTED)
    assert record.status == "ready"
    assert record.ratio_achieved == 0.3
    assert await stores.jobs.claim("me", 0) is None
    path = tmp_path / "documents" / "default" / record.id / "context.json"
    mirror = json.loads(path.read_text())["body"]
    assert mirror["record"]["status"] == "ready"
    cache = await stores.metadata.cache("default", record.cache_id)
    assert cache is not None
    assert mirror["generation"] == cache.generation


async def test_field_36_two_tenants_never_share_a_cache(
    registry: Registry, worker: ScriptedWorker
) -> None:
    context_id = await built(registry, worker)
    other = await registry.register("other", WANTED)
    assert other.status == "queued"
    mine = await registry.context("default", context_id)
    assert mine.cache_id != other.cache_id


STEPS = [
    pytest.param("objects", "put", Full("document.json", 10), 0, id="document"),
    pytest.param("objects", "put", ObjectsUnavailable("put", "away"), 1, id="mirror"),
    pytest.param("metadata", "create_context", AWAY, 0, id="record"),
    pytest.param("metadata", "attach", AWAY, 0, id="attach"),
    pytest.param("jobs", "enqueue", AWAY, 0, id="job"),
    pytest.param("jobs", "enqueue", asyncio.CancelledError(), 0, id="cancelled"),
]


@pytest.mark.parametrize(("store", "method", "error", "after"), STEPS)
async def test_a_registration_that_fails_leaves_nothing(
    stores: Stores,
    worker: ScriptedWorker,
    tmp_path: Path,
    store: str,
    method: str,
    error: BaseException,
    after: int,
) -> None:
    registry = Registry(breaking(stores, store, method, error, after), worker)
    with pytest.raises(type(error)):
        await registry.register("default", WANTED)
    assert stored(tmp_path) == ["store.json"]
    assert (await stores.metadata.contexts("default", limit=10)).records == ()
    assert await stores.metadata.unfinished() == []


async def test_a_store_that_is_silent_is_not_waited_for_twice(
    stores: Stores, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvkeep_service.removal._PATIENCE_SECONDS", 0.01)
    answers = asyncio.Event()

    class Silent(Objects):
        """It takes what is put, and says nothing until it answers again."""

        async def put(self, key: str, content: bytes) -> None:
            await super().put(key, content)
            raise ObjectsUnavailable("put", "no answer", abandoned=True)

        async def delete(self, key: str) -> None:
            await answers.wait()
            await super().delete(key)

    silent = replace(stores, objects=Silent.open(tmp_path.as_uri()))
    registry = Registry(silent, worker)
    async with asyncio.timeout(60):
        with pytest.raises(ObjectsUnavailable):
            await registry.register("default", WANTED)
        assert stored(tmp_path) != ["store.json"]
        answers.set()
        # It goes on behind the answer.
        while stored(tmp_path) != ["store.json"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await registry.close()


async def test_a_record_that_cannot_be_undone_does_not_hide_the_error(
    stores: Stores, worker: ScriptedWorker, tmp_path: Path
) -> None:
    broken = breaking(stores, "metadata", "attach", AWAY)
    registry = Registry(breaking(broken, "metadata", "delete_context", AWAY), worker)
    with pytest.raises(MetadataUnavailable):
        await registry.register("default", WANTED)
    assert stored(tmp_path) == ["store.json"]


async def test_an_answer_that_cannot_be_kept_is_still_an_answer(
    stores: Stores, worker: ScriptedWorker
) -> None:
    registry = Registry(breaking(stores, "metadata", "idempotency_finish", AWAY), worker)

    async def answer() -> Answered:
        return Answered(202, b"{}", {})

    assert (await registry.once("default", "key", b"body", answer)).status == 202


async def test_the_default_expiry_counts_from_creation(
    stores: Stores, worker: ScriptedWorker
) -> None:
    assert Registry(stores, worker).default_expiry is None
    registry = Registry(stores, worker, default_ttl_seconds=60)
    assert registry.default_expiry == Expiry("created_at", 60)


async def test_what_the_quota_refuses_is_not_even_written(
    stores: Stores, worker: ScriptedWorker, tmp_path: Path
) -> None:
    full = breaking(stores, "objects", "put", Full("document.json", 10))
    registry = Registry(replace(full, quotas=Quotas(contexts=0)), worker)
    with pytest.raises(QuotaExceeded):
        await registry.register("default", WANTED)


async def test_of_requests_at_one_time_as_many_as_fit_are_admitted_and_the_rest_leaves_nothing(
    stores: Stores, worker: ScriptedWorker, tmp_path: Path
) -> None:
    registry = Registry(replace(stores, quotas=Quotas(contexts=3)), worker)
    outcomes = await asyncio.gather(
        *(registry.register("default", WANTED) for _ in range(10)), return_exceptions=True
    )
    assert sum(isinstance(outcome, QuotaExceeded) for outcome in outcomes) == 7
    assert len(stored(tmp_path)) == 1 + 2 * 3
    assert (await stores.metadata.usage("default")).contexts == 3
