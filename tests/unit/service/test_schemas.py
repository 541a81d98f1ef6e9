import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kvkeep_service.api.compression_schemas import Compression
from kvkeep_service.api.query_schemas import Query
from kvkeep_service.api.schemas import ContextCreate, ContextPatch
from kvkeep_service.api.strict import check_values
from kvkeep_service.budget import check_ratio
from kvkeep_service.errors import EmptyDocument, InvalidEncoding, InvalidRequest
from kvkeep_service.ports import CompressionSpec, Span


def refused(model: type[BaseModel], body: dict[str, Any]) -> dict[str, str]:
    """Map each refused field to the reason."""
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    return {".".join(map(str, item["loc"])): item["msg"] for item in error.value.errors()}


def create(**fields: Any) -> ContextCreate:
    return ContextCreate.model_validate({"document": "some text", **fields})


def test_a_policy_of_the_contract_that_this_version_lacks_is_refused_with_those_it_has() -> None:
    for policy in ("kvpop", "kvzap"):
        reasons = refused(ContextCreate, {"document": "x", "compression": {"policy": policy}})
        assert reasons.keys() == {"compression.policy"}
        assert "kvpop" not in reasons["compression.policy"]
        assert "'kvzip', 'kvzip_head', 'snapkv'" in reasons["compression.policy"]


def test_a_conversation_as_document_is_refused_by_name() -> None:
    reasons = refused(ContextCreate, {"messages": [{"role": "user", "content": "hello"}]})
    assert "not supported by this version" in reasons["messages"]


def test_every_field_of_the_contract_is_taken_at_its_default() -> None:
    ContextCreate.model_validate(
        {
            "document": "x",
            "documents": None,
            "messages": None,
            "name": None,
            "metadata": {},
            "system": None,
            "instructions": None,
            "protect": [],
            "model": None,
            "compression": {
                "policy": "kvzip",
                "ratio": 0.3,
                "allow_lossy": False,
                "tokens": None,
                "neighbours": 0,
                "max_loss": None,
                "scoring": "auto",
                "normalization": "none",
                "remainder": True,
                "quantization": "none",
            },
            "expires_after": None,
        }
    )
    Query.model_validate(
        {
            "question": "x",
            "messages": None,
            "questions": None,
            "system": None,
            "ratio": None,
            "min_ratio": None,
            "max_tokens": 256,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "seed": None,
            "stop": [],
            "logprobs": False,
            "top_logprobs": 0,
            "return_token_ids": False,
            "chat_template_kwargs": {},
            "stream": False,
            "session": None,
            "fork": False,
        }
    )


@pytest.mark.parametrize("model", [ContextCreate, ContextPatch, Query])
def test_an_unknown_field_is_refused(model: type[BaseModel]) -> None:
    assert refused(model, {"colour": "red"})["colour"] == "there is no such field"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("ratio", 0.3), ("scoring", "exact"), ("policy", "kvzip"), ("allow_lossy", True)),
        *(("tokens", 9), ("quantization", "int8"), ("neighbours", 1), ("max_loss", 0.1)),
    ],
)
def test_how_to_compress_is_shown_its_place(field: str, value: object) -> None:
    reasons = refused(ContextCreate, {"document": "x", field: value, "name": 7})
    assert reasons[field] == "there is no such field: it belongs under compression"
    assert "name" in reasons


@pytest.mark.parametrize(
    ("model", "body", "field", "told"),
    [
        (ContextCreate, {"document": 5}, "document", "must be a string"),
        (ContextCreate, {"documents": []}, "documents", "must have at least 1 item, not 0"),
        (ContextCreate, {"name": "x" * 257}, "name", "must have at most 256 characters"),
        (ContextCreate, {"expires_after": {"seconds": 1}}, "expires_after.anchor", "is missing"),
        (Query, {"temperature": "hot"}, "temperature", "must be a number"),
        (Query, {"top_k": 1.5}, "top_k", "must be a valid integer"),
        (Query, {"logprobs": 1}, "logprobs", "must be true or false"),
        (
            Query,
            {"messages": [{"role": "human", "content": "hello"}]},
            "messages.0.role",
            "must be 'system', 'user' or 'assistant'",
        ),
    ],
)
def test_a_refusal_goes_on_from_the_name_of_its_field(
    model: type[BaseModel], body: dict[str, Any], field: str, told: str
) -> None:
    assert refused(model, body)[field] == told


