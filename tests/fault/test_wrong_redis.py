"""The wrong-Redis disaster: the records are gone or another store's, and time goes on.

Past every grace period, whatever is told to sweep, nothing is lost; after a reindex everything
is back, and nothing that was deleted is.
"""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from typer.testing import CliRunner, Result

from kvkeep_service import cli, command_line
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.documents import delete_document, put_document
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import StoreMismatch
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.quotas import Usage
from kvkeep_storage.sweeper import Sweeper

from ..support.caches import assert_equal_rows, facts_for, random_rows
from ..support.stores import TENANT, Stores, a_document, files_below

ROWS = random_rows()
FACTS = facts_for(ROWS)
T = TypeVar("T")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    # Loggers keep the stream they first wrote to, and that of a test's runner ends with it.
    monkeypatch.setattr(command_line, "set_up_logging", lambda: None)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """An empty Redis that somebody points the server at by mistake."""
    store = EmbeddedStore(tmp_path / "elsewhere")
    store.start()
    yield store
    store.stop()


class Kept:
    """A data directory with two contexts, of which one was deleted, and a lone document."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.objects = directory / "objects"
        self.usage = self.within(self._fill)
        self.files = files_below(self.objects)

    def within(self, work: Callable[[Stores], Awaitable[T]], redis_url: str | None = None) -> T:
        """Do something as a server would that uses this directory, or another Redis."""

        async def run(url: str) -> T:
            metadata = await Metadata.connect(url)
            try:
                objects = Objects.open(self.objects.as_uri())
                return await work(Stores(objects, metadata, Leases(metadata), self.objects))
            finally:
                await metadata.close()

        if redis_url is not None:
            return asyncio.run(run(redis_url))
        store = EmbeddedStore(self.directory)
        store.start()
        try:
            return asyncio.run(run(store.redis_url))
        finally:
            store.stop()

    def admin(self, *arguments: str, redis_url: str | None = None) -> Result:
        where = ["--data", str(self.directory)]
        if redis_url is not None:
            where += ["--redis-url", redis_url]
        result = CliRunner().invoke(cli.app, ["admin", *arguments, *where])
        assert "Traceback" not in result.output
        return result

    def age(self) -> None:
        """Let every grace period pass."""
        for name in files_below(self.objects):
            os.utime(self.objects / name, (1, 1))

    async def _fill(self, stores: Stores) -> Usage:
        await bind_if_new(stores.objects, stores.metadata)
        await stores.register(FACTS, "ctx_01", name="kept", metadata={"matter": "2291"})
        deleted = await stores.register(FACTS, "ctx_02")
        await stores.build(ROWS, FACTS)
        await delete_document(stores.objects, deleted)
        await stores.metadata.delete_context(TENANT, "ctx_02")
        await put_document(stores.objects, DocumentKey(TENANT, "ctx_lone"), a_document())
        return await stores.metadata.usage(TENANT)


async def _start_and_sweep(stores: Stores) -> None:
    """What a server does at its start, then from time to time."""
    with pytest.raises(StoreMismatch):
        await bind_if_new(stores.objects, stores.metadata)
    with pytest.raises(StoreMismatch):
        await Sweeper(stores.objects, stores.metadata, stores.leases, 0, store_bytes=0).run_once()


async def _flush(stores: Stores) -> None:
    await stores.metadata.link.command("FLUSHALL")


def _survives(kept: Kept, redis_url: str | None) -> None:
    """Whatever is tried with these records, every byte stays where it was."""
    kept.age()
    kept.within(_start_and_sweep, redis_url)
    for arguments in (("gc",), ("verify", "--repair")):
        assert kept.admin(*arguments, redis_url=redis_url).exit_code == 2
    assert files_below(kept.objects) == kept.files


def _comes_back(kept: Kept, redis_url: str | None, expected: str) -> None:
    """A reindex restores everything but what was deleted, and a sweep takes nothing of it."""
    result = kept.admin("reindex", redis_url=redis_url)
    assert result.stdout == f"missing and restored: {expected}\n"
    # Without a mirror it is a leftover of a registration, and is named.
    assert "ctx_lone" in result.stderr

    async def check(stores: Stores) -> None:
        swept = await Sweeper(stores.objects, stores.metadata, stores.leases, 0).run_once()
        assert (swept.expired, swept.orphan_generations) == (0, 0)
        page = await stores.metadata.contexts(TENANT, limit=10)
        (record,) = page.records
        assert (record.id, record.status) == ("ctx_01", "ready")
        assert (record.name, record.metadata) == ("kept", {"matter": "2291"})
        assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
        assert await stores.metadata.usage(TENANT) == kept.usage

    kept.within(check, redis_url)
    gone = [name for name in kept.files if name not in files_below(kept.objects)]
    assert gone == []


def test_field_28_after_a_flush_nothing_is_lost_and_nothing_deleted_returns(
    tmp_path: Path,
) -> None:
    kept = Kept(tmp_path / "data")
    kept.within(_flush)
    _survives(kept, None)
    _comes_back(kept, None, "1 contexts, 1 caches")


def test_an_empty_redis_is_told_apart_from_an_empty_store(
    tmp_path: Path, elsewhere: EmbeddedStore
) -> None:
    kept = Kept(tmp_path / "data")
    _survives(kept, elsewhere.redis_url)
    # The right one was never touched.
    kept.within(_still_there)
    _comes_back(kept, elsewhere.redis_url, "1 contexts, 1 caches")


def test_another_stores_redis_is_never_filled_nor_swept_by(
    tmp_path: Path, elsewhere: EmbeddedStore
) -> None:
    kept, other = Kept(tmp_path / "data"), Kept(tmp_path / "other")
    other_url = elsewhere.redis_url
    other.within(_bind, other_url)
    _survives(kept, other_url)
    result = kept.admin("reindex", redis_url=other_url)
    assert result.exit_code == 2
    assert "Redis was filled from" in result.stderr
    assert files_below(kept.objects) == kept.files


def test_lost_records_of_the_embedded_store_come_back(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "data")
    shutil.rmtree(kept.directory / "valkey")
    _survives(kept, None)
    _comes_back(kept, None, "1 contexts, 1 caches")
    # Only an operator's word removes a document that has no record.
    result = kept.admin("gc")
    assert (result.exit_code, "ctx_lone" in result.stdout) == (0, True)
    assert kept.admin("verify").exit_code == 0


async def _still_there(stores: Stores) -> None:
    assert await stores.metadata.context(TENANT, "ctx_01") is not None
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def _bind(stores: Stores) -> None:
    await stores.metadata.bind_store(await stores.objects.store_id())
