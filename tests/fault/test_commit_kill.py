import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kvkeep_storage import durable
from kvkeep_storage.documents import get_document
from kvkeep_storage.errors import NotFound
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.sweeper import Sweeper

from ..support.caches import assert_equal_rows
from ..support.stores import TENANT, Stores, files_below
from .commit_process import AFTER_FLIP, BEFORE_FLIP, FACTS, NO_SPACE, ROWS

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

REPOSITORY = Path(__file__).parents[2]
GRACE_SECONDS = 3600.0


async def _run(stores: Stores, url: str, step: str) -> tuple[int, str]:
    """Commit in a process of its own; return how it ended and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.fault.commit_process",
        url,
        str(stores.root),
        step,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def _temporary(stores: Stores) -> list[str]:
    return [name for name in files_below(stores.root) if durable.is_temporary(Path(name).name)]


def _generations(stores: Stores) -> set[str]:
    return {name.split("/")[3] for name in files_below(stores.root, "caches")}


async def _assert_swept_clean(stores: Stores) -> None:
    """After the grace period only the committed generation is left, and it still answers."""
    young = await Sweeper(stores.objects, stores.metadata, stores.leases, GRACE_SECONDS).run_once()
    assert (young.orphan_generations, young.temp_files) == (0, 0)
    temporary = _temporary(stores)
    for name in files_below(stores.root, "caches") + temporary:
        os.utime(stores.root / name, (1, 1))
    swept = await Sweeper(stores.objects, stores.metadata, stores.leases, GRACE_SECONDS).run_once()
    cache = await stores.metadata.cache(TENANT, FACTS.fingerprint.digest)
    assert cache is not None
    assert _generations(stores) == {cache.generation}
    assert _temporary(stores) == []
    assert swept.temp_files == len(temporary)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def _restarted(stores: Stores) -> None:
    """What a start does that owns the whole data directory."""
    await stores.leases.void_all()


@pytest.mark.parametrize("step", BEFORE_FLIP)
async def test_field_25_killed_before_the_flip_nothing_is_visible_and_a_redo_commits(
    stores: Stores, valkey_url: str, step: str
) -> None:
    await stores.register(FACTS)
    returncode, _ = await _run(stores, valkey_url, step)
    assert returncode == -signal.SIGKILL
    await _restarted(stores)
    if "not yet" in step:
        assert _temporary(stores)
    with pytest.raises(NotFound):
        await stores.load(FACTS)
    record = await stores.metadata.context(TENANT, "ctx_01")
    assert record is not None
    assert record.status == "queued"
    await get_document(stores.objects, DocumentKey(TENANT, "ctx_01"))
    await stores.build(ROWS, FACTS)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    await _assert_swept_clean(stores)


@pytest.mark.parametrize("step", AFTER_FLIP)
async def test_killed_after_the_flip_the_cache_is_committed(
    stores: Stores, valkey_url: str, step: str
) -> None:
    await stores.register(FACTS)
    returncode, _ = await _run(stores, valkey_url, step)
    assert returncode == -signal.SIGKILL
    await _restarted(stores)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    record = await stores.metadata.context(TENANT, "ctx_01")
    assert record is not None
    assert record.status == "ready"
    await _assert_swept_clean(stores)


async def test_a_rebuild_killed_half_way_leaves_the_committed_cache_answering(
    stores: Stores, valkey_url: str
) -> None:
    await stores.register(FACTS)
    cache = await stores.build(ROWS, FACTS)
    returncode, _ = await _run(stores, valkey_url, "5 manifest put")
    assert returncode == -signal.SIGKILL
    await _restarted(stores)
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache
    assert len(_generations(stores)) == 2
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    await _assert_swept_clean(stores)


async def test_a_commit_needs_no_torch_and_leaves_no_leftovers(
    stores: Stores, valkey_url: str
) -> None:
    await stores.register(FACTS)
    assert await _run(stores, valkey_url, "never") == (0, "")
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    assert _temporary(stores) == []
    assert len(_generations(stores)) == 1


async def test_a_file_that_may_not_grow_is_full_and_nothing_of_it_stays(
    stores: Stores, valkey_url: str
) -> None:
    await stores.register(FACTS)
    assert await _run(stores, valkey_url, NO_SPACE) == (0, "storage_full")
    assert files_below(stores.root, "caches") == []
    assert _temporary(stores) == []
    await _restarted(stores)
    await stores.build(ROWS, FACTS)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
