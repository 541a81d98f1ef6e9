"""A whole decoding step of a model on a CPU, against transformers over the full cache.

    PYTHONPATH=bench .venv/bin/python bench/decode_step.py [--tokens 4096] [--threads 2]

Caches hold random rows, which cost what a document's cost, and are there at once. Both sides run
the same weights in the same dtype, in turns. With one thread, CPU time counts and not the clock on
the wall: then others may be at work. Takes a minute.
"""

import argparse
import os

import torch
from kvkeep_bench.gpu_values import Shape, Values
from kvkeep_bench.machine import Machine
from kvkeep_bench.models import MODEL_NAMES, find_model
from kvkeep_bench.stock import StockModel
from kvkeep_bench.turns import clock_of, in_turns

from kvkeep_service.config import load_settings
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import Sequence, SequenceOptions, decode_step, prefill_question
from kvkeep_service.engine.model import LoadedModel, load_model

RATIO = 0.3
MEMBERS = 16
QUESTION_TOKENS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description="a decoding step against transformers, on a CPU")
    parser.add_argument("--model", choices=MODEL_NAMES, default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = find_model(options.model)
    if model is None:
        parser.error(f"{options.model}: its packages are not installed")
    print(Machine.here().line("float32 and bfloat16"), end="\n\n")
    print(f"{model.name}, {options.tokens} tokens, ratio {RATIO}, {clock_of(options.threads)}.\n")
    print(f"| dtype | transformers, ms a step | ours | ratio | {MEMBERS} together | a token |")
    print("|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(
            model.reference,
            device="cpu",
            dtype=dtype,
            model_cache=load_settings().model_cache,
            reserve_tokens=256,
        )
        stock = StockModel(model.directory, loaded.language_model.dtype)
        stock_step = stock.step_over(options.tokens)
        context = random_context(loaded, options.tokens)
        one, many = ([asked(loaded, context) for _ in range(n)] for n in (1, MEMBERS))
        steps = {
            "stock": stock_step,
            "one": lambda loaded=loaded, one=one: step(loaded, one),
            "many": lambda loaded=loaded, many=many: step(loaded, many),
        }
        samples = in_turns(steps, options.repeats, options.threads)
        theirs, ours, together = (1000 * samples.median(name) for name in steps)
        print(
            f"| {dtype} | {theirs:.1f} | {ours:.1f} | **{ours / theirs:.2f}** | {together:.1f} | "
            f"{together / MEMBERS:.1f} |"
        )


def random_context(loaded: LoadedModel, tokens: int) -> ContextView:
    """A compressed cache of the model's shape with random rows."""
    language_model = loaded.language_model
    model = language_model.shape
    values = Values(language_model.device, language_model.dtype, seed=1)
    group_size = model.num_q_heads // model.num_kv_heads
    shape = Shape(loaded.info.name, model.num_kv_heads, group_size, model.head_dim)
    lengths = values.lengths(shape, tokens, RATIO)
    layers = tuple(values.context(shape, lengths) for _ in range(model.num_layers))
    return ContextView(layers, tokens, RATIO)


def asked(loaded: LoadedModel, context: ContextView) -> Sequence:
    """A sequence whose question has been read."""
    sequence = Sequence(
        loaded.language_model,
        context,
        range(100, 100 + QUESTION_TOKENS),
        SequenceOptions(max_tokens=10_000),
        tokenizer=loaded.tokenizer,
        stop_ids=frozenset(),
    )
    prefill_question(loaded.language_model, sequence)
    return sequence


def step(loaded: LoadedModel, sequences: list[Sequence]) -> None:
    for outcome in decode_step(loaded.language_model, sequences):
        if isinstance(outcome, Exception):
            raise outcome


if __name__ == "__main__":
    main()
