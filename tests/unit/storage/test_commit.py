import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors

from kvkeep_storage.artifact import LayerRows
from kvkeep_storage.commit import commit
from kvkeep_storage.documents import get_mirror
from kvkeep_storage.errors import (
    Conflict,
    Corrupt,
    Full,
    Invalid,
    LeaseLost,
    MetadataUnavailable,
    NotFound,
    ObjectsUnavailable,
    Unreferenced,
)
from kvkeep_storage.manifest import sha256_hex
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import BuildLease, CacheRecord

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores, files_below

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("retries_do_not_wait")]

ROWS = random_rows()
FACTS = facts_for(ROWS)


def _stored_caches(stores: Stores) -> list[str]:
    return files_below(stores.root, "caches")


async def test_a_commit_makes_every_waiting_context_ready(stores: Stores) -> None:
    key = await stores.register(FACTS)
    await stores.register(FACTS, "ctx_02", ratio=0.1)
    await stores.register(FACTS, "ctx_03", ratio=0.5)
    cache = await stores.build(ROWS, FACTS)
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache
    statuses = [
        record.status for record in (await stores.metadata.contexts(TENANT, limit=9)).records
    ]
    assert statuses == ["ready", "ready", "queued"]
    mirror = await get_mirror(stores.objects, key)
    assert (mirror.record.status, mirror.generation) == ("ready", cache.generation)


async def test_a_commit_leaves_slabs_and_a_manifest_and_nothing_else(stores: Stores) -> None:
    await stores.register(FACTS)
    cache = await stores.build(ROWS, FACTS)
    folder = stores.folder(cache)
    names = ["kv-00.safetensors", "kv-01.safetensors", "kv-02.safetensors", "manifest.json"]
    assert _stored_caches(stores) == [
        str((folder / name).relative_to(stores.root)) for name in names
    ]
    content = (folder / "manifest.json").read_bytes()
    assert cache.manifest_sha256 == sha256_hex(content)
    assert cache.stored_bytes == sum((folder / name).stat().st_size for name in names)
    assert json.loads(content)["fingerprint"]["token_ids_digest"] == (
        FACTS.fingerprint.token_ids_digest
    )
    for name in names[:3]:
        with safetensors.safe_open(folder / name, framework="numpy") as opened:
            assert len(opened.keys()) == 8


async def test_a_higher_ratio_replaces_the_record_and_keeps_the_old_files(stores: Stores) -> None:
    low = random_rows(ratios=(0.05, 0.1))
    await stores.register(FACTS)
    first = await stores.build(low, facts_for(low))
    second = await stores.build(ROWS, FACTS)
    # A reader may still be at the old one; it is the sweeper's.
    assert stores.folder(first).is_dir()
    assert second.generation != first.generation
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_a_lower_ratio_never_replaces_a_higher_one(stores: Stores) -> None:
    low = random_rows(ratios=(0.05, 0.1))
    await stores.register(FACTS)
    first = await stores.build(ROWS, FACTS)
    before = _stored_caches(stores)
    with pytest.raises(Conflict, match="higher ratio"):
        await stores.build(low, facts_for(low))
    assert _stored_caches(stores) == before
    assert await stores.metadata.cache(TENANT, first.cache_id) == first


async def test_a_builder_that_lost_its_lease_changes_nothing(stores: Stores) -> None:
    await stores.register(FACTS)
    lease = await stores.lease(FACTS)
    await stores.leases.release(lease)
    with pytest.raises(LeaseLost):
        await commit(stores.objects, stores.metadata, stores.leases, lease, ROWS, FACTS)
    assert _stored_caches(stores) == []


class _Interfering(Objects):
    """Does something once, right after the manifest was put."""

    act: Any = None

    async def put_if_absent(self, key: str, content: bytes) -> None:
        await super().put_if_absent(key, content)
        if self.act is not None and key.endswith("manifest.json"):
            act, self.act = self.act, None
            await act()


def _with(stores: Stores, objects_like: type[Objects]) -> Any:
    stores.objects = objects_like.open(f"file://{stores.root}")
    return stores.objects


async def test_field_54_a_lease_taken_over_in_mid_build_fences_the_commit(stores: Stores) -> None:
    await stores.register(FACTS)
    lease = await stores.lease(FACTS)

    async def take_over() -> None:
        await stores.leases.release(lease)
        await stores.lease(FACTS)

    _with(stores, _Interfering).act = take_over
    with pytest.raises(LeaseLost):
        await commit(stores.objects, stores.metadata, stores.leases, lease, ROWS, FACTS)
    assert await stores.metadata.cache(TENANT, lease.cache_id) is None
    assert _stored_caches(stores) == []


async def test_a_cache_whose_contexts_were_deleted_meanwhile_is_not_kept(stores: Stores) -> None:
    await stores.register(FACTS)
    _with(stores, _Interfering).act = lambda: stores.metadata.delete_context(TENANT, "ctx_01")
    with pytest.raises(Unreferenced):
        await stores.build(ROWS, FACTS)
    assert _stored_caches(stores) == []


