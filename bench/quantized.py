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

from kvkeep_kernels.layout import CodeKind, ContextRows, RaggedKV
from kvkeep_kernels.quantize import channel_mean, quantize_kv
from kvkeep_service.config import load_settings
from kvkeep_service.engine.build import build
from kvkeep_service.engine.cache import ContextView, ResidentContext, Tail
from kvkeep_service.engine.passes import QuestionPass
from kvkeep_service.engine.prefill import DocumentTokens

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

    def built(self, ratio: float) -> ResidentContext:
        """A whole build of plain rows."""
        steps = build(
            self._engine.loaded.language_model,
            self.document,
            policy=self._plan.policy if ratio < 1 else None,
            ratios=(ratio,),
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
        tail = Tail(model.shape, dtype=model.dtype, device=model.device, num_lead=view.num_lead)
        tail.reserve(ids.shape[1])
        positions = torch.arange(view.num_tokens, view.num_tokens + ids.shape[1])[None]
        hidden = model.hidden(ids, positions, QuestionPass(view, tail))
        return torch.log_softmax(model.logits(hidden[0]).float(), dim=-1)


def quantized(
    context: ResidentContext, kind: CodeKind, everything: ResidentContext | None = None
) -> ResidentContext:
    """The same rows in codes, as a build makes them. int4: about the means of ``everything``."""
    layers: list[ContextRows] = []
    for index, rows in enumerate(context.layers):
        assert isinstance(rows, RaggedKV)
        means = None
        if everything is not None:
            whole = everything.layers[index].k.unflatten(0, (rows.num_kv_heads, -1))
            means = channel_mean(whole)
        elif kind == "int4":
            means = torch.zeros(rows.num_kv_heads, rows.head_dim, dtype=torch.float16)
        layers.append(quantize_kv(rows, kind, means))
    return replace(context, layers=tuple(layers), _views={})


def variants(
    plain: ResidentContext, everything: ResidentContext
) -> Iterator[tuple[str, ResidentContext]]:
    """The plain cache first."""
    yield "none", plain
    yield "int8", quantized(plain, "int8")
    yield "fp8", quantized(plain, "fp8")
    yield "int4", quantized(plain, "int4", everything)
    yield "int4 without means", quantized(plain, "int4")


def main() -> None:
    """Print one table per model: loss, and how far the distribution went from the plain cache's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODEL_NAMES, default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--asked", type=int, default=256)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 0.3])
    given = parser.parse_args()
    found = find_model(given.model)
    if found is None:
        raise SystemExit(f"{given.model} is not installed")
    engine = EngineSide(found.reference, load_settings().model_cache)
    measured = Measured(engine, TEXT.read_text(), given.tokens, given.asked)
    with torch.inference_mode():
        everything = measured.built(1.0)
        for ratio in given.ratios:
            report(measured, everything if ratio == 1.0 else measured.built(ratio), everything)


def report(measured: Measured, plain: ResidentContext, everything: ResidentContext) -> None:
    """Print the table of one ratio."""
    ratio = plain.ratios[-1]
    print(f"\n## Ratio {ratio}, {plain.num_tokens} tokens\n")
    print("| codes | MB | loss next | KL next | loss again | KL again |")
    print("|---|---|---|---|---|---|")
    references: dict[str, Tensor] = {}
    for name, context in variants(plain, everything):
        cells = [name, f"{context.size_bytes / 1e6:.2f}"]
        view = context.view(ratio)
        for what, ids in (("next", measured.following), ("again", measured.repeated)):
            found = measured.log_probabilities(view, ids)
            reference = references.setdefault(what, found)
            loss = -found[:-1].gather(1, ids[0, 1:, None]).mean()
            away = (reference.exp() * (reference - found)).sum(-1).mean()
            cells += [f"{loss:.4f}", f"{away:.4f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
