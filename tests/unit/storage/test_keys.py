import pytest

from kvkeep_storage.errors import Invalid
from kvkeep_storage.keys import DocumentKey, GenerationKey


def test_every_object_has_its_documented_place() -> None:
    generation = GenerationKey("acme", "c1", "g1")
    assert generation.slab(0) == "caches/acme/c1/g1/kv-00.safetensors"
    assert generation.slab(11) == "caches/acme/c1/g1/kv-11.safetensors"
    assert generation.manifest == "caches/acme/c1/g1/manifest.json"
    document = DocumentKey("acme", "ctx_1")
    assert document.body == "documents/acme/ctx_1/document.json"
    assert document.mirror == "documents/acme/ctx_1/context.json"


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "../other", "a\0", "a\n", "é"])
def test_no_name_leads_into_another_tenants_directory(name: str) -> None:
    for build in (
        lambda: DocumentKey(name, "x"),
        lambda: DocumentKey("t", name),
        lambda: GenerationKey(name, "c", "g"),
        lambda: GenerationKey("t", name, "g"),
        lambda: GenerationKey("t", "c", name),
    ):
        with pytest.raises(Invalid):
            build()
