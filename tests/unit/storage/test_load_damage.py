import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from kvkeep_storage.errors import (
    Corrupt,
    Incompatible,
    NotFound,
    ObjectsUnavailable,
    StoreMismatch,
)
from kvkeep_storage.load import quarantine
from kvkeep_storage.manifest import SCHEMA_VERSION, sha256_hex
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import CacheRecord

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores, files_below

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("retries_do_not_wait")]

ROWS = random_rows(remainder=True)
FACTS = facts_for(ROWS)


async def _committed(stores: Stores) -> CacheRecord:
    await stores.register(FACTS)
    return await stores.build(ROWS, FACTS)


def _with(stores: Stores, objects_like: type[Objects]) -> Any:
    stores.objects = objects_like.open(f"file://{stores.root}")
    return stores.objects


async def _expect_corrupt(stores: Stores, cache: CacheRecord) -> Corrupt:
    """Loading fails, names what to quarantine, and deletes nothing by itself."""
    before = files_below(stores.root)
    with pytest.raises(Corrupt) as corrupt:
        await stores.load(FACTS)
    assert (corrupt.value.cache_id, corrupt.value.generation) == (cache.cache_id, cache.generation)
    assert files_below(stores.root) == before
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache
    return corrupt.value


NAMES = ["kv-00.safetensors", "kv-01.safetensors", "kv-02.safetensors", "manifest.json"]

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "last byte": lambda content: content[:-1] + bytes([content[-1] ^ 0x80]),
    "truncated": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "extended": lambda content: content + b"\0",
    "zeroed": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_is_always_seen_and_never_deletes(
    stores: Stores, name: str, damage: str
) -> None:
    cache = await _committed(stores)
    path = stores.folder(cache) / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert name in (await _expect_corrupt(stores, cache)).name


@pytest.mark.parametrize("name", NAMES)
async def test_a_missing_file_is_seen(stores: Stores, name: str) -> None:
    cache = await _committed(stores)
    (stores.folder(cache) / name).unlink()
    assert (await _expect_corrupt(stores, cache)).reason == "is missing"


async def test_swapped_slabs_are_seen(stores: Stores) -> None:
    cache = await _committed(stores)
    first, second = (stores.folder(cache) / name for name in NAMES[:2])
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    await _expect_corrupt(stores, cache)


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[3:], NAMES], ids=["slab", "manifest", "all"])
async def test_files_of_another_context_are_seen(stores: Stores, names: list[str]) -> None:
    cache = await _committed(stores)
    # The same counts, so that every file has the same size.
    foreign_rows = random_rows(99, counts=ROWS.counts, remainder=True)
    foreign_facts = facts_for(foreign_rows, token_ids_digest="foreign")
    await stores.register(foreign_facts, "ctx_02")
    foreign = await stores.build(foreign_rows, foreign_facts)
    for name in names:
        shutil.copy(stores.folder(foreign) / name, stores.folder(cache) / name)
    await _expect_corrupt(stores, cache)


async def test_field_17_files_of_an_old_generation_are_seen(stores: Stores) -> None:
    old = await _committed(stores)
    rebuilt = random_rows(5, counts=ROWS.counts, remainder=True)
    lease = await stores.lease(FACTS)
    await stores.leases.release(lease)
    cache = await stores.build(rebuilt, FACTS)
    assert cache.generation != old.generation
    assert_equal_rows((await stores.load(FACTS)).rows, rebuilt)
    for name in NAMES[:3]:
        shutil.copy(stores.folder(old) / name, stores.folder(cache) / name)
    await _expect_corrupt(stores, cache)


async def test_a_manifest_of_another_cache_is_refused_even_if_the_record_names_its_digest(
    stores: Stores, redis: Redis
) -> None:
    cache = await _committed(stores)
    foreign_facts = facts_for(ROWS, token_ids_digest="foreign")
    await stores.register(foreign_facts, "ctx_02")
    foreign = await stores.build(ROWS, foreign_facts)
    for name in NAMES:
        shutil.copy(stores.folder(foreign) / name, stores.folder(cache) / name)
    await _rewrite_record(redis, cache, manifest_sha256=foreign.manifest_sha256)
    with pytest.raises(Corrupt, match="another cache"):
        await stores.load(FACTS)


