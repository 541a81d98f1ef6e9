import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_storage.fingerprint import Fingerprint, ModelIdentity, digest_token_ids

from ...support.caches import a_fingerprint

OTHER: dict[str, Any] = {
    "num_layers": 3,
    "num_kv_heads": 3,
    "head_dim": 16,
    "policy_version": 2,
    "protected": ((0, 5),),
    "policy_parameters": {"scoring": "exact", "chunk_tokens": 2048},
}


@pytest.mark.parametrize("name", [item.name for item in fields(Fingerprint)])
def test_every_field_is_part_of_the_identity(name: str) -> None:
    changed = replace(a_fingerprint(), **{name: OTHER.get(name, "other")})
    assert changed.digest != a_fingerprint().digest


def test_the_ratio_is_no_part_of_the_identity() -> None:
    assert not [item.name for item in fields(Fingerprint) if "ratio" in item.name]


def test_field_35_the_digest_is_the_same_in_every_process_and_version() -> None:
    # Changing this value makes every stored cache unknown: raise the schema version with it.
    expected = "936a0f8c81f676156a3258bbf73d48f1b6f28dd59f7a309b8f3b7eaf96a0f91b"
    assert a_fingerprint().digest == expected


def test_field_37_text_cannot_move_from_one_field_to_the_next() -> None:
    # A field may even hold what looks like the next field's tag.
    one = a_fingerprint(adapter_digest="a", tenant_salt="bc")
    two = a_fingerprint(adapter_digest="ab", tenant_salt="c")
    three = a_fingerprint(adapter_digest="atenant_salt", tenant_salt="bc")
    assert len({one.digest, two.digest, three.digest}) == 3


def test_a_tenant_cannot_share_a_cache_with_another() -> None:
    assert a_fingerprint(tenant_salt="a").digest != a_fingerprint(tenant_salt="b").digest
    assert a_fingerprint(tenant_salt="a").digest == a_fingerprint(tenant_salt="a").digest
    with pytest.raises(ValueError, match="tenant_salt"):
        a_fingerprint(tenant_salt="")


def test_parameters_of_different_types_differ() -> None:
    digests = {a_fingerprint(policy_parameters={"n": value}).digest for value in (1, 1.0, "1")}
    assert len(digests) == 3


def test_the_order_of_parameters_does_not_matter() -> None:
    one = a_fingerprint(policy_parameters={"a": 1, "b": 2})
    two = a_fingerprint(policy_parameters={"b": 2, "a": 1})
    assert one.digest == two.digest
    assert one == two
    assert hash(one) == hash(two)


def test_spans_that_only_look_alike_differ() -> None:
    one = a_fingerprint(protected=((1, 23), (45, 67)))
    two = a_fingerprint(protected=((12, 34), (56, 67)))
    assert one.digest != two.digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("dtype", 3),
        ("head_dim", 0),
        ("num_layers", True),
        ("protected", ((3, 3),)),
        ("protected", ((0, 4), (3, 5))),
        ("policy_parameters", {"x": float("nan")}),
        ("policy_parameters", {"x": None}),
        ("policy_parameters", {"": 1}),
    ],
)
def test_a_bad_field_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        a_fingerprint(**{name: value})


def test_parameters_cannot_be_changed_afterwards() -> None:
    given_parameters = {"a": 1}
    made = a_fingerprint(policy_parameters=given_parameters)
    before = made.digest
    given_parameters["a"] = 2
    assert made.digest == before
    with pytest.raises(TypeError):
        made.policy_parameters["a"] = 3  # type: ignore[index]


spans = st.lists(st.integers(0, 10_000), unique=True, max_size=8).map(
    lambda edges: tuple(zip(*[iter(sorted(edges)[: len(edges) // 2 * 2])] * 2, strict=True))
)
parameters = st.dictionaries(
    st.text(min_size=1),
    st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
)


@given(prefix=st.text(), protected=spans, policy=parameters)
def test_json_gives_the_same_fingerprint_back(
    prefix: str, protected: tuple[tuple[int, int], ...], policy: dict[str, Any]
) -> None:
    made = a_fingerprint(prefix_text=prefix, protected=protected, policy_parameters=policy)
    read = Fingerprint.from_json(made.to_json())
    assert read == made
    assert read.digest == made.digest


def test_json_with_missing_extra_or_bad_fields_is_refused() -> None:
    content = json.loads(a_fingerprint().to_json())
    bad = [
        {name: value for name, value in content.items() if name != "rope"},
        {**content, "ratio": 0.3},
        {**content, "protected": [[0]]},
        {**content, "protected": None},
        {**content, "policy_parameters": []},
        [content],
    ]
    for item in bad:
        with pytest.raises(ValueError, match="fingerprint"):
            Fingerprint.from_json(json.dumps(item))


def test_the_model_identity_holds_what_the_loaded_model_decides() -> None:
    made = a_fingerprint()
    assert made.model_identity == replace(made, prefix_text="other").model_identity
    for item in fields(ModelIdentity):
        changed = replace(made, **{item.name: OTHER.get(item.name, "other")})
        assert changed.model_identity != made.model_identity


def test_token_ids_are_told_apart() -> None:
    lists = [[], [0], [0, 0], [1], [256], [0, 1], [1, 0], [2**40]]
    assert len({digest_token_ids(ids) for ids in lists}) == len(lists)
    assert digest_token_ids([5, 6]) == digest_token_ids((5, 6))


@pytest.mark.parametrize("ids", [[-1], [2**64], [1.5]])
def test_token_ids_that_are_none_are_refused(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        digest_token_ids(ids)
