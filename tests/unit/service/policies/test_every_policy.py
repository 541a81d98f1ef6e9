"""What holds whichever policy decides: exact counts, one order, protected rows, repeatability."""

from dataclasses import replace

import pytest
import torch

from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.policies.random import Random

from ..engine.models import engine_model, random_document, run_build, stock_model
from .scored import POLICIES, scored

RATIOS = (0.1, 0.3, 0.6)
EVERY = pytest.mark.parametrize("name", POLICIES)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return engine_model(stock_model("llama"))


def built(
    model: LanguageModel,
    name: str,
    document: DocumentTokens,
    ratios: tuple[float, ...] = RATIOS,
) -> BuiltCache:
    return run_build(model, document, POLICIES[name](model), ratios)


def rows_of(cache: BuiltCache, band: int) -> list[list[list[int]]]:
    """Kept positions per layer and head, in their order, at one of the cache's ratios."""
    every = cache.selection.counts.sum(dim=0)
    kept = cache.selection.counts[: band + 1].sum(dim=0)
    return [
        [run[:n].tolist() for run, n in zip(positions.split(all_.tolist()), few, strict=True)]
        for positions, all_, few in zip(cache.selection.positions, every, kept, strict=True)
    ]


@EVERY
def test_scores_are_one_finite_number_per_row_of_the_document(
    model: LanguageModel, name: str
) -> None:
    document = random_document(260)
    scores = scored(model, document, POLICIES[name](model))
    assert scores.shape == (3, 2, 260)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()


@EVERY
def test_layers_with_a_window_are_not_scored(name: str) -> None:
    sliding = engine_model(stock_model("ministral"))
    cache = built(sliding, name, random_document(260))
    assert sliding.shape.evicting == (1,)
    assert cache.selection.num_selected == int(0.6 * 2 * 260 + 0.5)


@EVERY
def test_exactly_the_asked_share_is_kept(model: LanguageModel, name: str) -> None:
    cache = built(model, name, random_document(260))
    assert cache.policy_applied == name
    assert cache.selection.num_selected == int(0.6 * 3 * 2 * 260 + 0.5)


@EVERY
def test_every_lower_ratio_is_a_prefix_of_every_higher_one(model: LanguageModel, name: str) -> None:
    document = random_document(260)
    highest = built(model, name, document)
    for band, ratio in enumerate(RATIOS):
        alone = built(model, name, document, (ratio,))
        assert rows_of(alone, 0) == rows_of(highest, band)


@EVERY
def test_protected_rows_stay_in_every_head_outside_the_ratio(
    model: LanguageModel, name: str
) -> None:
    document = random_document(260)
    protected = torch.zeros(260, dtype=torch.bool)
    protected[[0, 1, 100, 101, 102, 259]] = True
    cache = built(model, name, replace(document, protected=protected))
    fixed = [*range(5), *(5 + at for at in (0, 1, 100, 101, 102, 259))]
    for band in range(len(RATIOS)):
        for layer in rows_of(cache, band):
            for head in layer:
                assert head[: len(fixed)] == fixed
                assert len(set(head)) == len(head) > len(fixed)
    assert cache.selection.num_selected == int(0.6 * 3 * 2 * 254 + 0.5)


@EVERY
def test_a_rebuild_keeps_the_same_rows(model: LanguageModel, name: str) -> None:
    document = random_document(260)
    assert rows_of(built(model, name, document), 2) == rows_of(built(model, name, document), 2)


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33])
@EVERY
def test_the_shortest_documents_have_scores(model: LanguageModel, name: str, tokens: int) -> None:
    """None of these is evicted from by a server; a policy does not rely on that."""
    document = random_document(tokens)
    assert torch.isfinite(scored(model, document, POLICIES[name](model))).all()


def test_another_document_has_other_random_rows(model: LanguageModel) -> None:
    first, again, other = (scored(model, random_document(260, seed=n), Random()) for n in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    prefixed = scored(model, replace(random_document(260, seed=1), prefix_ids=[9] * 5), Random())
    assert not torch.equal(first, prefixed)


def test_random_scores_are_those_of_every_version() -> None:
    """Rows of a stored cache come back after an upgrade: these numbers never change."""
    document = DocumentTokens([1, 2], [3, 4, 5], torch.zeros(3, dtype=torch.bool))
    scores = scored(engine_model(stock_model("llama")), document, Random())
    assert (scores[0] * 2**24).tolist() == [
        [16743422, 9057917, 1469073],
        [13585248, 5530546, 10481239],
    ]
