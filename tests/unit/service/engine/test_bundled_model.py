"""The promises on the real bundled model: exact at ratio 1, useful when evicted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.decode import (
    Sequence,
    SequenceOptions,
    decode_step,
    prefill_question,
)
from kvkeep_service.engine.gguf import bundled_gguf, converted_directory
from kvkeep_service.engine.model import LoadedModel, load_model
from kvkeep_service.engine.passes import QuestionPass
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.model_reference import BUNDLED
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts
from kvkeep_service.ports import Turn
from kvkeep_service.start_errors import ModelUnavailable

from .models import run_build

ALICE = (Path(__file__).parents[3] / "data" / "alice.txt").read_text()


def document(bundled: LoadedModel, tokens: int) -> DocumentTokens:
    template = bundled.template
    ids = template.document_piece(ALICE[2000 : 2000 + 6 * tokens]).ids[:tokens]
    prefix = template.prefix_ids(template.frame().prefix)
    return DocumentTokens(prefix, ids, torch.zeros(len(ids), dtype=torch.bool))


def built_with(
    bundled: LoadedModel,
    tokens: DocumentTokens,
    scoring: str,
    chunk: int,
    *,
    remainder: bool = False,
) -> BuiltCache:
    prompts = RepeatPrompts.from_template(bundled.template)
    policy = KVzip(prompts, scoring=scoring, chunk_tokens=chunk, remainder=remainder)
    return run_build(bundled.language_model, tokens, policy, (0.1, 0.3, 1.0))


def kept_rows(built: BuiltCache, ratio: float) -> set[tuple[int, int, int]]:
    selection = built.selection
    total = selection.counts.sum(0)
    upto = selection.counts[: selection.ratios.index(ratio) + 1].sum(0)
    rows = set()
    for layer, positions in enumerate(selection.positions):
        for head, run in enumerate(torch.split(positions, total[layer].tolist())):
            rows |= {(layer, head, p) for p in run[: upto[layer, head]].tolist()}
    return rows


def test_greedy_tokens_at_ratio_1_equal_transformers_generate(bundled: LoadedModel) -> None:
    from transformers import AutoModelForCausalLM

    from kvkeep_service.config import Settings

    tokens = document(bundled, 500)
    built = built_with(bundled, tokens, "local", 512)
    question = bundled.template.asked_ids([Turn("user", "What did Alice see?")], {})
    sequence = Sequence(
        bundled.language_model,
        built.context.view(1.0),
        question,
        SequenceOptions(64),
        tokenizer=bundled.tokenizer,
        stop_ids=frozenset(),
    )
    prefill_question(bundled.language_model, sequence)
    while sequence.finish_reason is None:
        decode_step(bundled.language_model, [sequence])

    directory, _ = converted_directory(bundled_gguf(), Settings().model_cache)
    stock = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([[*tokens.prefix_ids, *tokens.ids, *question]])
    expected = stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=[],
    )
    assert sequence.generated == expected[0, ids.shape[1] :].tolist()


def test_local_and_exact_scoring_agree_on_real_text(bundled: LoadedModel) -> None:
    tokens = document(bundled, 2048)
    local, exact = (built_with(bundled, tokens, s, 512) for s in ("local", "exact"))
    ours, published = kept_rows(local, 0.3), kept_rows(exact, 0.3)
    assert len(ours) == len(published)
    assert len(ours & published) / len(ours) >= 0.85
    # Chance would be 0.3 apart from the prefix: the agreement is in the choice, not the count.
    assert kept_rows(local, 0.1) < ours


def test_the_cache_at_a_third_still_knows_the_document(bundled: LoadedModel) -> None:
    tokens = document(bundled, 600)
    built = built_with(bundled, tokens, "local", 512)
    full, kept = (repeat_loss(bundled, built.context.view(r), tokens) for r in (1.0, 0.3))
    nothing = repeat_loss(bundled, _without_document(built.context.view(1.0), tokens), tokens)
    assert full < 0.5 * nothing
    assert kept < full + 0.25 * (nothing - full)


def test_with_remainders_first_words_are_nearer_to_those_of_the_full_cache(
    bundled: LoadedModel,
) -> None:
    built = built_with(bundled, document(bundled, 600), "local", 512, remainder=True)
    full = first_words(bundled, built.context.view(1.0))
    for ratio in (0.1, 0.3):
        view = built.context.view(ratio)
        ours, bare = (first_words(bundled, one) for one in (view, replace(view, lead=())))
        assert surprise(full, ours) < 0.8 * surprise(full, bare)


def test_of_one_word_again_and_again_more_rows_are_no_worse(bundled: LoadedModel) -> None:
    # In the first layer all of its values are alike: what is lost is how much each is looked at.
    template = bundled.template
    ids = template.document_piece("lighthouse " * 500).ids
    prefix = template.prefix_ids(template.frame().prefix)
    repeated = DocumentTokens(prefix, ids, torch.zeros(len(ids), dtype=torch.bool))
    context = built_with(bundled, repeated, "local", 512, remainder=True).context
    full, low, high = (first_words(bundled, context.view(r)) for r in (1.0, 0.1, 0.3))
    assert surprise(full, high) < 0.008
    assert surprise(full, high) < surprise(full, low)


def first_words(bundled: LoadedModel, view: ContextView) -> torch.Tensor:
    """Log-probabilities of an answer's first token, [questions, vocabulary]."""
    model, found = bundled.language_model, []
    for text in ("Who is Alice?", "Begin with a dash. Where is she?", "Sum up the text.", "Hello!"):
        ids = bundled.template.asked_ids([Turn("user", text)], {})
        tail = Tail(model.shape, dtype=model.dtype, device=model.device, num_lead=view.num_lead)
        tail.reserve(len(ids))
        positions = torch.arange(view.num_tokens, view.num_tokens + len(ids))[None]
        hidden = model.hidden(torch.tensor([ids]), positions, QuestionPass(view, tail))
        found.append(model.logits(hidden[0, -1:])[0].log_softmax(dim=-1))
    return torch.stack(found)


