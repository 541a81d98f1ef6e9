from pathlib import Path

import pytest

from kvkeep_storage.binding import bind_if_new, require_bound
from kvkeep_storage.errors import StoreMismatch
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects

pytestmark = pytest.mark.anyio


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects.open(f"file://{tmp_path}")


async def test_a_new_store_and_an_empty_redis_are_bound_once(
    objects: Objects, metadata: Metadata
) -> None:
    with pytest.raises(StoreMismatch):
        await require_bound(objects, metadata)
    await bind_if_new(objects, metadata)
    await require_bound(objects, metadata)
    bound = await metadata.store_id()
    assert bound == await objects.find_store_id()
    await bind_if_new(objects, metadata)
    assert await metadata.store_id() == bound


@pytest.mark.parametrize("key", ["documents/t/c/document.json", "caches/t/c/g/kv-00.safetensors"])
async def test_a_store_with_anything_in_it_is_never_bound_without_a_reindex(
    objects: Objects, metadata: Metadata, key: str
) -> None:
    await objects.store_id()
    await objects.put(key, b"1")
    with pytest.raises(StoreMismatch):
        await bind_if_new(objects, metadata)
    assert await metadata.store_id() is None


async def test_an_empty_store_under_a_redis_of_another_is_a_mismatch(
    objects: Objects, metadata: Metadata
) -> None:
    # A lost directory, or the wrong URL.
    await metadata.bind_store("another")
    with pytest.raises(StoreMismatch):
        await bind_if_new(objects, metadata)
    assert await metadata.store_id() == "another"


async def test_a_store_whose_identity_cannot_be_read_is_a_mismatch(
    objects: Objects, metadata: Metadata
) -> None:
    await bind_if_new(objects, metadata)
    await objects.put("store.json", b"damaged")
    with pytest.raises(StoreMismatch):
        await require_bound(objects, metadata)
