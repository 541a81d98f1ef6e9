import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore
from pydantic import ValidationError

from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.documents import (
    DocumentBody,
    delete_document,
    get_document,
    get_mirror,
    mirror_context,
    missing_document,
    put_document,
)
from kvkeep_storage.errors import (
    Conflict,
    DocumentCorrupt,
    NotFound,
    ObjectsUnavailable,
    StoreMismatch,
)
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.reindex import reindex
from kvkeep_storage.remote_backend import RemoteBackend

from ...support.stores import entries_below
from .samples import TENANT, a_cache, a_context, stored

pytestmark = pytest.mark.anyio

KEY = DocumentKey(TENANT, "ctx_01")
OTHER = DocumentKey(TENANT, "ctx_02")


def a_document(**changes: Any) -> DocumentBody:
    content: dict[str, Any] = {
        "text": 'Clause 1.\n"Quoted", 日本語, \u2028 and \x00.',
        "system": None,
        "instructions": "Answer briefly.",
        "protect": ((0, 7), (10, 12)),
        "prefix_text": "<|im_start|>",
        "policy": "kvzip",
        "ratio": 0.3,
        "scoring": "local",
    }
    return DocumentBody(**{**content, **changes})


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects.open(f"file://{tmp_path}")


async def test_a_document_reads_back_equal(objects: Objects) -> None:
    await put_document(objects, KEY, a_document())
    assert await get_document(objects, KEY) == a_document()


@given(
    text=st.text(),
    system=st.none() | st.text(),
    ratio=st.floats(0, 1, exclude_min=True),
    protect=st.lists(st.tuples(st.integers(0), st.integers(0))),
)
async def test_any_document_reads_back_equal(
    text: str, system: str | None, ratio: float, protect: list[tuple[int, int]]
) -> None:
    memory = Objects(RemoteBackend(MemoryStore()))
    document = a_document(text=text, system=system, ratio=ratio, protect=tuple(protect))
    await put_document(memory, KEY, document)
    assert await get_document(memory, KEY) == document


async def test_a_document_names_its_quantisation_only_when_it_has_one(objects: Objects) -> None:
    for kind, is_named in (("none", False), ("int8", True)):
        await put_document(objects, KEY, a_document(quantization=kind))
        assert (b"quantization" in await objects.get(KEY.body)) == is_named
        assert (await get_document(objects, KEY)).quantization == kind


async def test_a_document_names_its_normalisation_only_when_it_has_one(objects: Objects) -> None:
    for kind, is_named in (("none", False), ("kvzip_plus", True)):
        await put_document(objects, KEY, a_document(normalization=kind))
        assert (b"normalization" in await objects.get(KEY.body)) == is_named
        assert (await get_document(objects, KEY)).normalization == kind


async def test_a_document_names_its_neighbours_only_when_it_has_some(objects: Objects) -> None:
    for count in (0, 2):
        await put_document(objects, KEY, a_document(neighbours=count))
        assert (b"neighbours" in await objects.get(KEY.body)) == bool(count)
        assert (await get_document(objects, KEY)).neighbours == count


async def test_a_document_names_its_remainder_only_when_it_has_one(objects: Objects) -> None:
    for wanted in (False, True):
        await put_document(objects, KEY, a_document(remainder=wanted))
        assert (b"remainder" in await objects.get(KEY.body)) == wanted
        assert (await get_document(objects, KEY)).remainder is wanted


async def test_a_document_of_before_remainders_still_verifies_and_asks_for_none(
    objects: Objects,
) -> None:
    written = (
        b'{"schema_version":1,"kind":"document","tenant":"acme","context_id":"ctx_01",'
        b'"sha256":"c4f99c0642b1b7eea4f90f7fe40e7011aa95cf3bca00773337db88600a3619e3",'
        b'"body":{"text":"Clause 1.","system":null,"instructions":null,"protect":[[0,6]],'
        b'"prefix_text":"","policy":"kvzip","ratio":0.3,"scoring":"local","quantization":"int8"}}'
    )
    await objects.put(KEY.body, written)
    found = await get_document(objects, KEY)
    assert (found.text, found.quantization, found.remainder) == ("Clause 1.", "int8", False)
    await put_document(objects, KEY, found)
    assert await objects.get(KEY.body) == written


