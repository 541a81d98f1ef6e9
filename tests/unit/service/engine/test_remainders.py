"""What stands for evicted rows reaches attention, in every way a question is read."""

from dataclasses import replace

import pytest
import torch

from kvkeep_kernels.compaction import select, shared_out
from kvkeep_kernels.layout import RaggedKV
from kvkeep_kernels.remainder import CLUSTERS, cluster_rows
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import ContextView, FullCache, ResidentContext
from kvkeep_service.engine.decode import Sequence, SequenceOptions, decode_step, prefill_question
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import prefill as read_document
from kvkeep_service.engine.remainders import SAMPLES_MAX, QuerySample
from kvkeep_service.engine.tail_batch import TailBatch
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts

from .gated import WORDS
from .models import drained, engine_model, random_document, run_build, stock_model
from .test_exactness import QUESTION, decode_logits

RATIOS = (0.1, 0.3, 1.0)
FORCED = [20, 21, 22, 23]
PROMPTS = RepeatPrompts(first=(1, 2, 3), later=(4, 5), turn_end=(6,))
LONG_QUESTION = [7 + i % 90 for i in range(300)]
"""More than one slice."""


def built(model: LanguageModel, scoring: str = "local", *, remainder: bool = True) -> BuiltCache:
    policy = KVzip(PROMPTS, scoring=scoring, chunk_tokens=100, remainder=remainder)
    return run_build(model, random_document(310, prefix=4, seed=2), policy, RATIOS)


def with_rows_inside(context: ResidentContext, ratio: float) -> ContextView:
    """The same context with each remainder at the end of its head's run, and no lead."""
    view = context.view(ratio)
    layers = []
    for rows, lead in zip(view.layers, view.lead, strict=True):
        ks, vs = [], []
        for head in range(rows.num_kv_heads):
            k, v = rows.head_rows(head)
            ks.append(torch.cat([k, lead.k[head]]))
            vs.append(torch.cat([v, lead.v[head]]))
        length = rows.length + view.num_lead
        start = torch.cumsum(length, dim=0, dtype=torch.int32) - length
        layers.append(RaggedKV(torch.cat(ks), torch.cat(vs), start, length))
    return ContextView(layers, context.num_tokens, ratio)


@pytest.mark.parametrize("scoring", ["local", "exact"])
@pytest.mark.parametrize("question", [QUESTION, LONG_QUESTION], ids=["short", "two slices"])
def test_a_question_reads_it_as_more_rows_of_each_head(scoring: str, question: list[int]) -> None:
    model = engine_model(stock_model("qwen2"))
    context = built(model, scoring).context
    for ratio in (0.1, 0.3):
        ours = decode_logits(model, context.view(ratio), question, FORCED)
        inside = decode_logits(model, with_rows_inside(context, ratio), question, FORCED)
        torch.testing.assert_close(ours, inside, rtol=1e-4, atol=1e-4)
        bare = replace(context.view(ratio), lead=())
        assert (decode_logits(model, bare, question, FORCED) - ours).abs().max() > 1e-3


def test_where_nothing_is_evicted_there_is_none() -> None:
    context = built(engine_model(stock_model("llama"))).context
    assert context.view(1.0).num_lead == 0
    assert [context.view(ratio).num_lead for ratio in (0.1, 0.3)] == [CLUSTERS, CLUSTERS]


def test_each_ratio_has_its_own() -> None:
    context = built(engine_model(stock_model("llama"))).context
    low, high = (context.view(ratio).lead for ratio in (0.1, 0.3))
    assert all(not torch.equal(a.k, b.k) for a, b in zip(low, high, strict=True))