def test_a_field_refused_inside_is_no_field_of_the_top() -> None:
    body = {"document": "x", "documents": [{"name": "n", "text": "t", "ratio": 0.3}]}
    assert refused(ContextCreate, body) == {"documents.0.ratio": "there is no such field"}


def test_a_refusal_says_in_json_what_to_send() -> None:
    told = refused(ContextCreate, {"messages": []})["messages"]
    assert told.endswith("leave it out or send null")


@pytest.mark.parametrize(
    ("model", "body", "field", "told"),
    [
        (Query, {"max_tokens": 0}, "max_tokens", "must be from 1 to 1000000"),
        (Query, {"max_tokens": 2_000_000}, "max_tokens", "must be from 1 to 1000000"),
        (Query, {"temperature": 3}, "temperature", "must be from 0 to 2"),
        (Query, {"top_p": 0}, "top_p", "must be above 0 and at most 1"),
        (Query, {"top_p": 2}, "top_p", "must be above 0 and at most 1"),
        (Query, {"wait": 301}, "wait", "must be from 0 to 300"),
        (
            ContextCreate,
            {"compression": {"neighbours": 5}},
            "compression.neighbours",
            "from 0 to 4",
        ),
        (ContextCreate, {"compression": {"max_loss": -1}}, "compression.max_loss", "at least 0"),
        (ContextCreate, {"protect": [{"start": -1, "end": 2}]}, "protect.0.start", "at least 0"),
    ],
)
def test_a_number_out_of_bounds_is_told_both_of_them(
    model: type[BaseModel], body: dict[str, Any], field: str, told: str
) -> None:
    assert refused(model, body)[field].endswith(told)


@pytest.mark.parametrize(
    ("body", "field", "kind"),
    [
        ({"metadata": 7}, "metadata", "object"),
        ({"compression": 7}, "compression", "object"),
        ({"protect": {}}, "protect", "array"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_words_of_json(
    body: dict[str, Any], field: str, kind: str
) -> None:
    assert refused(ContextCreate, body)[field] == f"must be a JSON {kind}"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "n" * 257}, "name"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {"": "v"}}, "metadata..[key]"),
        ({"protect": [{"start": -1, "end": 4}]}, "protect.0.start"),
        ({"protect": [{"start": 1}]}, "protect.0.end"),
        ({"expires_after": {"anchor": "created_at", "seconds": 0}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "tomorrow", "seconds": 1}}, "expires_after.anchor"),
        ({"compression": {"ratio": "0.3"}}, "compression.ratio"),
        ({"compression": {"ratio": "auto", "max_loss": -0.1}}, "compression.max_loss"),
        ({"compression": {"ratio": "auto", "max_loss": float("nan")}}, "compression.max_loss"),
        ({"compression": {"ratio": "auto", "max_loss": float("inf")}}, "compression.max_loss"),
        ({"compression": {"ratio": "all"}}, "compression.ratio"),
        ({"compression": {"ratio": True}}, "compression.ratio"),
        ({"compression": {"ratio": float("nan")}}, "compression.ratio"),
        ({"compression": None}, "compression"),
        ({"compression": {"tokens": 0}}, "compression.tokens"),
        ({"compression": {"tokens": 1.5}}, "compression.tokens"),
        ({"compression": {"tokens": 2**31}}, "compression.tokens"),
        ({"compression": {"neighbours": 5}}, "compression.neighbours"),
        ({"compression": {"neighbours": -1}}, "compression.neighbours"),
        ({"wait": 301}, "wait"),
        ({"documents": []}, "documents"),
        ({"document": 7}, "document"),
    ],
)
def test_a_value_outside_its_limit_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    assert field in refused(ContextCreate, body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ["s"] * 9),
        ("stream", "yes"),
        ("wait", 300.5),
    ],
)
def test_a_query_option_outside_its_limit_is_refused_by_name(field: str, value: object) -> None:
    assert refused(Query, {"question": "x", field: value}).keys() == {field}


def test_an_empty_stop_string_is_refused() -> None:
    assert "stop.0" in refused(Query, {"question": "x", "stop": [""]})


