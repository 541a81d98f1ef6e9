"""Streaming keeps the first tokens of all, and then the newest, the same in every head."""

import pytest

from kvkeep_service.policies.streaming import NUM_SINKS, Streaming

from ..engine.models import engine_model, random_document, run_build, stock_model


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_the_first_four_tokens_and_the_most_recent_are_kept(num_prefix: int) -> None:
    document = random_document(300, prefix=num_prefix)
    model = engine_model(stock_model("llama"))
    built = run_build(model, document, Streaming(), (0.1,))
    sinks = range(num_prefix, NUM_SINKS)
    newest = range(document.num_tokens - (30 - len(sinks)), document.num_tokens)
    expected = {*range(num_prefix), *sinks, *newest}
    for positions, counts in zip(built.selection.positions, built.selection.counts[0], strict=True):
        for head in positions.split(counts.tolist()):
            assert set(head.tolist()) == expected
