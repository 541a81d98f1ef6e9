"""KVzip's scores equal a dense computation with a stock model, chunk by chunk."""

from collections.abc import Callable

import pytest
import torch

from kvkeep_kernels.reference import chunk_max_attention
from kvkeep_service.engine.architecture import check_supported
from kvkeep_service.engine.attention import AttentionPass
from kvkeep_service.engine.build import RatioMissed, _check_achieved, build
from kvkeep_service.engine.build_memory import build_bytes
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.forward import LayeredForward
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import SLICE_TOKENS, DocumentTokens, prefill, slices
from kvkeep_service.policies.kvzip import (
    CHUNK_TOKENS,
    KVzip,
    RepeatPrompts,
    _RepeatPass,
    chunk_tokens,
)

from .masked_reference import MaskedReference
from .models import KINDS, drained, engine_model, random_document, run_build, stock_model

PROMPTS = RepeatPrompts(first=(1, 2, 3), later=(4, 5), turn_end=(6, 7))
CHUNK = 60


def our_scores(
    model: LanguageModel,
    document: DocumentTokens,
    scoring: str,
    normalization: str = "none",
    neighbours: int = 0,
) -> torch.Tensor:
    cache = FullCache(model.shape, document.num_tokens, dtype=model.dtype, device=model.device)
    for _ in prefill(model, cache, document, None):
        pass
    policy = KVzip(
        PROMPTS,
        scoring=scoring,
        normalization=normalization,
        neighbours=neighbours,
        chunk_tokens=CHUNK,
    )
    return drained(policy.score(model, cache, document))


def plus_score(reference: MaskedReference, layer: int, begin: int, end: int, num_prefix: int):
    """KVzip+ of one chunk from what a stock model computed, the whole matrix in fp64."""
    q, k = reference.seen[layer]
    rows, group_size = q.shape[1], q.shape[0] // k.shape[0]
    own = k.shape[1] - rows
    where = [*range(num_prefix), *range(begin, end), *range(own, k.shape[1])]
    keys = k[:, where].double().repeat_interleave(group_size, 0)
    logits = q.double() @ keys.transpose(1, 2) * reference.scales[layer]
    future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    logits[..., -rows:].masked_fill_(future, -torch.inf)
    weights = torch.softmax(logits, -1)[..., num_prefix : num_prefix + end - begin]
    weight = reference.projection(layer).double().unflatten(1, (q.shape[0], -1))
    values = reference.values[layer][:, begin:end].double().repeat_interleave(group_size, 0)
    added = torch.einsum("ehd,hcd->hce", weight, values).norm(dim=-1)
    read = reference.read[layer].double().norm(dim=-1)
    weighed = weights * added[:, None] / read[None, :, None]
    return weighed.amax(1).unflatten(0, (-1, group_size)).amax(1).float()


def oracle_scores(
    kind: str,
    document: DocumentTokens,
    scoring: str,
    normalization: str = "none",
    neighbours: int = 0,
) -> torch.Tensor:
    """Repeat each chunk with a stock model over a dense cache; score from its own q and k."""
    stock = stock_model(kind)
    config = stock.config
    num_prefix, total = document.num_prefix, document.num_tokens
    reference = MaskedReference(stock)
    reference.forward([*document.prefix_ids, *document.ids], 0)
    shape = check_supported("tiny", config)
    every = torch.ones(config.num_key_value_heads, total, dtype=torch.bool)
    scores = torch.zeros(len(shape.evicting), config.num_key_value_heads, len(document.ids))
    for first in range(0, len(document.ids), CHUNK):
        chunk = list(document.ids[first : first + CHUNK])
        if first == 0:
            ids = [1, 2, 3, 6, 7, *chunk]
        else:
            ids = [4, 5, *document.ids[first - 8 : first], 6, 7, *chunk]
        begin, end = num_prefix + first, num_prefix + first + len(chunk)
        if scoring == "local":
            mask = torch.zeros(config.num_key_value_heads, total, dtype=torch.bool)
            mask[:, :num_prefix] = True
            mask[:, max(0, begin - neighbours * CHUNK) : end + neighbours * CHUNK] = True
            reference.visible = [
                mask if layer in shape.evicting else every for layer in range(shape.num_layers)
            ]
        reference.forward(ids, total)
        for index, layer in enumerate(shape.evicting):
            q, k = reference.seen[layer]
            if normalization == "kvzip_plus":
                found = plus_score(reference, layer, begin, end, num_prefix)
            else:
                found = chunk_max_attention(
                    q,
                    k[:, :num_prefix],
                    k[:, begin:end],
                    k[:, total:],
                    scale=reference.scales[layer],
                )
            scores[index, :, first : first + len(chunk)] = found
        reference.forget(len(ids))
        reference.visible = None
    return scores