@pytest.mark.parametrize("remainder", [False, True])
def test_what_is_kept_is_far_from_what_stands_for_it_and_of_every_head(
    remainder: bool,
) -> None:
    model = engine_model(stock_model("llama"))
    document, shape = random_document(310, prefix=4, seed=2), model.shape
    cache = FullCache(shape, document.num_tokens, dtype=model.dtype, device=model.device)
    drained(read_document(model, cache, document, None))
    policy = KVzip(PROMPTS, scoring="local", chunk_tokens=100, remainder=True)
    scores = torch.zeros(shape.num_layers, shape.num_kv_heads, document.num_tokens)
    scores[:, :, document.num_prefix :] = drained(policy.score(model, cache, document))
    assert policy.sample is not None
    for layer in range(shape.num_layers if remainder else 0):
        q, scale = policy.sample.of(layer)
        rows = cache.rows(layer, 0, document.num_tokens)
        scores[layer] *= cluster_rows(q, rows, scale=scale).loss
    protected = torch.arange(document.num_tokens) < document.num_prefix
    expected = select(shared_out(scores, protected) if remainder else scores, protected, RATIOS)
    found = built(model, remainder=remainder)
    assert torch.equal(found.selection.counts, expected.counts)
    for one, other in zip(found.selection.positions, expected.positions, strict=True):
        assert torch.equal(one, other)


def test_without_it_nothing_comes_first() -> None:
    plain = built(engine_model(stock_model("llama")), remainder=False).context
    assert plain.remainders is None
    assert plain.view(0.3).lead == ()


def sequence(model: LanguageModel, view: ContextView, question: list[int]) -> Sequence:
    return Sequence(
        model, view, question, SequenceOptions(8), tokenizer=WORDS, stop_ids=frozenset()
    )


def test_a_batch_on_several_ratios_answers_as_each_alone() -> None:
    model = engine_model(stock_model("qwen2"))
    context = built(model).context
    asked = [(0.1, QUESTION), (0.3, QUESTION[1:]), (1.0, QUESTION[2:]), (0.3, QUESTION)]

    def tokens(together: bool) -> list[list[int]]:
        batches = [asked] if together else [[one] for one in asked]
        found = []
        for batch in batches:
            running = [sequence(model, context.view(ratio), ids) for ratio, ids in batch]
            for one in running:
                prefill(model, one)
            kept = TailBatch(model.shape, dtype=model.dtype)
            for _ in range(6):
                decode_step(model, running, kept)
            found += [one.generated for one in running]
        return found

    assert tokens(together=True) == tokens(together=False)


def prefill(model: LanguageModel, one: Sequence) -> None:
    while prefill_question(model, one) is None:
        pass


def test_a_copied_tail_goes_on_with_the_same_first_rows() -> None:
    model = engine_model(stock_model("qwen2"))
    view = built(model).context.view(0.3)
    whole = sequence(model, view, LONG_QUESTION)
    prefill(model, whole)
    first = sequence(model, view, LONG_QUESTION[:200])
    prefill(model, first)
    for shared in (0, 1, 150):
        tail = first.tail.copied(shared)
        rest = Sequence(
            model,
            view,
            LONG_QUESTION,
            SequenceOptions(8),
            tokenizer=WORDS,
            stop_ids=frozenset(),
            tail=tail,
        )
        assert rest.num_reused == shared
        prefill(model, rest)
        assert rest.position == whole.position
        torch.testing.assert_close(rest.tail.rows(0), whole.tail.rows(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_chunks", [1, 4, 7, 63, 64, 65, 5000])
def test_however_long_a_document_is_the_sample_stays_small(num_chunks: int) -> None:
    sample = QuerySample(num_chunks, 1)
    taken = [sample.rows_of(number, 30, 574) for number in range(num_chunks)]
    assert 30 <= sum(map(len, taken)) <= SAMPLES_MAX
    for rows in taken:
        assert rows == sorted(set(rows))
        assert all(0 <= row < 574 for row in rows)


def test_all_of_the_prompt_is_sampled_and_some_of_the_text() -> None:
    rows = QuerySample(1, 1).rows_of(0, 30, 574)
    assert rows[:30] == list(range(30))
    assert rows[30:] == list(range(30, 574, 34))
