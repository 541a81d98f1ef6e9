"""Looking up, asking and health over real stores."""

import subprocess
import sys
from dataclasses import replace

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
from kvkeep_service.ports import CompressionSpec
from kvkeep_service.registry import Changes, Filter, Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import ObjectsUnavailable
from kvkeep_storage.metadata import UNSET
from kvkeep_storage.records import Expiry

from ...support.registering import WANTED, breaking, built
from ...support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.anyio


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
    with pytest.raises(InvalidRequest, match=r"0\.3 is not offered by this context; "):
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


# --- health ------------------------------------------------------------------------------------


async def test_a_store_that_is_away_is_named(stores: Stores, worker: ScriptedWorker) -> None:
    registry = Registry(
        breaking(stores, "objects", "find_store_id", ObjectsUnavailable("get", "away")), worker
    )
    assert await registry.health() == {
        "worker": "ok",
        "kernels": "ok",
        "metadata": "ok",
        "objects": "unavailable",
    }
    assert (await Registry(stores, worker).health())["store"] == "ok"
    await stores.metadata.link.command("FLUSHALL")
    assert (await Registry(stores, worker).health())["store"] == "degraded"


async def test_a_store_that_builds_wait_for_is_degraded(
    stores: Stores, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(stores, worker)
    assert (await registry.health())["objects"] == "ok"
    monkeypatch.setattr(
        worker, "stats", lambda: replace(ScriptedWorker.stats(worker), is_store_full=True)
    )
    assert (await registry.health())["objects"] == "degraded"


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
