"""A wrong scorer is caught: each mutant fails the assertion that the scorer itself passes.

A mutant changes one function that scoring goes through, and the rest runs as it is. The prefill
is never touched by one: positions below N, and keys from the first on, are left alone.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvkeep_kernels import scoring as kernels
from kvkeep_kernels.layout import DenseKV
from kvkeep_service.engine import build as building
from kvkeep_service.engine.architecture import ModelShape
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts
from kvkeep_service.ports import Scoring

from ..engine.models import engine_model, random_document, run_build, stock_model
from ..engine.test_kvzip import CHUNK, PROMPTS, oracle_scores, our_scores

NUM_PREFIX = 4
DOCUMENT = random_document(2 * CHUNK + 1, prefix=NUM_PREFIX, seed=1)
RATIO = 0.3
SCORINGS: dict[str, Scoring] = {"exact": "exact", "local": "local"}
BOTH = pytest.mark.parametrize("scoring", SCORINGS)


@cache
def oracle(scoring: str) -> Tensor:
    return oracle_scores("llama", DOCUMENT, scoring)


@pytest.fixture
def model() -> LanguageModel:
    return engine_model(stock_model("llama"))


def assert_right_scores(model: LanguageModel, scoring: str) -> None:
    """What ``test_scores_equal_a_dense_stock_model`` asserts."""
    ours = our_scores(model, DOCUMENT, scoring)
    torch.testing.assert_close(ours, oracle(scoring), rtol=2e-3, atol=1e-6)


def assert_best_rows_kept(model: LanguageModel, scoring: str) -> None:
    """No row that was dropped scores above one that was kept, each head's best apart."""
    policy = KVzip(PROMPTS, scoring=SCORINGS[scoring], chunk_tokens=CHUNK)
    selection = run_build(model, DOCUMENT, policy, (RATIO,)).selection
    expected = oracle(scoring)
    kept, best = torch.zeros(2, *expected.shape, dtype=torch.bool)
    best.scatter_(2, expected.argmax(dim=2, keepdim=True), value=True)
    for layer, positions in enumerate(selection.positions):
        runs = positions.split(selection.counts[0, layer].tolist())
        for head, run in enumerate(runs):
            kept[layer, head, run[NUM_PREFIX:] - NUM_PREFIX] = True
    # The factor is for rows that rounding may tell apart.
    lowest = expected[kept & ~best].min() * 1.002
    assert expected[~kept & ~best].max() <= lowest, "a better row was dropped"


def another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    backwards = property(lambda shape: tuple(reversed(range(shape.num_layers))))
    monkeypatch.setattr(ModelShape, "evicting", backwards)


def chunk_of_tokens_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RepeatPrompts.repeat_input

    def wrong(self: RepeatPrompts, document: DocumentTokens, chunk: range) -> list[int]:
        return right(self, document, range(max(0, chunk.start - 1), chunk.stop - 1))

    monkeypatch.setattr(RepeatPrompts, "repeat_input", wrong)


def chunk_of_keys_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FullCache.rows

    def wrong(self: FullCache, layer: int, first: int, last: int) -> DenseKV:
        is_chunk = first >= NUM_PREFIX
        return right(self, layer, first - is_chunk, last - is_chunk)

    monkeypatch.setattr(FullCache, "rows", wrong)


def mean_for_max(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.column_reduce

    def wrong(q: Tensor, *arguments: Any, **named: Any) -> Tensor:
        *others, op = arguments
        assert op == "max"
        total = right(q, *others, "logsum", **named)
        return total - torch.tensor(float(q.shape[1])).log()

    monkeypatch.setattr(kernels, "column_reduce", wrong)


def prefix_left_out_of_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FullCache.rows

    def wrong(self: FullCache, layer: int, first: int, last: int) -> DenseKV:
        return right(self, layer, first, 0 if (first, last) == (0, NUM_PREFIX) else last)

    monkeypatch.setattr(FullCache, "rows", wrong)


def positions_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LlamaRotaryEmbedding.forward

    def wrong(self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        after = position_ids >= DOCUMENT.num_tokens
        return right(self, x, position_ids - after * DOCUMENT.num_tokens)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", wrong)


def keep_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    right = building.select
    monkeypatch.setattr(building, "select", lambda scores, *rest: right(-scores, *rest))


Assertion = Callable[[LanguageModel, str], None]
Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[tuple[Mutant, Assertion]] = [
    (another_layer, assert_right_scores),
    (chunk_of_tokens_off_by_one, assert_right_scores),
    (chunk_of_keys_off_by_one, assert_right_scores),
    (mean_for_max, assert_right_scores),
    (prefix_left_out_of_the_softmax, assert_right_scores),
    (positions_restarted, assert_right_scores),
    (keep_the_lowest, assert_best_rows_kept),
]


@BOTH
@pytest.mark.parametrize("assertion", [assert_right_scores, assert_best_rows_kept])
def test_the_scorer_passes(model: LanguageModel, scoring: str, assertion: Assertion) -> None:
    assertion(model, scoring)


@BOTH
@pytest.mark.parametrize(("mutant", "assertion"), MUTANTS)
def test_a_mutant_of_the_scorer_is_caught(
    model: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    scoring: str,
    mutant: Mutant,
    assertion: Assertion,
) -> None:
    oracle(scoring)
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=r"not close|a better row was dropped"):
        assertion(model, scoring)
