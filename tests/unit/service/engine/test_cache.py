"""The engine's own KV: what is written is read, growing loses nothing, a view copies nothing."""

from dataclasses import replace

import pytest
import torch

from kvkeep_kernels.layout import RaggedKV
from kvkeep_service.engine.architecture import ModelShape
from kvkeep_service.engine.cache import FullCache, ResidentContext, Tail

SHAPE = ModelShape(num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, max_positions=512)
RATIOS = (0.1, 0.3, 1.0)


def rows(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, SHAPE.num_kv_heads, tokens, SHAPE.head_dim, generator=generator)


@pytest.fixture
def tail() -> Tail:
    return Tail(SHAPE, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def context() -> ResidentContext:
    # [bands, layers, heads]: ragged, and a head that gets nothing from one band.
    counts = torch.tensor([[[2, 1], [1, 3]], [[0, 4], [2, 1]], [[5, 2], [3, 3]]], dtype=torch.int32)
    layers = []
    for layer in range(2):
        length = counts[:, layer].sum(0, dtype=torch.int32)
        total = int(length.sum())
        k, v = torch.randn(2, total, SHAPE.head_dim).unbind()
        start = torch.cumsum(length, 0).to(torch.int32) - length
        layers.append(RaggedKV(k, v, start, length))
    return ResidentContext(tuple(layers), counts, RATIOS, num_tokens=40)


# Slices that end below, at and above the first capacities, 64 and 128.
@pytest.mark.parametrize("slices", [(64, 1), (63, 1, 1), (1,) * 130, (200,), (64, 64, 1, 300)])
def test_a_growing_tail_keeps_every_row(tail: Tail, slices: tuple[int, ...]) -> None:
    k, v = rows(sum(slices), seed=1)
    seen = 0
    for tokens in slices:
        tail.reserve(tokens)
        for layer in range(SHAPE.num_layers):
            # Layers differ, so that a mix-up of them shows.
            new = slice(seen, seen + tokens)
            whole = tail.write(layer, k[:, new] + layer, v[:, new] - layer)
            assert whole.tokens == seen + tokens
            assert torch.equal(whole.k, k[:, : seen + tokens] + layer)
            assert torch.equal(whole.v, v[:, : seen + tokens] - layer)
        tail.extend(tokens)
        seen += tokens
    assert tail.tokens == seen


def test_a_forward_that_fails_half_way_leaves_the_tail_as_it_was(tail: Tail) -> None:
    k, v = rows(100, seed=2)
    tail.reserve(99)
    for layer in range(SHAPE.num_layers):
        tail.write(layer, k[:, :99], v[:, :99])
    tail.extend(99)
    tail.reserve(1)
    # Only the first layer got its row, and it was never counted.
    tail.write(0, k[:, :1] * 7, v[:, :1] * 7)
    for layer in range(SHAPE.num_layers):
        again = tail.write(layer, k[:, 99:], v[:, 99:])
        assert torch.equal(again.k, k)
        assert torch.equal(again.v, v)


def test_a_full_cache_gives_back_any_piece_and_frees_layer_by_layer() -> None:
    cache = FullCache(SHAPE, 50, dtype=torch.float32, device=torch.device("cpu"))
    k, v = rows(50, seed=3)
    for layer in range(SHAPE.num_layers):
        cache.write(layer, 0, k[:, :30] + layer, v[:, :30])
        cache.write(layer, 30, k[:, 30:] + layer, v[:, 30:])
    cache.release(0)
    piece = cache.rows(1, 10, 40)
    assert torch.equal(piece.k, k[:, 10:40] + 1)
    assert torch.equal(piece.v, v[:, 10:40])
    assert cache.rows(1, 0, 0).tokens == 0
    with pytest.raises(AssertionError, match="layer 0 was released"):
        cache.rows(0, 0, 1)


@pytest.mark.parametrize("window", [1, 2, 7, 30, 100])
def test_a_layer_with_a_window_holds_what_its_tokens_see_and_no_more(window: int) -> None:
    shape = replace(SHAPE, windows=(None, window))
    cache = FullCache(shape, 50, dtype=torch.float32, device=torch.device("cpu"))
    k, v = rows(50, seed=4)
    first = 0
    for tokens in (1, 9, 25, 15):
        last = first + tokens
        cache.write(1, first, k[:, first:last], v[:, first:last])
        seen = cache.visible(1, last)
        assert seen.tokens == min(last, tokens + window - 1)
        assert torch.equal(seen.k, k[:, last - seen.tokens : last])
        assert torch.equal(seen.v, v[:, last - seen.tokens : last])
        first = last
    lasting = cache.lasting(1, 50)
    assert lasting.tokens == min(50, window - 1)
    assert torch.equal(lasting.k, k[:, 50 - lasting.tokens :])
    with pytest.raises(AssertionError, match="layer 1 does not hold every token"):
        cache.rows(1, 0, 50)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_view_is_the_prefix_of_every_run_that_a_ratio_keeps(
    context: ResidentContext, ratio: float
) -> None:
    view = context.view(ratio)
    assert view.ratio == ratio
    assert view.num_tokens == 40
    bands = RATIOS.index(ratio) + 1
    for index, layer in enumerate(view.layers):
        expected = context.counts[:bands, index].sum(0).tolist()
        assert layer.length.tolist() == expected
        for head, length in enumerate(expected):
            whole_k, whole_v = context.layers[index].head_rows(head)
            k, v = layer.head_rows(head)
            assert torch.equal(k, whole_k[:length])
            assert torch.equal(v, whole_v[:length])


def test_a_view_is_never_rounded_to_another_ratio(context: ResidentContext) -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        context.view(0.2)


def test_a_view_copies_nothing_and_is_made_once(context: ResidentContext) -> None:
    # Sequences on one view are recognised by identity and read its rows together.
    assert context.view(0.3) is context.view(0.3)
    for low, whole in zip(context.view(0.1).layers, context.layers, strict=True):
        assert low.k.data_ptr() == whole.k.data_ptr()
        assert low.v.data_ptr() == whole.v.data_ptr()


def test_the_size_is_that_of_k_and_v(context: ResidentContext) -> None:
    num_rows = int(context.counts.sum())
    assert context.size_bytes == num_rows * 2 * SHAPE.head_dim * 4
