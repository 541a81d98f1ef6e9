"""Local scoring against exact: what they keep, what a token costs, how much memory they take.

    PYTHONPATH=bench .venv/bin/python bench/scoring.py [--sizes 2000,4000,7000] [--threads 2]
        [--model smollm2] [--cost-only 2000,4000,8000,16000]

One prefill a size, then every way of scoring over the same cache. Rank correlation (Spearman) is
over the scores of all layers, heads and tokens; overlap is the shared part of the highest scores,
as many as each ratio keeps, floors left out. The last chunk shrinks where positions run out.
``--cost-only`` runs random weights of SmolLM2's layers, four of them, with positions for 32K: what
a token costs where the real model has no more positions. With one thread, CPU time counts.
Memory is what scoring adds to the resident set, beside the full cache, which is its denominator.

SmolLM2 takes about two minutes at 4,000 tokens on two cores, six for the three sizes, and the
costs at four sizes as many.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from kvkeep_bench.engine import EngineSide
from kvkeep_bench.machine import Machine
from kvkeep_bench.memory import peak_of
from kvkeep_bench.models import MODEL_NAMES, find_model
from kvkeep_bench.samples import progress
from kvkeep_bench.turns import clock_of
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep_service.config import load_settings
from kvkeep_service.engine.architecture import check_supported
from kvkeep_service.engine.attention import ATTENTION_NAME
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens, prefill
from kvkeep_service.policies.kvzip import CHUNK_TOKENS, KVzip, RepeatPrompts, chunk_tokens
from kvkeep_service.ports import Scoring

DOCUMENT = Path(__file__).parents[1] / "tests" / "data" / "alice.txt"
# Past the title page and the contents.
DOCUMENT_START = 2000
RATIOS = (0.5, 0.3, 0.2, 0.1)
EXACT: Scoring = "exact"


@dataclass(frozen=True, slots=True)
class Way:
    """One way of scoring; ``chunk`` None is the server's own number of tokens."""

    scoring: Scoring
    neighbours: int = 0
    chunk: int | None = None

    def policy(self, engine: EngineSide, num_tokens: int, max_positions: int) -> KVzip:
        """For a text of ``num_tokens``, with what is in front of it."""
        chunk = chunk_tokens(self.scoring, num_tokens, max_positions)
        if self.chunk is not None:
            chunk = min(self.chunk, chunk_tokens(EXACT, num_tokens, max_positions))
        return engine.policy(self.scoring, chunk, self.neighbours)