@pytest.mark.parametrize("scoring", ["exact", "local"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_a_dense_stock_model(kind: str, scoring: str) -> None:
    # The last chunk has one token; repeat inputs are longer than a slice on purpose.
    document = random_document(2 * CHUNK + 1, prefix=4, seed=1)
    ours = our_scores(engine_model(stock_model(kind)), document, scoring)
    torch.testing.assert_close(ours, oracle_scores(kind, document, scoring), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("neighbours", [1, 2])
def test_scores_with_neighbours_equal_a_dense_stock_model_that_sees_them(neighbours: int) -> None:
    document = random_document(4 * CHUNK + 1, prefix=4, seed=1)
    model = engine_model(stock_model("llama"))
    ours = our_scores(model, document, "local", neighbours=neighbours)
    expected = oracle_scores("llama", document, "local", neighbours=neighbours)
    torch.testing.assert_close(ours, expected, rtol=2e-3, atol=1e-6)
    fewer = our_scores(model, document, "local", neighbours=neighbours - 1)
    assert not torch.allclose(fewer, expected, rtol=2e-3, atol=1e-6)


def test_local_scoring_whose_neighbours_are_all_the_others_is_exact() -> None:
    document = random_document(3 * CHUNK, prefix=4, seed=1)
    model = engine_model(stock_model("llama"))
    whole = our_scores(model, document, "local", neighbours=2)
    torch.testing.assert_close(whole, our_scores(model, document, "exact"), rtol=0, atol=0)


@pytest.mark.parametrize("scoring", ["exact", "local"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_scores_of_kvzip_plus_equal_a_dense_stock_model_in_fp64(kind: str, scoring: str) -> None:
    document = random_document(2 * CHUNK + 1, prefix=4, seed=1)
    ours = our_scores(engine_model(stock_model(kind)), document, scoring, "kvzip_plus")
    expected = oracle_scores(kind, document, scoring, "kvzip_plus")
    torch.testing.assert_close(ours, expected, rtol=2e-3, atol=1e-6)
    assert not torch.allclose(expected, oracle_scores(kind, document, scoring), rtol=0.1)


def test_slices_of_a_repeat_input_share_one_running_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = random_document(150, seed=2)
    model = engine_model(stock_model("llama"))
    whole = [our_scores(model, document, "local", kind) for kind in ("none", "kvzip_plus")]
    monkeypatch.setattr("kvkeep_service.engine.prefill.SLICE_TOKENS", 17)
    sliced = [our_scores(model, document, "local", kind) for kind in ("none", "kvzip_plus")]
    torch.testing.assert_close(sliced, whole, rtol=2e-3, atol=1e-6)


def test_a_later_chunk_repeats_the_eight_tokens_before_it() -> None:
    document = DocumentTokens([0], list(range(100, 160)), torch.zeros(60, dtype=torch.bool))
    assert PROMPTS.repeat_input(document, range(3)) == [1, 2, 3, 6, 7, 100, 101, 102]
    later = PROMPTS.repeat_input(document, range(20, 22))
    assert later == [4, 5, *range(112, 120), 6, 7, 120, 121]
    assert PROMPTS.repeat_input(document, range(3, 4)) == [4, 5, 100, 101, 102, 6, 7, 103]


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1000, 544), (7600, 528), (7930, 198), (8100, 64)]
)
def test_chunks_shrink_where_few_positions_are_left(num_tokens: int, expected: int) -> None:
    assert chunk_tokens("local", num_tokens, 8192) == expected


def test_the_published_chunk_size_is_used_for_exact_scoring() -> None:
    assert CHUNK_TOKENS["exact"] == 2000


def test_field_42_scoring_that_kept_another_share_than_asked_fails_the_build() -> None:
    built = run_build(
        engine_model(stock_model("llama")),
        random_document(300),
        KVzip(PROMPTS, scoring="local", chunk_tokens=CHUNK),
        (0.3,),
    )
    _check_achieved(built.selection, 0.3)
    with pytest.raises(RatioMissed):
        _check_achieved(built.selection, 0.4)


def test_a_build_hands_back_control_after_every_slice_in_every_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = engine_model(stock_model("llama"))
    run: list[tuple[int, int]] = []
    for name in ("run_layer", "attend_only"):
        monkeypatch.setattr(LayeredForward, name, counting(getattr(LayeredForward, name), run))
    policy = KVzip(PROMPTS, scoring="local", chunk_tokens=700)
    per_item = []
    for _ in build(model, random_document(900), policy=policy, ratios=(0.3,)):
        per_item.append(list(run))
        run.clear()
    num_layers = model.shape.num_layers
    assert max(map(len, per_item)) == 1, "one layer of one slice"
    assert max(tokens for item in per_item for _, tokens in item) <= SLICE_TOKENS
    # The document in two slices, then repeat inputs of 705 and 212 tokens in two and one, and
    # pieces of it read over all rows and over those kept, in one forward.
    assert sum(map(len, per_item)) == num_layers * (2 + 2 + 1 + 1)


@pytest.mark.parametrize("length", [CHUNK, 2000])
def test_what_scoring_holds_beside_the_cache_is_known_before_it_begins(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, document = engine_model(stock_model("llama")), random_document(400)
    held = []
    enter = _RepeatPass.enter

    def weighed(repeat: _RepeatPass, layer: int) -> None:
        held.append(repeat._rows.nbytes + repeat._scores.untyped_storage().nbytes())
        enter(repeat, layer)

    monkeypatch.setattr(_RepeatPass, "enter", weighed)
    policy = KVzip(PROMPTS, scoring="exact", chunk_tokens=length)
    run_build(model, document, policy, (0.3,))
    known = build_bytes(model, document.num_tokens)
    assert max(held) <= known - model.shape.full_bytes(document.num_tokens, model.dtype)


def counting(step: Callable[..., None], run: list[tuple[int, int]]) -> Callable[..., None]:
    def counted(forward: LayeredForward, layer: int, attention: AttentionPass) -> None:
        run.append((layer, forward._hidden.shape[1]))
        step(forward, layer, attention)

    return counted


@pytest.mark.parametrize("total", [1, 511, 512, 513, 1024, 1052, 4000])
def test_slices_are_as_few_as_can_be_and_equally_long(total: int) -> None:
    found = slices(total)
    assert [token for piece in found for token in piece] == list(range(total))
    sizes = {len(piece) for piece in found}
    assert max(sizes) <= SLICE_TOKENS
    assert max(sizes) - min(sizes) <= 1
    assert len(found) == -(-total // SLICE_TOKENS)


def test_a_token_without_a_hidden_state_does_not_decide_what_kvzip_plus_keeps() -> None:
    document = random_document(70, seed=3)
    stock = stock_model("llama")
    with torch.no_grad():
        stock.model.embed_tokens.weight[document.ids[9]] = 0.0
    scores = our_scores(engine_model(stock), document, "local", "kvzip_plus")
    assert torch.isfinite(scores).all()
