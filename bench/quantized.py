"""What codes of 8 and 4 bits cost in loss: teacher-forced, over one compressed document.

    PYTHONSAFEPATH=1 PYTHONPATH=bench .venv/bin/python bench/quantized.py

Takes some minutes and half a GB. The text is the one that tests read.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from kvkeep_bench.engine import EngineSide
from kvkeep_bench.models import MODEL_NAMES, find_model
from torch import Tensor

from kvkeep_kernels.layout import RaggedKV
from kvkeep_kernels.quantize import quantize_kv
from kvkeep_service.config import load_settings
from kvkeep_service.engine.build import DocumentTokens, build
from kvkeep_service.engine.cache import ContextView, ResidentContext, Tail
from kvkeep_service.engine.decode import QuestionPass
from kvkeep_service.ports import Quantization

TEXT = Path(__file__).parents[1] / "tests" / "data" / "alice.txt"


class Measured:
    """One model and one document; every cache of it is asked for the same tokens."""

    def __init__(self, engine: EngineSide, text: str, tokens: int, asked: int) -> None:
        """The document is the first ``tokens`` of the text; ``asked`` tokens follow it."""
        plan = engine.plan(engine.cut(text, tokens), "local", 0.3)
        piece = engine.loaded.template.document_piece(text)
        self._engine, self._plan = engine, plan
        self.document: DocumentTokens = plan.document
        self.following = torch.tensor([piece.ids[tokens : tokens + asked]])
        self.repeated = torch.tensor([piece.ids[:asked]])

    def built(self, ratio: float, quantization: Quantization) -> ResidentContext:
        """A whole build."""
        steps = build(
            self._engine.loaded.language_model,
            self.document,
            policy=self._plan.policy if ratio < 1 else None,
            ratios=(ratio,),
            quantization=quantization,
        )
        while True:
            try:
                next(steps)
            except StopIteration as finished:
                context: ResidentContext = finished.value.context
                return context

    def log_probabilities(self, view: ContextView, ids: Tensor) -> Tensor:
        """Of the whole vocabulary at every one of ``ids`` [1, tokens], read after the document."""
        model = self._engine.loaded.language_model
        tail = Tail(model.shape, dtype=model.dtype, device=model.device)
        tail.reserve(ids.shape[1])
        positions = torch.arange(view.num_tokens, view.num_tokens + ids.shape[1])[None]
        hidden = model.hidden(ids, positions, QuestionPass(view, tail))
        return torch.log_softmax(model.logits(hidden[0]).float(), dim=-1)


def without_means(context: ResidentContext) -> ResidentContext:
    """The same rows in 4 bits, their keys as they are."""
    layers = []
    for rows in context.layers:
        assert isinstance(rows, RaggedKV)
        means = torch.zeros(rows.num_kv_heads, rows.head_dim, dtype=torch.float16)
        layers.append(quantize_kv(rows, "int4", means))
    return replace(context, layers=tuple(layers), _views={})


def variants(measured: Measured, ratio: float) -> Iterator[tuple[str, ResidentContext]]:
    """The plain cache first."""
    plain = measured.built(ratio, "none")
    yield "none", plain
    yield "int8", measured.built(ratio, "int8")
    yield "fp8", measured.built(ratio, "fp8")
    yield "int4", measured.built(ratio, "int4")
    yield "int4 without means", without_means(plain)


def main() -> None:
    """Print one table per model: loss, and how far the distribution went from the plain cache's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODEL_NAMES, default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--asked", type=int, default=256)
    parser.add_argument("--ratio", type=float, default=0.3)
    given = parser.parse_args()
    found = find_model(given.model)
    if found is None:
        raise SystemExit(f"{given.model} is not installed")
    engine = EngineSide(found.reference, load_settings().model_cache)
    measured = Measured(engine, TEXT.read_text(), given.tokens, given.asked)
    plain: dict[str, Tensor] = {}
    with torch.inference_mode():
        for name, context in variants(measured, given.ratio):
            print(f"{name:20} {context.size_bytes / 1e6:7.2f} MB", end="")
            view = context.view(given.ratio)
            for what, ids in (("next", measured.following), ("again", measured.repeated)):
                found_here = measured.log_probabilities(view, ids)
                reference = plain.setdefault(what, found_here)
                targets = ids[0, 1:, None]
                loss = -found_here[:-1].gather(1, targets).mean()
                away = (reference.exp() * (reference - found_here)).sum(-1).mean()
                print(f" | {what}: loss {loss:.4f}, KL {away:.4f}", end="")
            print(flush=True)


if __name__ == "__main__":
    main()
