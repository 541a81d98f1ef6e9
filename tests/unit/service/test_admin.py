"""The operator's commands over real stores: what they say, do, and exit with."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import structlog
from typer.testing import CliRunner, Result

from kvkeep_service import cli, command_line
from kvkeep_service.config import Settings
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.documents import delete_document, put_document
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.quotas import Usage

from ...support.caches import facts_for, random_rows
from ...support.stores import TENANT, Stores, a_document, files_below

ROWS = random_rows()
FACTS = facts_for(ROWS)
T = TypeVar("T")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"KVKEEP_{name.upper()}", raising=False)
    # Loggers keep the stream they first wrote to, and that of a test's runner ends with it.
    monkeypatch.setattr(command_line, "set_up_logging", lambda: None)
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    """A Redis that is not the commands' own: they run beside whoever uses it."""
    store = EmbeddedStore(tmp_path_factory.mktemp("valkey"))
    store.start()
    yield store
    store.stop()


class Deployed:
    """An external Redis and a store, with one ready context, and commands beside them."""

    def __init__(self, url: str, root: Path) -> None:
        self.url = url
        self.root = root
        self.within(self._fill)

    def within(self, work: Callable[[Stores], Awaitable[T]]) -> T:
        """Do something with the stores, as a server would beside the commands."""

        async def run() -> T:
            metadata = await Metadata.connect(self.url)
            try:
                objects = Objects.open(self.root.as_uri())
                return await work(Stores(objects, metadata, Leases(metadata), self.root))
            finally:
                await metadata.close()

        return asyncio.run(run())

    def admin(self, *arguments: str) -> Result:
        where = ("--redis-url", self.url, "--store", self.root.as_uri())
        result = CliRunner().invoke(cli.app, ("admin", *arguments, *where))
        assert "Traceback" not in result.output
        return result

    def age(self) -> None:
        for name in files_below(self.root):
            os.utime(self.root / name, (1, 1))

    def slab(self) -> Path:
        return next(self.root.glob("caches/*/*/*/kv-00.safetensors"))

    async def _fill(self, stores: Stores) -> None:
        await _flush(stores)
        await bind_if_new(stores.objects, stores.metadata)
        await stores.register(FACTS)
        await stores.build(ROWS, FACTS)


@pytest.fixture
def deployed(valkey: EmbeddedStore, tmp_path: Path) -> Deployed:
    return Deployed(valkey.redis_url, tmp_path / "objects")


async def _flush(stores: Stores) -> None:
    await stores.metadata.link.command("FLUSHALL")


async def _usage(stores: Stores) -> Usage:
    return await stores.metadata.usage(TENANT)


def test_a_reindex_restores_records_and_usage(deployed: Deployed) -> None:
    before = deployed.within(_usage)
    assert before.bytes > 0
    deployed.within(_flush)
    result = deployed.admin("reindex")
    assert (result.exit_code, result.stdout) == (
        0,
        "missing and restored: 1 contexts, 1 caches\n",
    )
    assert deployed.within(_usage) == before


def test_verify_finds_nothing_wrong_with_what_is_whole(deployed: Deployed) -> None:
    result = deployed.admin("verify")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "checked: 1 records, 1 documents, 1 mirrors, 1 caches; 0 problems, 0 repaired\n"
    )
    assert result.stderr == ""


def test_verify_names_damage_and_repairs_only_when_told(deployed: Deployed) -> None:
    content = bytearray(deployed.slab().read_bytes())
    content[-1] ^= 1
    deployed.slab().write_bytes(content)
    result = deployed.admin("verify")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"cache {TENANT}/")
    assert "1 problems, 0 repaired" in result.stdout
    assert deployed.slab().exists()
    result = deployed.admin("verify", "--repair")
    assert result.exit_code == 1
    assert "1 problems, 1 repaired" in result.stdout
    assert files_below(deployed.root, "caches") == []
    assert deployed.admin("verify").exit_code == 0