def surprise(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Kullback-Leibler divergence, nats, the mean over questions."""
    return float((expected.exp() * (expected - found)).sum(dim=-1).mean())


def repeat_loss(bundled: LoadedModel, view: ContextView, tokens: DocumentTokens) -> float:
    """Mean loss, nats per token, of repeating a span of the document from a cache."""
    model = bundled.language_model
    prompts = RepeatPrompts.from_template(bundled.template)
    ids = prompts.repeat_input(tokens, range(200, 328))
    tail = Tail(model.shape, dtype=model.dtype, device=model.device)
    tail.reserve(len(ids))
    positions = torch.arange(view.num_tokens, view.num_tokens + len(ids))[None]
    hidden = model.hidden(torch.tensor([ids]), positions, QuestionPass(view, tail))
    logits = model.logits(hidden[0, -129:-1])
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-128:])))


def _without_document(view: ContextView, tokens: DocumentTokens) -> ContextView:
    layers = tuple(
        layer.truncated(torch.full_like(layer.length, tokens.num_prefix)) for layer in view.layers
    )
    return ContextView(layers, view.num_tokens, view.ratio)


@pytest.mark.parametrize("name", ["missing.gguf", "broken.gguf"])
def test_a_gguf_that_is_not_a_model_is_refused_and_leaves_nothing(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    cache = tmp_path / "cache"
    with pytest.raises(ModelUnavailable):
        load_model(
            str(tmp_path / name),
            device="cpu",
            dtype="auto",
            model_cache=cache,
            reserve_tokens=256,
        )
    assert not list(cache.glob("gguf-*/kvkeep-conversion.json"))


def test_the_bundled_model_is_identified_by_the_content_of_its_file(bundled: LoadedModel) -> None:
    assert bundled.info.name == BUNDLED
    assert bundled.info.weights_digest.startswith("gguf:")
    assert bundled.info.dtype == "float32"
    assert bundled.stop_ids == {2}
