"""What lies in a store is data of a known type, and read as nothing else."""

import ast
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from kvkeep_storage.documents import get_document
from kvkeep_storage.errors import Corrupt, DocumentCorrupt, Incompatible
from kvkeep_storage.fingerprint import Fingerprint
from kvkeep_storage.keys import DocumentKey

from ..support.caches import assert_equal_rows, facts_for, random_rows
from ..support.stores import TENANT, Stores, files_below

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

REPOSITORY = Path(__file__).parents[2]
ROWS = random_rows(dtype="bfloat16")
FACTS = facts_for(ROWS)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
async def test_field_12_a_cache_is_never_read_as_another_dtype(
    stores: Stores, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 has the same size as the stored bfloat16: nothing but the record tells."""
    await stores.register(FACTS)
    await stores.build(ROWS, FACTS)
    other = replace(FACTS, fingerprint=replace(FACTS.fingerprint, dtype=dtype))
    # A server whose dtype setting was changed looks for another cache,
    assert other.fingerprint.digest != FACTS.fingerprint.digest
    # and is refused the stored one even where it asks for that.
    monkeypatch.setattr(Fingerprint, "digest", FACTS.fingerprint.digest)
    with pytest.raises(Incompatible, match="dtype"):
        await stores.load(other)
    monkeypatch.undo()
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_field_57_every_stored_file_is_safetensors_or_json(stores: Stores) -> None:
    await stores.register(FACTS)
    await stores.build(ROWS, FACTS)
    names = files_below(stores.root)
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}
    for name in names:
        path = stores.root / name
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            with safe_open(path, framework="np") as file:
                assert len(file.keys()) > 0


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


class _Exploit:
    """What a pickle may hold: a call, made by whoever loads it."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return _write, (str(self._proof), "run")


async def test_field_57_a_pickle_in_the_store_is_damage_and_is_never_run(
    stores: Stores, tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    planted = pickle.dumps(_Exploit(proof))
    pickle.loads(planted)
    assert proof.read_text() == "run"
    proof.unlink()

    key = await stores.register(FACTS)
    folder = stores.folder(await stores.build(ROWS, FACTS))
    for name in ("kv-01.safetensors", "manifest.json"):
        (folder / name).write_bytes(planted)
        with pytest.raises(Corrupt):
            await stores.load(FACTS)
    (stores.root / DocumentKey(TENANT, key.context_id).body).write_bytes(planted)
    with pytest.raises(DocumentCorrupt):
        await get_document(stores.objects, key)
    assert not proof.exists()


def test_field_57_no_file_of_the_product_can_unpickle() -> None:
    rooms = ("kernels", "storage", "service", "clients/python")
    files = [path for room in rooms for path in (REPOSITORY / room).rglob("*.py")]
    assert len(files) > 50
    guilty = [str(path) for path in files if _can_unpickle(ast.parse(path.read_text()))]
    assert guilty == []


def _can_unpickle(tree: ast.Module) -> bool:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Attribute) and node.attr == "load":
            names = ["pickle"] if ast.unparse(node.value) == "torch" else []
        if any(name.partition(".")[0] in banned for name in names):
            return True
    return False