def test_documents_are_joined_to_one_text_with_their_names() -> None:
    body = ContextCreate.model_validate(
        {"documents": [{"name": "a.md", "text": "one\n"}, {"name": "b.md", "text": "two"}]}
    )
    assert body.document_spec().text == "a.md\n\none\n\n\nb.md\n\ntwo"


@pytest.mark.parametrize(
    "body", [{}, {"document": "x", "documents": [{"name": "a", "text": "x"}]}, {"document": None}]
)
def test_a_document_comes_in_one_form(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="document"):
        ContextCreate.model_validate(body).document_spec()


@pytest.mark.parametrize("text", ["", " ", "\n\t\r\n", "\u2003\u00a0"])
def test_white_space_is_no_document(text: str) -> None:
    with pytest.raises(EmptyDocument) as alone:
        ContextCreate.model_validate({"document": text}).document_spec()
    assert alone.value.facts == {"field": "document"}
    with pytest.raises(EmptyDocument) as several:
        ContextCreate.model_validate(
            {"documents": [{"name": "named", "text": text}]}
        ).document_spec()
    assert several.value.facts == {"field": "documents"}


def test_nul_is_text() -> None:
    assert create(document="\0").document_spec().text == "\0"


def test_a_span_reaches_to_the_end_and_no_further() -> None:
    assert create(protect=[{"start": 5, "end": 9}]).document_spec().protect == (Span(5, 9),)
    for span in ({"start": 5, "end": 10}, {"start": 5, "end": 5}, {"start": 6, "end": 2}):
        with pytest.raises(InvalidRequest, match=r"protect\.1\.end"):
            create(protect=[{"start": 0, "end": 1}, span]).document_spec()


def test_spans_count_characters_not_bytes() -> None:
    body = create(document="🙂é", protect=[{"start": 0, "end": 2}])
    assert body.document_spec().protect == (Span(0, 2),)


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({}, CompressionSpec("kvzip", 0.3, "local")),
        ({"ratio": 1}, CompressionSpec("kvzip", 1.0, "local")),
        ({"ratio": 0.15, "scoring": "exact"}, CompressionSpec("kvzip", 0.15, "exact")),
        (
            {"ratio": 0.05, "allow_lossy": True},
            CompressionSpec("kvzip", 0.05, "local", allow_lossy=True),
        ),
        *(
            ({"policy": name}, CompressionSpec(name, 0.3))
            for name in ("snapkv", "expected_attention", "streaming", "random")
        ),
        ({"policy": "kvzip_head"}, CompressionSpec("kvzip_head", 0.6)),
        ({"tokens": 1}, CompressionSpec(tokens=1)),
        (
            {"policy": "snapkv", "tokens": 900, "allow_lossy": True},
            CompressionSpec("snapkv", tokens=900, allow_lossy=True),
        ),
        ({"policy": "none"}, CompressionSpec("none", 1.0, "local")),
        ({"policy": "none", "ratio": 1.0}, CompressionSpec("none", 1.0, "local")),
        (
            {"normalization": "kvzip_plus"},
            CompressionSpec("kvzip", 0.3, "local", normalization="kvzip_plus"),
        ),
        ({"neighbours": 4}, CompressionSpec("kvzip", 0.3, "local", neighbours=4)),
        ({"remainder": False}, CompressionSpec("kvzip", 0.3, "local", remainder=False)),
        ({"policy": "snapkv", "remainder": True}, CompressionSpec("snapkv", 0.3)),
        ({"scoring": "local", "neighbours": 1}, CompressionSpec("kvzip", 0.3, neighbours=1)),
        ({"scoring": "exact", "neighbours": 0}, CompressionSpec("kvzip", 0.3, "exact")),
        ({"quantization": "int4"}, CompressionSpec("kvzip", 0.3, "local", "int4")),
        ({"quantization": "fp8"}, CompressionSpec("kvzip", 0.3, "local", "fp8")),
        ({"policy": "none", "quantization": "int8"}, CompressionSpec("none", 1, "local", "int8")),
    ],
)
def test_compression_is_resolved(body: dict[str, Any], spec: CompressionSpec) -> None:
    assert Compression.model_validate(body).spec() == spec


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"ratio": 0.149}, "compression.ratio"),
        ({"ratio": 0.049, "allow_lossy": True}, "compression.ratio"),
        ({"ratio": 1.001}, "compression.ratio"),
        ({"ratio": 0}, "compression.ratio"),
        ({"policy": "none", "ratio": 0.3}, "compression.ratio"),
        ({"policy": "none", "ratio": "auto"}, "compression.ratio"),
        ({"ratio": "auto", "tokens": 100}, "compression.tokens"),
        ({"ratio": 0.3, "max_loss": 0.1}, "compression.max_loss"),
        ({"max_loss": 0.1}, "compression.max_loss"),
        ({"policy": "none", "scoring": "exact"}, "compression.scoring"),
        ({"policy": "none", "normalization": "kvzip_plus"}, "compression.normalization"),
        ({"policy": "none", "neighbours": 1}, "compression.neighbours"),
        ({"policy": "none", "remainder": False}, "compression.remainder"),
        ({"scoring": "exact", "neighbours": 1}, "compression.neighbours"),
        *(
            ({"policy": name, **asked}, f"compression.{field}")
            for name in ("kvzip_head", "snapkv", "expected_attention", "streaming", "random")
            for field, asked in (
                ("scoring", {"scoring": "local"}),
                ("normalization", {"normalization": "kvzip_plus"}),
                ("neighbours", {"neighbours": 1}),
                ("remainder", {"remainder": False}),
            )
        ),
        ({"policy": "none", "tokens": 100}, "compression.tokens"),
        ({"ratio": 0.3, "tokens": 100}, "compression.tokens"),
    ],
)
def test_compression_that_cannot_be_is_refused(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Compression.model_validate(body).spec()
    assert refusal.value.field == field


def test_a_lossy_ratio_must_be_asked_for_twice() -> None:
    with pytest.raises(InvalidRequest, match="allow_lossy"):
        check_ratio("ratio", 0.1, allow_lossy=False)
    check_ratio("ratio", 0.1, allow_lossy=True)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"document": "a\\ud800"}', "document"),
        ('{"system": "\\udfff"}', "system"),
        ('{"documents": [{"name": "n", "text": "\\ud83d"}]}', "documents.0.text"),
        ('{"metadata": {"a": "\\ud83d!"}}', "metadata.a"),
        ('{"metadata": {"\\ud83d": "a"}}', "metadata"),
        ('{"\\ud83d": 1}', "body"),
    ],
)
def test_a_lone_surrogate_is_refused_in_any_field(body: str, field: str) -> None:
    with pytest.raises(InvalidEncoding) as refusal:
        ContextCreate.model_validate(json.loads(body))
    assert refusal.value.field == field


