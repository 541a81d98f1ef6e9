"""The registry over real stores, each step of a registration failing in turn."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvkeep_service.errors import (
    ContextExpired,
    ContextFailed,
    ContextModelMismatch,
    ContextNotFound,
    ContextNotReady,
    InvalidRequest,
)
from kvkeep_service.ids import new_context_id
from kvkeep_service.ports import CompressionSpec, DocumentSpec
from kvkeep_service.registration import Answered, Registration
from kvkeep_service.registry import Changes, Filter, Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import Full, MetadataUnavailable, ObjectsUnavailable
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import UNSET, Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import Expiry

from ...support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.anyio

WANTED = Registration(
    document=DocumentSpec("This agreement ends on 31 March 2029."),
    compression=CompressionSpec(),
    name="Agreement",
    metadata={"matter": "2291"},
    model=None,
    expires=None,
)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(tmp_path_factory.mktemp("data"))
    store.start()
    yield store
    store.stop()


@pytest.fixture
async def stores(embedded: EmbeddedStore, tmp_path: Path) -> AsyncIterator[Stores]:
    metadata = await Metadata.connect(embedded.redis_url)
    await metadata.link.command("FLUSHALL")
    objects = Objects.open(tmp_path.as_uri())
    await bind_if_new(objects, metadata)
    yield Stores(metadata, objects, Leases(metadata), Jobs(metadata))
    await metadata.close()


@pytest.fixture
async def worker(stores: Stores) -> ScriptedWorker:
    return ScriptedWorker(stores)


@pytest.fixture
async def registry(stores: Stores, worker: ScriptedWorker) -> AsyncIterator[Registry]:
    registry = Registry(stores, worker)
    yield registry
    await registry.close()


async def built(registry: Registry, worker: ScriptedWorker, wanted: Registration = WANTED) -> str:
    """Register a document and build its cache; return the id of the context."""
    record = await registry.register("default", wanted)
    builds = asyncio.create_task(worker.run_builds())
    await registry.finished("default", record.id, 30)
    builds.cancel()
    await asyncio.gather(builds, return_exceptions=True)
    return record.id


def stored(tmp_path: Path) -> list[str]:
    return sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.json"))


# --- registering -------------------------------------------------------------------------------


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


async def test_two_tenants_never_share_a_cache(registry: Registry, worker: ScriptedWorker) -> None:
    context_id = await built(registry, worker)
    other = await registry.register("other", WANTED)
    assert other.status == "queued"
    mine = await registry.context("default", context_id)
    assert mine.cache_id != other.cache_id


def breaking(
    stores: Stores, store: str, method: str, error: BaseException, after: int = 0
) -> Stores:
    """The same stores, of which one fails in one method, after so many calls that work."""
    broken: Any = Broken(getattr(stores, store), method, error, after)
    return replace(stores, **{store: broken})


class Broken:
    """One store of a registration; one of its methods fails."""

    def __init__(self, inner: object, method: str, error: BaseException, after: int = 0) -> None:
        self._inner = inner
        self._method = method
        self._error = error
        self._after = after

    def __getattr__(self, name: str) -> Any:
        if name != self._method:
            return getattr(self._inner, name)
        if self._after > 0:
            self._after -= 1
            return getattr(self._inner, name)

        async def fail(*_args: object, **_named: object) -> None:
            raise self._error

        return fail


AWAY = MetadataUnavailable("redis", "away")
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


# --- looking up --------------------------------------------------------------------------------


async def test_field_36_another_tenant_can_neither_see_change_ask_nor_delete(
    registry: Registry, worker: ScriptedWorker, stores: Stores
) -> None:
    context_id = await built(registry, worker)
    assert (await registry.context("default", context_id)).id == context_id
    with pytest.raises(ContextNotFound):
        await registry.context("other", context_id)
    with pytest.raises(ContextNotFound):
        await registry.document("other", context_id)
    with pytest.raises(ContextNotFound):
        await registry.change("other", context_id, Changes("mine", UNSET, UNSET))
    with pytest.raises(ContextNotFound):
        await registry.open_query("other", context_id, None)
    assert (await registry.contexts("other", Filter())).records == ()
    await registry.delete("other", context_id)
    assert (await registry.context("default", context_id)).status == "ready"
    assert (await registry.document("default", context_id)).text == WANTED.document.text


async def test_foreign_and_unknown_are_refused_in_the_same_words(
    registry: Registry, worker: ScriptedWorker
) -> None:
    foreign, unknown = await built(registry, worker), new_context_id()
    said = []
    for context_id in (foreign, unknown):
        with pytest.raises(ContextNotFound) as refusal:
            await registry.context("other", context_id)
        said.append(refusal.value.detail.replace(context_id, "ID"))
    assert said[0] == said[1]


async def test_what_is_no_id_never_reaches_the_stores(
    stores: Stores, worker: ScriptedWorker
) -> None:
    registry = Registry(breaking(stores, "metadata", "context", AssertionError("reached")), worker)
    for name in ("", "..", "ctx_1", "{default}:x", "ctx_" + "é" * 26):
        with pytest.raises(ContextNotFound):
            await registry.context("default", name)
        with pytest.raises(ContextNotFound):
            await registry.delete("default", name)
        with pytest.raises(ContextNotFound):
            await registry.change("default", name, Changes(UNSET, UNSET, UNSET))


async def test_an_expired_context_says_when(registry: Registry, stores: Stores) -> None:
    wanted = replace(WANTED, expires=Expiry("created_at", 60))
    long_ago = Registry(stores, ScriptedWorker(stores), clock=lambda: 1_700_000_000.0)
    record = await long_ago.register("default", wanted)
    with pytest.raises(ContextExpired) as refusal:
        await registry.context("default", record.id)
    assert refusal.value.facts == {"expired_at": "2023-11-14T22:14:20.000Z"}


# --- asking ------------------------------------------------------------------------------------


async def test_a_query_is_admitted_at_a_stored_ratio_and_counted(
    registry: Registry, worker: ScriptedWorker
) -> None:
    context_id = await built(
        registry, worker, replace(WANTED, compression=CompressionSpec(ratio=0.25))
    )
    assert (await registry.open_query("default", context_id, None)).ratio == 0.25
    assert (await registry.open_query("default", context_id, 0.2)).ratio == 0.2
    record = await registry.context("default", context_id)
    assert record.queries == 2
    assert record.last_used_at is not None
    with pytest.raises(InvalidRequest, match=r"0\.3 is not stored"):
        await registry.open_query("default", context_id, 0.3)


async def test_a_context_that_cannot_answer_says_why(
    registry: Registry, worker: ScriptedWorker, stores: Stores
) -> None:
    record = await registry.register("default", WANTED)
    with pytest.raises(ContextNotReady):
        await registry.open_query("default", record.id, None)
    await stores.metadata.fail_context("default", record.id, "cache_corrupt", "bytes differ")
    with pytest.raises(ContextFailed, match="bytes differ") as failed:
        await registry.open_query("default", record.id, None)
    assert failed.value.facts["error_code"] == "cache_corrupt"
    worker.info = replace(worker.info, name="another")
    with pytest.raises(ContextModelMismatch, match="another"):
        await registry.open_query("default", record.id, None)


async def test_a_context_of_another_model_is_still_listed_and_left_alone(
    registry: Registry, worker: ScriptedWorker
) -> None:
    context_id = await built(registry, worker)
    worker.info = replace(worker.info, name="another")
    page = await registry.contexts("default", Filter())
    assert [record.id for record in page.records] == [context_id]
    with pytest.raises(ContextModelMismatch):
        await registry.open_query("default", context_id, None)
    assert (await registry.context("default", context_id)).status == "ready"


# --- deleting ----------------------------------------------------------------------------------


async def test_a_delete_that_broke_off_can_be_repeated(
    stores: Stores, worker: ScriptedWorker, tmp_path: Path
) -> None:
    context_id = await built(Registry(stores, worker), worker)
    registry = Registry(breaking(stores, "metadata", "delete_context", AWAY), worker)
    with pytest.raises(MetadataUnavailable):
        await registry.delete("default", context_id)
    registry = Registry(stores, worker)
    with pytest.raises(ContextNotFound):
        await registry.document("default", context_id)
    await registry.delete("default", context_id)
    await registry.close()
    assert stored(tmp_path) == ["store.json"]


async def test_deleting_while_a_build_waits_leaves_no_reference(
    registry: Registry, stores: Stores, tmp_path: Path
) -> None:
    record = await registry.register("default", WANTED)
    await registry.delete("default", record.id)
    assert await stores.metadata.unfinished() == []
    assert await stores.metadata.live_generations("default") == set()
    assert stored(tmp_path) == ["store.json"]


# --- health ------------------------------------------------------------------------------------


async def test_a_store_that_is_away_is_named(stores: Stores, worker: ScriptedWorker) -> None:
    registry = Registry(
        breaking(stores, "objects", "find_store_id", ObjectsUnavailable("get", "away")), worker
    )
    assert await registry.health() == {"worker": "ok", "metadata": "ok", "objects": "unavailable"}
    assert (await Registry(stores, worker).health())["store"] == "ok"
    await stores.metadata.link.command("FLUSHALL")
    assert (await Registry(stores, worker).health())["store"] == "degraded"


# --- arrows ------------------------------------------------------------------------------------


def test_registering_and_looking_up_load_no_torch() -> None:
    program = (
        "import sys\n"
        "import kvkeep_service.registry, kvkeep_service.registration, kvkeep_service.removal\n"
        "import kvkeep_service.api.application\n"
        "print(*sorted(sys.modules.keys() & {'torch', 'triton', 'transformers'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