async def test_a_lease_for_another_cache_is_refused(stores: Stores) -> None:
    await stores.register(FACTS)
    foreign = BuildLease(TENANT, "other", "builder", 1)
    with pytest.raises(Invalid, match="lease"):
        await commit(stores.objects, stores.metadata, stores.leases, foreign, ROWS, FACTS)


async def test_rows_that_are_not_finite_are_never_committed(stores: Stores) -> None:
    await stores.register(FACTS)
    layer = ROWS.layers[1]
    damaged = LayerRows(np.full_like(layer.k, 0xFF), layer.v, layer.position)
    with pytest.raises(Invalid, match="NaN"):
        await stores.build(replace(ROWS, layers=(ROWS.layers[0], damaged)), FACTS)
    assert _stored_caches(stores) == []
    with pytest.raises(NotFound):
        await stores.load(FACTS)


class _Flaky(Objects):
    """Fails the first two times for each key and operation; some failures come after success."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failures: dict[str, int] = {}

    def _fail(self, what: str) -> None:
        self.failures[what] = self.failures.get(what, 0) + 1
        if self.failures[what] <= 2:
            raise ObjectsUnavailable(what, "flaky")

    async def put(self, key: str, content: bytes) -> None:
        await super().put(key, content)
        self._fail(f"put {key}")

    async def put_if_absent(self, key: str, content: bytes) -> None:
        # The reply is lost: the object is there, and the retry finds it.
        await super().put_if_absent(key, content)
        self._fail(f"put_if_absent {key}")

    async def size(self, key: str) -> int:
        self._fail(f"size {key}")
        return await super().size(key)


async def test_trouble_that_passes_does_not_stop_a_commit(stores: Stores) -> None:
    await stores.register(FACTS)
    plain, flaky = stores.objects, _with(stores, _Flaky)
    await stores.build(ROWS, FACTS)
    # Three slabs put and looked at, and a mirror; a manifest is found by its first retry.
    assert sorted(flaky.failures.values()) == [1, 3, 3, 3, 3, 3, 3, 3]
    stores.objects = plain
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_a_manifest_of_somebody_else_in_our_place_is_a_conflict(stores: Stores) -> None:
    class Foreign(Objects):
        async def put_if_absent(self, key: str, content: bytes) -> None:
            await super().put_if_absent(key, content + b" ")
            await super().put_if_absent(key, content)

    await stores.register(FACTS)
    _with(stores, Foreign)
    with pytest.raises(Conflict):
        await stores.build(ROWS, FACTS)
    assert _stored_caches(stores) == []


async def test_a_store_that_is_away_ends_a_commit_with_nothing_visible(stores: Stores) -> None:
    class Away(Objects):
        async def put(self, key: str, content: bytes) -> None:
            raise ObjectsUnavailable("put", "away")

    await stores.register(FACTS)
    _with(stores, Away)
    with pytest.raises(ObjectsUnavailable):
        await stores.build(ROWS, FACTS)
    assert _stored_caches(stores) == []


async def test_a_full_store_ends_a_commit_and_gives_its_space_back(stores: Stores) -> None:
    class FullAtLast(Objects):
        async def put(self, key: str, content: bytes) -> None:
            if key.endswith("kv-02.safetensors"):
                raise Full(key, len(content))
            await super().put(key, content)

    await stores.register(FACTS)
    _with(stores, FullAtLast)
    with pytest.raises(Full):
        await stores.build(ROWS, FACTS)
    assert _stored_caches(stores) == []
    with pytest.raises(NotFound):
        await stores.load(FACTS)


async def test_a_slab_that_arrived_short_is_never_committed(stores: Stores) -> None:
    class Short(Objects):
        async def put(self, key: str, content: bytes) -> None:
            await super().put(key, content[:-1])

    await stores.register(FACTS)
    _with(stores, Short)
    with pytest.raises(Corrupt, match="were written"):
        await stores.build(ROWS, FACTS)
    assert _stored_caches(stores) == []


class _LosesReplies(Metadata):
    """Carries out a flip and loses the reply, as often as told."""

    losses: int = 1

    async def flip(self, cache: CacheRecord, *, lease: BuildLease, now: float) -> list[str]:
        ready = await super().flip(cache, lease=lease, now=now)
        if self.losses > 0:
            self.losses -= 1
            raise MetadataUnavailable("script", "the reply was lost")
        return ready


@pytest.mark.parametrize("losses", [1, 100])
async def test_a_flip_whose_reply_was_lost_keeps_its_generation(
    stores: Stores, valkey_url: str, losses: int
) -> None:
    await stores.register(FACTS)
    stores.metadata = lossy = await _LosesReplies.connect(valkey_url)
    lossy.losses = losses
    try:
        if losses > 1:
            with pytest.raises(MetadataUnavailable):
                await stores.build(ROWS, FACTS)
        else:
            await stores.build(ROWS, FACTS)
        assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    finally:
        await lossy.close()


async def test_a_mirror_that_cannot_be_written_does_not_undo_a_commit(stores: Stores) -> None:
    class NoMirrors(Objects):
        async def put(self, key: str, content: bytes) -> None:
            if key.endswith("context.json"):
                raise Full(key, len(content))
            await super().put(key, content)

    await stores.register(FACTS)
    _with(stores, NoMirrors)
    await stores.build(ROWS, FACTS)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
