"""What verifying finds, and what it mends, over real stores."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvkeep_storage.documents import delete_document, missing_document
from kvkeep_storage.errors import NotFound, StoreMismatch
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.reindex import reindex
from kvkeep_storage.sweeper import Sweeper
from kvkeep_storage.verify import Checked, Verifier

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores, files_below

pytestmark = pytest.mark.anyio

ROWS = random_rows(remainder=True)
FACTS = facts_for(ROWS)


@pytest.fixture
async def stores(metadata: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    monkeypatch.setattr("kvkeep_storage.verify._SETTLE_SECONDS", 0.0)
    return await Stores.open(tmp_path, metadata)


async def _verify(stores: Stores, *, repairs: bool = False) -> list[Checked]:
    jobs = Jobs(stores.metadata)
    verifier = Verifier(stores.objects, stores.metadata, stores.leases, jobs, repairs=repairs)
    return [checked async for checked in verifier.run()]


async def _problems(stores: Stores, *, repairs: bool = False) -> list[tuple[str, bool]]:
    """What is wrong, and whether it was mended."""
    found = await _verify(stores, repairs=repairs)
    return [(one.what, one.repair is not None) for one in found if one.problem is not None]


def _document(stores: Stores, name: str) -> Path:
    return stores.root / "documents" / TENANT / "ctx_01" / name


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


async def _healthy(stores: Stores) -> Path:
    """One context with its cache; where the cache lies."""
    await stores.register(FACTS)
    return stores.folder(await stores.build(ROWS, FACTS))


@pytest.mark.parametrize(
    "changes",
    [
        {"ratios_available": "0.05,0.3", "ratio_achieved": "0.29", "stored_bytes": "77"},
        {"policy_applied": "another", "timings": '{"prefill_seconds": 9.0}'},
        {"fidelity": '{"spans": 2, "tokens": 64, "nll_full": 1.5, "ratios": []}'},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_what_another_build_of_a_shared_cache_changes_in_a_record_is_no_fault_of_the_mirror(
    stores: Stores, changes: dict[str, str]
) -> None:
    await _healthy(stores)
    key = TenantKeys(TENANT).context("ctx_01")
    before = await stores.metadata.context(TENANT, "ctx_01")
    await stores.metadata.link.command(
        "HSET", key, *(part for pair in changes.items() for part in pair)
    )
    assert await stores.metadata.context(TENANT, "ctx_01") != before
    assert await _problems(stores) == []


async def test_what_is_whole_is_told_to_be_whole(stores: Stores) -> None:
    await _healthy(stores)
    await stores.metadata.touch_context(TENANT, "ctx_01", 2e9)
    found = await _verify(stores)
    assert [one.what for one in found] == ["record", "document", "mirror", "cache"]
    assert all(one.problem is None and one.repair is None for one in found)
    # Neither a cache that the size cap took nor one that was never built is damage.
    another = facts_for(ROWS, tenant_salt="another")
    await stores.register(another, "ctx_03")
    await stores.build(ROWS, another)
    sweeper = Sweeper(stores.objects, stores.metadata, stores.leases, 60, store_bytes=0)
    assert (await sweeper.run_once()).evicted == 1
    await stores.register(FACTS, "ctx_02", cache_id="d" * 64)
    assert await _problems(stores) == []


@pytest.mark.parametrize("name", ["kv-00.safetensors", "kv-02.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
async def test_a_damaged_cache_is_found_and_repaired_by_building_it_again(
    stores: Stores, name: str, damage: str
) -> None:
    folder = await _healthy(stores)
    if damage == "flipped":
        _flip(folder / name)
    else:
        (folder / name).unlink()
    before = files_below(stores.root)
    assert await _problems(stores) == [("cache", False)]
    assert files_below(stores.root) == before
    assert await _problems(stores, repairs=True) == [("cache", True)]
    assert not folder.exists()
    record = await stores.metadata.context(TENANT, "ctx_01")
    assert record is not None
    assert record.status == "rebuilding"
    job = await Jobs(stores.metadata).claim("w1", 0)
    assert job is not None
    assert job.context_id == "ctx_01"
    await stores.build(ROWS, FACTS)
    assert await _problems(stores) == []
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_a_damaged_document_is_told_and_never_touched(stores: Stores) -> None:
    await _healthy(stores)
    _flip(_document(stores, "document.json"))
    before = files_below(stores.root)
    assert await _problems(stores, repairs=True) == [("document", False)]
    _document(stores, "document.json").unlink()
    assert await _problems(stores, repairs=True) == [("document", False)]
    assert files_below(stores.root) == [name for name in before if "document.json" not in name]


@pytest.mark.parametrize("damage", ["behind", "flipped", "missing"])
async def test_a_mirror_is_written_again_from_its_record(
    stores: Stores, redis: Redis, damage: str
) -> None:
    await _healthy(stores)
    mirror = _document(stores, "context.json")
    if damage == "behind":
        await stores.metadata.patch_context(TENANT, "ctx_01", name="renamed")
    elif damage == "flipped":
        _flip(mirror)
    else:
        mirror.unlink()
    assert await _problems(stores) == [("mirror", False)]
    assert await _problems(stores, repairs=True) == [("mirror", True)]
    assert await _problems(stores) == []
    before = await stores.metadata.context(TENANT, "ctx_01")
    await redis.flushall()
    await reindex(stores.objects, stores.metadata)
    after = await stores.metadata.context(TENANT, "ctx_01")
    assert before is not None
    assert after is not None
    assert after.name == before.name


async def test_a_half_deleted_context_gets_no_mirror_that_would_make_a_loss_of_it(
    stores: Stores,
) -> None:
    await _healthy(stores)
    key = DocumentKey(TENANT, "ctx_01")
    await delete_document(stores.objects, key)
    assert await _problems(stores, repairs=True) == [("document", False), ("mirror", False)]
    missing = await missing_document(stores.objects, stores.metadata, key)
    assert isinstance(missing, NotFound)


async def test_a_context_without_a_record_is_told(stores: Stores, redis: Redis) -> None:
    await _healthy(stores)
    (key,) = [key async for key in redis.scan_iter("*context:ctx_01")]
    await redis.delete(key)
    assert await _problems(stores, repairs=True) == [("record", False)]


async def test_a_damaged_record_is_told_and_the_rest_goes_on(stores: Stores, redis: Redis) -> None:
    await _healthy(stores)
    await stores.register(FACTS, "ctx_02")
    (key,) = [key async for key in redis.scan_iter("*context:ctx_01")]
    await redis.hset(key, "ratio", "damaged")
    found = await _verify(stores, repairs=True)
    assert [one.name for one in found if one.problem is not None] == [f"{TENANT}/ctx_01"]
    assert len(found) == 7


async def test_nothing_is_read_or_repaired_while_the_stores_do_not_belong_together(
    stores: Stores,
) -> None:
    _flip(await _healthy(stores) / "kv-00.safetensors")
    await stores.metadata.bind_store("another")
    before = files_below(stores.root)
    with pytest.raises(StoreMismatch):
        await _verify(stores, repairs=True)
    assert files_below(stores.root) == before
