"""Layers that see a window only: kept whole by every policy, answered alike in any company."""

import pytest
import torch

from kvkeep_service.engine.build import ScoringPolicy
from kvkeep_service.engine.decode import SequenceOptions, decode_step, prefill_question
from kvkeep_service.policies.random import Random
from kvkeep_service.policies.snapkv import SnapKV
from kvkeep_service.policies.streaming import Streaming

from .gated import RATIOS, answer_alone, policy, sequence
from .models import WINDOW, engine_model, random_document, run_build, stock_model


@pytest.mark.parametrize("kind", ["gemma3", "ministral"])
def test_sequences_decoded_together_get_what_each_gets_alone(kind: str) -> None:
    model = engine_model(stock_model(kind))
    contexts = [
        run_build(model, random_document(tokens, seed=tokens), policy(), RATIOS).context
        for tokens in (260, 300)
    ]
    # Questions of several lengths, so that tails slide out of their windows at different steps.
    asked = [(context, [7] * length) for context in contexts for length in (3, WINDOW - 5)]
    options = SequenceOptions(20)
    alone = [
        answer_alone(model, sequence(model, context.view(0.3), ids, options))
        for context, ids in asked
    ]
    together = [sequence(model, context.view(0.3), ids, options) for context, ids in asked]
    for one in together:
        prefill_question(model, one)
    while any(one.finish_reason is None for one in together):
        decode_step(model, [one for one in together if one.finish_reason is None])
    assert [one.generated for one in together] == alone


def _name(rule: ScoringPolicy | None) -> str:
    return rule.name if rule else "the model's own"


@pytest.mark.parametrize("rule", [None, Random(), SnapKV(), Streaming()], ids=_name)
def test_no_policy_touches_a_window(rule: ScoringPolicy | None) -> None:
    model = engine_model(stock_model("ministral"))
    built = run_build(model, random_document(300), rule, (0.3,) if rule else (1.0,))
    for layer, window in enumerate(model.shape.windows):
        if window is not None:
            placement = built.context.layers[layer].placement
            ends = torch.arange(305 - (WINDOW - 1), 305, dtype=torch.int32)
            assert torch.equal(placement.positions, ends.repeat(2))
    heads = built.selection.counts.sum(0)[1]
    assert int(heads.sum()) == (2 * (5 + 90) if rule else 2 * 305)


def test_a_document_shorter_than_the_window_is_kept_whole_there() -> None:
    model = engine_model(stock_model("gemma3"))
    built = run_build(model, random_document(20), None, (1.0,))
    assert built.selection.counts.sum(0).tolist() == [[25, 25]] * 3