def test_gc_removes_leftovers_and_says_what(deployed: Deployed) -> None:
    async def leave(stores: Stores) -> None:
        await put_document(stores.objects, DocumentKey(TENANT, "ctx_lone"), a_document())
        await stores.register(FACTS, "ctx_02", expires_at=1_790_000_001.0)
        await stores.build(ROWS, FACTS)
        half = await stores.register(facts_for(ROWS, tenant_salt="another"), "ctx_half")
        await delete_document(stores.objects, half)

    deployed.within(leave)
    deployed.age()
    before = files_below(deployed.root)
    dry = deployed.admin("gc", "--dry-run")
    assert files_below(deployed.root) == before
    result = deployed.admin("gc")
    assert (dry.exit_code, result.exit_code) == (0, 0)
    assert dry.stdout == result.stdout.replace("removed", "would go")
    assert result.stdout.startswith(
        f"lone document: {TENANT}/ctx_lone\nhalf deleted: {TENANT}/ctx_half\n"
        "removed: 1 expired contexts, 1 orphan generations, 0 temporary files,"
        " 0 caches over the cap, 1 lone documents, 1 half-deleted contexts; "
    )
    assert not any("ctx_lone" in name or "ctx_02" in name for name in files_below(deployed.root))
    assert deployed.admin("verify").exit_code == 0
    assert "removed: 0 expired contexts, 0 orphan" in deployed.admin("gc").stdout


def test_gc_keeps_the_store_under_its_cap(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def another(stores: Stores) -> None:
        facts = facts_for(ROWS, tenant_salt="another")
        await stores.register(facts, "ctx_02")
        await stores.build(ROWS, facts)

    first = deployed.slab()
    deployed.within(another)
    monkeypatch.setenv("KVKEEP_STORE_BYTES", "1")
    assert "1 caches over the cap" in deployed.admin("gc", "--dry-run").stdout
    assert first.exists()
    assert "1 caches over the cap" in deployed.admin("gc").stdout
    assert not first.exists()
    assert deployed.slab().exists()


def test_du_shows_what_each_tenant_has_beside_its_quotas(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_TENANT_CONTEXTS", "50")
    monkeypatch.setenv("KVKEEP_TENANT_BYTES", "1048576")
    usage = deployed.within(_usage)
    shown = json.loads(deployed.admin("du", "--json").stdout)
    assert shown["quotas"] == {"contexts": 50, "queued": None, "bytes": 1048576}
    (tenant,) = shown["tenants"]
    assert (tenant["tenant"], tenant["contexts"], tenant["queued"]) == (TENANT, 1, 0)
    assert tenant["charged_bytes"] == tenant["cache_bytes"] == usage.bytes
    assert tenant["document_bytes"] > 0
    head, row = deployed.admin("du").stdout.splitlines()
    assert head.split() == ["tenant", "contexts", "queued", "documents", "caches", "charged"]
    assert row.startswith(f"{TENANT}    1 of 50   0")
    assert row.endswith("of 1.0 MiB")


@pytest.mark.parametrize("command", ["verify", "gc", "verify --repair", "gc --dry-run"])
def test_nothing_is_done_while_the_stores_do_not_belong_together(
    deployed: Deployed, command: str
) -> None:
    async def bind_another(stores: Stores) -> None:
        await stores.metadata.bind_store("another")

    deployed.within(bind_another)
    deployed.age()
    before = files_below(deployed.root)
    result = deployed.admin(*command.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("kvkeep-server: the object store is")
    assert files_below(deployed.root) == before


@pytest.mark.parametrize("command", ["reindex", "verify", "gc", "du"])
def test_beside_a_server_that_holds_the_data_directory_every_command_is_refused(
    tmp_path: Path, command: str
) -> None:
    store = EmbeddedStore(tmp_path / "data")
    store.start()
    try:
        result = CliRunner().invoke(cli.app, ("admin", command, "--data", str(tmp_path / "data")))
    finally:
        store.stop()
    assert result.exit_code == 2
    assert "in use" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["reindex", "verify", "gc", "du"])
def test_no_command_makes_a_data_directory_where_there_is_none(
    tmp_path: Path, command: str
) -> None:
    missing = tmp_path / "elsewhere"
    result = CliRunner().invoke(cli.app, ["admin", command, "--data", str(missing)])
    assert result.exit_code == 2
    assert "there is no such directory here" in result.stderr
    assert not missing.exists()