async def _rewrite_record(redis: Redis, cache: CacheRecord, **changes: str) -> None:
    (key,) = [key async for key in redis.scan_iter(f"*:cache:{cache.cache_id}")]
    for name, value in changes.items():
        await redis.hset(key, name, value)


async def test_a_newer_schema_is_incompatible_and_kept(stores: Stores, redis: Redis) -> None:
    cache = await _committed(stores)
    path = stores.folder(cache) / "manifest.json"
    newer = json.loads(path.read_bytes()) | {"schema_version": SCHEMA_VERSION + 1, "new": 1}
    path.write_bytes(json.dumps(newer).encode())
    await _rewrite_record(redis, cache, manifest_sha256=sha256_hex(path.read_bytes()))
    with pytest.raises(Incompatible, match="schema_version"):
        await stores.load(FACTS)


@pytest.mark.parametrize("lost", ["directory", "redis", "store id"])
async def test_nothing_is_called_corrupt_when_the_stores_do_not_belong_together(
    stores: Stores, redis: Redis, lost: str
) -> None:
    cache = await _committed(stores)
    path = stores.folder(cache) / NAMES[1]
    path.write_bytes(b"wrong")
    if lost == "directory":
        shutil.rmtree(stores.root)
        stores.root.mkdir()
    elif lost == "redis":
        await redis.delete("{kvkeep}:store_id")
    else:
        (stores.root / "store.json").write_text('{"store_id": "another", "schema": 1}')
    with pytest.raises(StoreMismatch):
        await stores.load(FACTS)
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache


async def test_quarantine_forgets_deletes_and_names_what_to_rebuild(stores: Stores) -> None:
    cache = await _committed(stores)
    (stores.folder(cache) / NAMES[2]).write_bytes(b"wrong")
    await _expect_corrupt(stores, cache)
    ids = await quarantine(
        stores.objects, stores.metadata, TENANT, cache.cache_id, cache.generation
    )
    assert ids == ["ctx_01"]
    assert files_below(stores.root, "caches") == []
    with pytest.raises(NotFound):
        await stores.load(FACTS)
    await stores.build(ROWS, FACTS)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_quarantine_of_an_old_generation_leaves_the_new_one(stores: Stores) -> None:
    old = await _committed(stores)
    await stores.build(ROWS, FACTS)
    assert (
        await quarantine(stores.objects, stores.metadata, TENANT, old.cache_id, old.generation)
        == []
    )
    assert not stores.folder(old).exists()
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_quarantine_succeeds_when_the_objects_cannot_be_deleted(stores: Stores) -> None:
    class Away(Objects):
        async def delete(self, key: str) -> None:
            raise ObjectsUnavailable("delete", "away")

    cache = await _committed(stores)
    _with(stores, Away)
    ids = await quarantine(
        stores.objects, stores.metadata, TENANT, cache.cache_id, cache.generation
    )
    assert ids == ["ctx_01"]
    with pytest.raises(NotFound):
        await stores.load(FACTS)


async def test_quarantine_holds_against_a_reindex_that_saw_the_generation_whole(
    stores: Stores,
) -> None:
    cache = await _committed(stores)
    metadata = stores.metadata

    class Reindexed(Objects):
        async def delete(self, key: str) -> None:
            if await metadata.restore_cache(cache):
                await metadata.attach(TENANT, "ctx_01", 1_790_000_100.0)
            await super().delete(key)

    _with(stores, Reindexed)
    ids = await quarantine(stores.objects, metadata, TENANT, cache.cache_id, cache.generation)
    assert ids == ["ctx_01"]
    assert await metadata.cache(TENANT, cache.cache_id) is None
    record = await metadata.context(TENANT, "ctx_01")
    assert record is not None
    assert record.status == "rebuilding"