async def test_a_missing_document_is_not_found(objects: Objects) -> None:
    with pytest.raises(NotFound):
        await get_document(objects, KEY)


async def test_any_flipped_bit_in_a_document_is_seen() -> None:
    memory = Objects(RemoteBackend(MemoryStore()))
    await put_document(memory, KEY, a_document())
    content = await memory.get(KEY.body)
    chosen = random.Random(7)
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 1 << chosen.randrange(8)
        await memory.put(KEY.body, bytes(damaged))
        with pytest.raises(DocumentCorrupt):
            await get_document(memory, KEY)


async def test_a_cut_or_longer_document_is_seen(objects: Objects) -> None:
    await put_document(objects, KEY, a_document())
    content = await objects.get(KEY.body)
    for damaged in (b"", content[:-1], content[: len(content) // 2], content + b"x"):
        await objects.put(KEY.body, damaged)
        with pytest.raises(DocumentCorrupt):
            await get_document(objects, KEY)


async def test_another_contexts_document_in_its_place_is_seen(objects: Objects) -> None:
    await put_document(objects, OTHER, a_document())
    await objects.put(KEY.body, await objects.get(OTHER.body))
    with pytest.raises(DocumentCorrupt, match="ctx_02"):
        await get_document(objects, KEY)


async def test_an_error_never_repeats_the_document(objects: Objects) -> None:
    await put_document(objects, KEY, a_document(text="a secret clause"))
    content = json.loads(await objects.get(KEY.body))
    await objects.put(KEY.body, json.dumps(content | {"kind": "a secret clause"}).encode())
    with pytest.raises(DocumentCorrupt) as corrupt:
        await get_document(objects, KEY)
    assert "secret" not in str(corrupt.value)


@pytest.mark.parametrize(
    "change", [{"ratio": 0.0}, {"ratio": 1.5}, {"protect": ((-1, 2),)}, {"surprise": 1}]
)
def test_a_document_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        a_document(**change)


async def test_a_mirror_follows_the_record(objects: Objects, metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    await mirror_context(objects, metadata, KEY)
    mirror = await get_mirror(objects, KEY)
    assert mirror.record == await stored(metadata, "ctx_01")
    assert mirror.generation is None
    await metadata.patch_context(TENANT, "ctx_01", name="renamed", metadata={"a": "b"})
    await metadata.restore_cache(a_cache())
    await mirror_context(objects, metadata, KEY)
    mirror = await get_mirror(objects, KEY)
    assert (mirror.record.name, mirror.record.metadata) == ("renamed", {"a": "b"})
    assert mirror.generation == "gen1"


async def test_a_damaged_or_foreign_mirror_is_seen(objects: Objects, metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    await metadata.create_context(a_context("ctx_02"))
    await mirror_context(objects, metadata, KEY)
    await mirror_context(objects, metadata, OTHER)
    content = await objects.get(KEY.mirror)
    damaged = content.replace(b'"kvzip"', b'"kvpop"', 1)
    assert damaged != content
    for bad in (damaged, await objects.get(OTHER.mirror), await objects.get(KEY.mirror) + b"}"):
        await objects.put(KEY.mirror, bad)
        with pytest.raises(DocumentCorrupt):
            await get_mirror(objects, KEY)


async def test_a_document_is_no_mirror(objects: Objects) -> None:
    await put_document(objects, KEY, a_document())
    await objects.put(KEY.mirror, await objects.get(KEY.body))
    with pytest.raises(DocumentCorrupt):
        await get_mirror(objects, KEY)


class _Interfering(Objects):
    """Lets somebody else act right after a mirror was written, as often as there are acts."""

    acts: list[Any]

    async def put(self, key: str, content: bytes) -> None:
        await super().put(key, content)
        if self.acts:
            await self.acts.pop(0)()


async def test_a_change_during_the_write_reaches_the_mirror(
    metadata: Metadata, tmp_path: Path
) -> None:
    objects = _Interfering.open(f"file://{tmp_path}")
    await metadata.create_context(a_context())
    objects.acts = [lambda: metadata.patch_context(TENANT, "ctx_01", name="later")]
    await mirror_context(objects, metadata, KEY)
    assert (await get_mirror(objects, KEY)).record.name == "later"


async def test_a_deletion_during_the_write_takes_the_mirror_with_it(
    metadata: Metadata, tmp_path: Path
) -> None:
    objects = _Interfering.open(f"file://{tmp_path}")
    objects.acts = []
    await bind_if_new(objects, metadata)
    await metadata.create_context(a_context())
    objects.acts = [lambda: metadata.delete_context(TENANT, "ctx_01")]
    await mirror_context(objects, metadata, KEY)
    with pytest.raises(NotFound):
        await get_mirror(objects, KEY)


@pytest.mark.parametrize("moment", ["before the write", "during it"])
async def test_a_redis_flushed_beside_the_write_takes_no_mirror_with_it(
    metadata: Metadata, tmp_path: Path, moment: str
) -> None:
    objects = _Interfering.open(f"file://{tmp_path}")
    objects.acts = []
    await bind_if_new(objects, metadata)
    await metadata.create_context(a_context())
    await put_document(objects, KEY, a_document())
    await mirror_context(objects, metadata, KEY)
    flushing = partial(metadata.link.command, "FLUSHALL")
    if moment == "before the write":
        await flushing()
    else:
        objects.acts = [flushing]
    with pytest.raises(StoreMismatch):
        await mirror_context(objects, metadata, KEY)
    # So the next reindex finds the context again.
    assert (await reindex(objects, metadata)).contexts == 1


async def test_a_use_during_the_write_is_not_written_again(
    metadata: Metadata, tmp_path: Path
) -> None:
    objects = _Interfering.open(f"file://{tmp_path}")
    await metadata.create_context(a_context())
    objects.acts = [lambda: metadata.touch_context(TENANT, "ctx_01", 1_790_000_001.0)] * 3
    await mirror_context(objects, metadata, KEY)
    assert len(objects.acts) == 2


async def test_a_record_that_never_settles_is_said(metadata: Metadata, tmp_path: Path) -> None:
    objects = _Interfering.open(f"file://{tmp_path}")
    await metadata.create_context(a_context())
    objects.acts = [
        lambda name=str(n): metadata.patch_context(TENANT, "ctx_01", name=name) for n in range(50)
    ]
    with pytest.raises(Conflict, match="mirrored"):
        await mirror_context(objects, metadata, KEY)


async def test_deleting_removes_both_files_and_the_empty_directories(
    objects: Objects, metadata: Metadata, tmp_path: Path
) -> None:
    await metadata.create_context(a_context())
    await put_document(objects, KEY, a_document())
    await mirror_context(objects, metadata, KEY)
    await delete_document(objects, KEY)
    await delete_document(objects, KEY)
    assert entries_below(tmp_path) == []


class _DyingAfterOne(Objects):
    """Its process ends, as it were, right after the first deletion."""

    async def delete(self, key: str) -> None:
        await super().delete(key)
        raise ObjectsUnavailable("delete", "the process has ended")


async def test_a_deletion_cut_short_anywhere_does_not_look_like_a_loss(
    metadata: Metadata, tmp_path: Path
) -> None:
    objects = _DyingAfterOne.open(f"file://{tmp_path}")
    await bind_if_new(objects, metadata)
    await metadata.create_context(a_context())
    await put_document(objects, KEY, a_document())
    await mirror_context(objects, metadata, KEY)
    with pytest.raises(ObjectsUnavailable):
        await delete_document(objects, KEY)
    assert await get_document(objects, KEY) == a_document()
    await Objects.open(f"file://{tmp_path}").delete(KEY.body)
    assert isinstance(await missing_document(objects, metadata, KEY), NotFound)


async def test_a_lost_document_is_told_from_a_deleted_one(
    objects: Objects, metadata: Metadata
) -> None:
    await bind_if_new(objects, metadata)
    await metadata.create_context(a_context())
    await put_document(objects, KEY, a_document())
    await mirror_context(objects, metadata, KEY)
    await objects.delete(KEY.body)
    assert isinstance(await missing_document(objects, metadata, KEY), DocumentCorrupt)
    await metadata.delete_context(TENANT, KEY.context_id)
    assert isinstance(await missing_document(objects, metadata, KEY), NotFound)