WAYS: Mapping[str, Way] = {
    EXACT: Way("exact"),
    "local": Way("local"),
    "local, 1 neighbour": Way("local", neighbours=1),
    "local, chunks of 1024": Way("local", chunk=1024),
    "exact, chunks of 544": Way("exact", chunk=544),
}
COSTS: tuple[Scoring, ...] = ("exact", "local")


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores [layers, heads, tokens], microseconds a token, and memory added / full cache."""

    scores: Tensor
    token_us: float
    memory: float


def score_all(
    model: LanguageModel,
    document: DocumentTokens,
    policies: Mapping[str, KVzip],
    clock: Callable[[], float],
) -> Iterator[tuple[str, Scored]]:
    """Prefill once, then score in every way; the prefill comes first, under its own name."""
    cache = FullCache(model.shape, document.num_tokens, dtype=model.dtype, device=model.device)
    full = model.shape.full_bytes(document.num_tokens, model.dtype)
    tokens = len(document.ids)
    started = clock()
    for _ in prefill(model, cache, document, None):
        pass
    token_us = 1e6 * (clock() - started) / tokens
    yield "prefill", Scored(torch.empty(0), token_us, 0.0)
    for name, policy in policies.items():
        progress(f"{tokens} tokens, {name}")
        (scores, seconds), peak = peak_of(partial(_run, policy, model, cache, document, clock))
        yield name, Scored(scores, 1e6 * seconds / tokens, peak.added_bytes / full)


def _run(
    policy: KVzip,
    model: LanguageModel,
    cache: FullCache,
    document: DocumentTokens,
    clock: Callable[[], float],
) -> tuple[Tensor, float]:
    started = clock()
    steps = policy.score(model, cache, document)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            return finished.value, clock() - started


def spearman(one: Tensor, other: Tensor) -> float:
    """Rank correlation of all scores; ties, which fp32 scores hardly have, in index order."""

    def ranks(scores: Tensor) -> Tensor:
        order = scores.flatten().argsort(stable=True)
        found = torch.empty(len(order), dtype=torch.float64)
        found[order] = torch.arange(len(order), dtype=torch.float64)
        return found

    return float(torch.corrcoef(torch.stack([ranks(one), ranks(other)]))[0, 1])


def overlap(one: Tensor, other: Tensor, ratio: float) -> float:
    """Shared part of the highest ``ratio`` of the scores of all heads."""
    count = int(ratio * one.numel() + 0.5)
    kept = torch.zeros(2, one.numel(), dtype=torch.bool)
    for mask, scores in zip(kept, (one, other), strict=True):
        mask[scores.flatten().topk(count).indices] = True
    return float(kept.all(dim=0).sum()) / count


def compare(engine: EngineSide, sizes: list[int], clock: Callable[[], float]) -> None:
    """The table of a real model on real text."""
    model = engine.loaded.language_model
    print("| tokens | scoring | us a token | / exact | Spearman | " + _ratios() + " | memory |")
    print("|---|---|---|---|---|" + "---|" * len(RATIOS) + "---|")
    for size in sizes:
        text = engine.cut(DOCUMENT.read_text()[DOCUMENT_START:], size)
        document = engine.plan(text, "local", 0.3).document
        positions = model.shape.max_positions
        policies = {
            name: way.policy(engine, document.num_tokens, positions) for name, way in WAYS.items()
        }
        exact: Scored | None = None
        for name, scored in score_all(model, document, policies, clock):
            exact = scored if name == EXACT else exact
            cells = ["", "", *("" for _ in RATIOS), ""]
            if exact is not None:
                same = [overlap(exact.scores, scored.scores, ratio) for ratio in RATIOS]
                cells = [
                    f"{scored.token_us / exact.token_us:.2f}",
                    f"{spearman(exact.scores, scored.scores):.3f}",
                    *(f"{shared:.3f}" for shared in same),
                    f"{scored.memory:.3f}",
                ]
            print(
                f"| {size} | {name} | {scored.token_us:.0f} | " + " | ".join(cells) + " |",
                flush=True,
            )


def cost_only(sizes: list[int], clock: Callable[[], float]) -> None:
    """What a token costs in random weights, beyond the real model's positions."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=32768,
    )
    stock = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    model = LanguageModel(stock.eval(), check_supported("random weights", config))
    print("| tokens | prefill, us a token | exact, us a token | local, us a token |")
    print("|---|---|---|---|")
    torch.manual_seed(1)
    for size in sizes:
        ids = torch.randint(0, config.vocab_size, (size + 4,)).tolist()
        document = DocumentTokens(ids[:4], ids[4:], torch.zeros(size, dtype=torch.bool))
        # As long as SmolLM2's, of ids that this vocabulary has.
        prompts = RepeatPrompts(tuple(range(8)), tuple(range(13)), tuple(range(5)))
        policies = {
            name: KVzip(prompts, scoring=name, chunk_tokens=CHUNK_TOKENS[name]) for name in COSTS
        }
        found = score_all(model, document, policies, clock)
        costs = " | ".join(f"{scored.token_us:.0f}" for _, scored in found)
        print(f"| {size} | {costs} |", flush=True)


def _ratios() -> str:
    return " | ".join(f"overlap {ratio}" for ratio in RATIOS)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def main() -> None:
    parser = argparse.ArgumentParser(description="local scoring against exact")
    parser.add_argument("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0])
    parser.add_argument("--sizes", type=_sizes, default=[2000, 4000, 7000])
    parser.add_argument("--cost-only", type=_sizes, default=[])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = Machine.here()
    found = find_model(options.model)
    if found is None:
        raise SystemExit(f"{options.model} is not installed")
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    engine = EngineSide(found.reference, load_settings().model_cache)
    dtype = str(engine.loaded.language_model.dtype).removeprefix("torch.")
    print(f"## Local scoring against exact, {options.model}\n")
    print(f"{machine.line(dtype)}; {clock_of(options.threads)}\n")
    if options.sizes:
        compare(engine, options.sizes, clock)
    if options.cost_only:
        print("\nRandom weights of SmolLM2's layers, four of them:\n")
        cost_only(options.cost_only, clock)


if __name__ == "__main__":
    main()