def test_a_surrogate_pair_is_a_character() -> None:
    assert create(**json.loads('{"document": "\\ud83d\\ude42"}')).document == "🙂"


def nested(value: object, depth: int) -> dict[str, object]:
    """The value in as many arrays and objects as ``depth`` says, those of the field."""
    for _ in range(depth - 1):
        value = [value]
    return {"chat_template_kwargs": {"a": value}}


def test_free_json_is_looked_through_as_deep_as_it_may_be() -> None:
    check_values(nested("text", 100))
    with pytest.raises(InvalidEncoding):
        check_values(nested("\ud800", 100))


@pytest.mark.parametrize("depth", [101, 5000])
def test_what_is_nested_too_deeply_is_refused_by_field_and_limit(depth: int) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Query.model_validate({"question": "x", **nested("text", depth)})
    assert refusal.value.detail == "chat_template_kwargs: is nested more than 100 deep"


@pytest.mark.parametrize(
    "body",
    [
        {f"field{index}": 0 for index in range(60_000)},
        {"document": "a", "protect": [{"start": 0, "end": 1}] * 20_000},
        {"document": "a", "metadata": {"a": [[0] * 200] * 300}},
    ],
)
def test_more_values_than_a_request_can_need_are_refused_unread(body: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="more than 50000 values"):
        ContextCreate.model_validate(body)


def test_of_many_wrong_fields_the_first_are_named() -> None:
    body = {"document": "a", **{f"field{index}": 0 for index in range(40_000)}}
    with pytest.raises(ValidationError) as refusal:
        ContextCreate.model_validate(body)
    assert refusal.value.error_count() == 20


@pytest.mark.parametrize("question", [None, "", " \n"])
def test_an_empty_question_is_refused(question: str | None) -> None:
    with pytest.raises(InvalidRequest, match="question"):
        Query.model_validate({"question": question}).asked()
