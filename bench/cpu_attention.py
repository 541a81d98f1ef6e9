"""One layer's attention of one token on a CPU: the compressed cache against the full one.

    PYTHONPATH=bench .venv/bin/python bench/cpu_attention.py [--threads 2] [--repeats 15]

The baseline is the best of three dense ways over the full cache, chosen by shape and dtype from
the same run. Everything is measured in turns, over as many layers as no cache of the processor
holds. With one thread, CPU time counts and not the clock on the wall: then others may be at work.
Takes a minute and 3 GB.
"""

import argparse
import os
from collections.abc import Callable

import torch
from kvkeep_bench.gpu_values import LLAMA_8B, SMOLLM2, Shape, Values
from kvkeep_bench.machine import Machine
from kvkeep_bench.samples import Samples
from kvkeep_bench.turns import clock_of, in_turns
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvkeep_kernels.attention import ragged_decode
from kvkeep_kernels.layout import DenseKV, RaggedKV

TOKENS = 8192
TAIL_TOKENS = 40
RATIO = 0.3
LAYERS = 12
MEMBERS = 16
SHAPES = (SMOLLM2, Shape("Qwen2.5-0.5B", 2, 7, 64), LLAMA_8B)
DTYPES = (torch.float32, torch.bfloat16)
DENSE_WAYS = ("SDPA, enable_gqa", "SDPA, group as rows", "two matmuls")


class Layers:
    """The same token over the full caches and the compressed ones of every layer."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        values = Values(torch.device("cpu"), dtype, seed=1)
        self.shape = shape
        self.q = values.queries(shape, MEMBERS)
        self.full = [values.dense(shape, TOKENS + TAIL_TOKENS) for _ in range(LAYERS)]
        lengths = values.lengths(shape, TOKENS, RATIO)
        self.kept: list[RaggedKV] = [values.context(shape, lengths) for _ in range(LAYERS)]
        self.tails = [
            [values.dense(shape, TAIL_TOKENS) for _ in range(MEMBERS)] for _ in range(LAYERS)
        ]

    def steps(self) -> dict[str, Callable[[], None]]:
        """What is measured, by name; each goes through every layer."""
        return {
            DENSE_WAYS[0]: lambda: self._dense(self._with_gqa),
            DENSE_WAYS[1]: lambda: self._dense(self._group_as_rows),
            DENSE_WAYS[2]: lambda: self._dense(self._matmuls),
            "one member": lambda: self._ragged(1),
            f"{MEMBERS} members": lambda: self._ragged(MEMBERS),
        }

    def _dense(self, attend: Callable[[DenseKV], Tensor]) -> None:
        for cache in self.full:
            attend(cache)

    def _ragged(self, members: int) -> None:
        for kept, tails in zip(self.kept, self.tails, strict=True):
            ragged_decode(self.q[:members], kept, tails[:members], scale=self.shape.scale)

    def _with_gqa(self, cache: DenseKV) -> Tensor:
        return scaled_dot_product_attention(
            self.q[:1, :, None],
            cache.k[None],
            cache.v[None],
            scale=self.shape.scale,
            enable_gqa=True,
        )

    def _group_as_rows(self, cache: DenseKV) -> Tensor:
        return scaled_dot_product_attention(
            self._grouped()[None], cache.k[None], cache.v[None], scale=self.shape.scale
        )

    def _matmuls(self, cache: DenseKV) -> Tensor:
        logits = torch.matmul(self._grouped() * self.shape.scale, cache.k.transpose(1, 2))
        return torch.matmul(torch.softmax(logits, dim=-1), cache.v)

    def _grouped(self) -> Tensor:
        return self.q[0].unflatten(0, (self.shape.num_kv_heads, -1))


def main() -> None:
    parser = argparse.ArgumentParser(description="attention of one token over kept rows, on a CPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = Machine.here()
    print(machine.line("float32 and bfloat16"), end="\n\n")
    print(f"{TOKENS} tokens, ratio {RATIO}, {LAYERS} layers in turn, {clock_of(options.threads)}.")
    print(f"Bars: one member ≤ 0.75 of the best dense way, {MEMBERS} ≤ 0.45 x sixteen times one.\n")
    print("| shape | dtype | best dense way | ms a layer | one member | ratio |", end="")
    print(f" {MEMBERS} members | / {MEMBERS} x one |\n|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for dtype in DTYPES:
            layers = Layers(shape, dtype)
            print(_row(layers, dtype, in_turns(layers.steps(), options.repeats, options.threads)))


def _row(layers: Layers, dtype: torch.dtype, samples: Samples) -> str:
    best = min(DENSE_WAYS, key=samples.median)
    dense, one, many = (
        1000 * samples.median(name) / LAYERS for name in (best, "one member", f"{MEMBERS} members")
    )
    shape = f"{layers.shape.num_kv_heads} x {layers.shape.group_size}, d {layers.shape.head_dim}"
    return (
        f"| {shape} | {str(dtype).removeprefix('torch.')} | {best} | {dense:.2f} | {one:.2f} | "
        f"**{one / dense:.2f}** | {many:.2f} | **{many / one / MEMBERS:.2f}** |"
    )


if __name__ == "__main__":
    main()
