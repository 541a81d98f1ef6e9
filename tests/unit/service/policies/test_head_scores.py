"""Head scores are read back as written, refused when they are another model's, and obeyed."""

import json
from hashlib import sha256
from typing import Any

import pytest

from kvkeep_service.policies.head_scores import (
    HeadScores,
    HeadScoresInvalid,
    encode_head_scores,
)
from kvkeep_service.policies.kvzip_head import KVzipHead

from ..engine.models import engine_model, random_document, run_build, stock_model
from .scored import HEADS

WRITTEN = encode_head_scores(HEADS, weights_digest="sha256:mine", tokens=900)


def parse(content: bytes) -> HeadScores:
    return HeadScores.parse(content, weights_digest="sha256:mine", num_layers=3, num_heads=2)


def test_what_was_written_is_read_back() -> None:
    assert parse(WRITTEN) == HeadScores(HEADS, sha256(WRITTEN).hexdigest())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weights_digest": "sha256:other"}, "sha256:other"),
        ({"scores": [[0.5, 0.25]]}, "3 layers of 2 heads"),
        ({"scores": [[0.5], [0.5], [0.5]]}, "3 layers of 2 heads"),
        ({"scores": [[0.5, -0.1], [0, 0], [0, 0]]}, "scores.0.1"),
        ({"scores": [[0.5, float("nan")], [0, 0], [0, 0]]}, "scores.0.1"),
        ({"scores": [["0.5", 0], [0, 0], [0, 0]]}, "scores.0.0"),
        ({"schema_version": 2}, "schema_version"),
        ({"kind": "something else"}, "kind"),
        ({"tokens": 0}, "tokens"),
        ({"more": 1}, "more"),
    ],
)
def test_other_scores_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    content = json.dumps(json.loads(WRITTEN) | changes).encode()
    with pytest.raises(HeadScoresInvalid, match=told):
        parse(content)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", WRITTEN[:-2]])
def test_what_is_no_file_of_scores_is_refused(content: bytes) -> None:
    with pytest.raises(HeadScoresInvalid):
        parse(content)


def test_heads_keep_the_document_or_one_row_of_it() -> None:
    """Best to worst: (1, 1), (2, 0), (0, 0), (2, 1), (0, 1), (1, 0)."""
    policy, document = KVzipHead(parse(WRITTEN)), random_document(300)
    built = run_build(engine_model(stock_model("llama")), document, policy, (0.5, 0.6))
    kept = built.selection.counts.cumsum(dim=0) - document.num_prefix
    # Half is three heads, but for the one row each that the other three keep.
    assert kept[0].tolist() == [[297, 1], [1, 300], [300, 1]]
    # The head at the margin keeps its first rows.
    assert kept[1].tolist() == [[300, 1], [1, 300], [300, 178]]
    margin = built.selection.positions[2][305:].tolist()
    assert margin == list(range(5 + 178))
