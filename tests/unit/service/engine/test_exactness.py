"""The engine computes what the model computes: dense when nothing is evicted, masked when so."""

import pytest
import torch

from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.passes import DecodePass, QuestionPass
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts

from .masked_reference import MaskedReference
from .models import KINDS, engine_model, random_document, run_build, stock_model

QUESTION = [7, 8, 9, 10, 11]
PROMPTS = RepeatPrompts(first=(1, 2, 3), later=(4, 5), turn_end=(6,))


def kvzip(scoring: str = "exact") -> KVzip:
    return KVzip(PROMPTS, scoring=scoring, chunk_tokens=100)


def decode_logits(
    model: LanguageModel, view: ContextView, question: list[int], forced: list[int]
) -> torch.Tensor:
    """Logits after the question, and after each forced token. [1 + forced, vocabulary]."""
    tail = Tail(model.shape, dtype=model.dtype, device=model.device, num_lead=view.num_lead)
    tail.reserve(len(question) + len(forced))
    first = torch.arange(view.num_tokens, view.num_tokens + len(question))[None]
    hidden = model.hidden(torch.tensor([question]), first, QuestionPass(view, tail))
    tail.extend(len(question))
    rows = [model.logits(hidden[0, -1:])[0]]

    class One:
        context = view

    one = One()
    one.tail = tail
    for token in forced:
        position = torch.tensor([[view.num_tokens + tail.tokens]])
        hidden = model.hidden(torch.tensor([[token]]), position, DecodePass([one]))
        tail.extend(1)
        rows.append(model.logits(hidden[:, -1])[0])
    return torch.stack(rows)


def visible_positions(built: BuiltCache, ratio: float, tokens: int) -> list[torch.Tensor]:
    """Which positions each layer and head kept, from the selection itself."""
    selection = built.selection
    total = selection.counts.sum(0)
    upto = selection.counts[: selection.ratios.index(ratio) + 1].sum(0)
    masks = []
    for layer, positions in enumerate(selection.positions):
        mask = torch.zeros(total.shape[1], tokens, dtype=torch.bool)
        for head, run in enumerate(torch.split(positions, total[layer].tolist())):
            mask[head, run[: upto[layer, head]]] = True
        masks.append(mask)
    return masks


@pytest.mark.parametrize("kind", KINDS)
def test_at_ratio_1_greedy_tokens_equal_transformers_generate(kind: str) -> None:
    stock = stock_model(kind)
    document = random_document(300)
    built = run_build(engine_model(stock), document, kvzip(), (0.3, 1.0))
    ids = torch.tensor([[*document.prefix_ids, *document.ids, *QUESTION]])
    expected = stock.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
    )[0, ids.shape[1] :].tolist()
    logits = decode_logits(engine_model(stock), built.context.view(1.0), QUESTION, expected[:-1])
    assert logits.argmax(-1).tolist() == expected
    assert len(set(expected)) > 8, "a model that repeats itself proves little"


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_rows_are_as_if_masked_in_a_dense_model(kind: str) -> None:
    stock = stock_model(kind)
    model = engine_model(stock)
    document = random_document(310, prefix=4, seed=2)
    built = run_build(model, document, kvzip("local"), (0.1, 0.3, 0.5))
    forced = [20, 21, 22, 23]
    asked = [*QUESTION, *forced]
    reference = MaskedReference(stock)
    reference.forward([*document.prefix_ids, *document.ids], 0)
    answers = []
    for ratio in (0.1, 0.3, 0.5):
        ours = decode_logits(model, built.context.view(ratio), QUESTION, forced)
        reference.visible = visible_positions(built, ratio, document.num_tokens)
        dense = reference.forward(asked, document.num_tokens)[len(QUESTION) - 1 :]
        reference.forget(len(asked))
        torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-4)
        answers.append(ours)
    # The masks are not idle: another ratio gives other logits.
    assert (answers[0] - answers[2]).abs().max() > 1e-2
    assert (answers[1] - answers[2]).abs().max() > 1e-2


def test_field_40_positions_of_a_question_start_at_n_however_few_rows_are_kept() -> None:
    stock = stock_model("llama")
    document = random_document(300, seed=3)
    model = engine_model(stock)
    built = run_build(model, document, kvzip(), (0.1,))
    view = built.context.view(0.1)
    assert view.num_tokens == document.num_tokens
    right = decode_logits(model, view, QUESTION, [])
    restarted = ContextView(view.layers, int(view.layers[0].length[0]), view.ratio)
    assert (decode_logits(model, restarted, QUESTION, []) - right).abs().max() > 1e-3


def test_a_lower_band_equals_a_cache_built_at_that_ratio() -> None:
    model = engine_model(stock_model("qwen2"))
    document = random_document(280, seed=4)
    large = run_build(model, document, kvzip(), (0.1, 0.3, 0.7))
    small = run_build(model, document, kvzip(), (0.1,))
    for ours, alone in zip(large.context.view(0.1).layers, small.context.layers, strict=True):
        for head in range(ours.num_kv_heads):
            assert torch.equal(ours.head_rows(head)[0], alone.head_rows(head)[0])
            assert torch.equal(ours.head_rows(head)[1], alone.head_rows(head)[1])


def test_the_same_document_gives_the_same_cache_bit_for_bit() -> None:
    model = engine_model(stock_model("llama"))
    document = random_document(520, seed=5)
    first, second = (run_build(model, document, kvzip("local"), (0.1, 0.3)) for _ in range(2))
    for one, other in zip(first.context.layers, second.context.layers, strict=True):
        assert torch.equal(one.k, other.k)
        assert torch.equal(one.v, other.v)
    assert torch.equal(first.selection.counts, second.selection.counts)


def test_resident_rows_are_exactly_the_selected_ones() -> None:
    model = engine_model(stock_model("llama"))
    document = random_document(400, prefix=6, seed=6)
    protected = document.protected.clone()
    protected[10:20] = True
    document = DocumentTokens(document.prefix_ids, document.ids, protected)
    built = run_build(model, document, kvzip(), (0.1, 0.3))
    heads = model.shape.num_layers * model.shape.num_kv_heads
    rows = sum(len(layer.k) for layer in built.context.layers)
    assert built.selection.num_selected == round(0.3 * heads * 390)
    assert rows == built.selection.num_selected + heads * 16
    kept = visible_positions(built, 0.1, document.num_tokens)
    for mask in kept:
        assert mask[:, :6].all()
        assert mask[:, 16:26].all()
