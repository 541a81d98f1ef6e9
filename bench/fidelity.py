"""Whether ``ratio: "auto"`` keeps its promise: losses measured afterwards, on other spans.

    .venv/bin/python bench/fidelity.py TEXT... [--documents 40] [--tokens 4000] [--max-loss 0.05]

Documents are pieces of the text files, in turns. Each is built with "auto"; losses are then
measured on spans that share no token with the build's, from the smallest ratio on until the one
chosen and the smallest within the limit are known. A
document is one line of ``bench/results/fidelity.jsonl``; those that are there already are left
out, so a run may be stopped and repeated. At 4,000 tokens a document takes about a minute on two
quiet cores with SmolLM2.
"""

import argparse
import json
import random
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from kvkeep_service.auto_ratio import AutoRatio
from kvkeep_service.config import Settings
from kvkeep_service.engine.build import BuiltCache, Progress, build
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.fidelity import LEAD_TOKENS, SPAN_TOKENS, sample_of
from kvkeep_service.engine.model import LanguageModel, load_model
from kvkeep_service.engine.passes import QuestionPass
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.engine.remainders import REMAINDER_VERSION
from kvkeep_service.plan import BANDS, band_ratios
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts, chunk_tokens

RESULTS = Path(__file__).parent / "results" / "fidelity.jsonl"
CANDIDATES = tuple(ratio for ratio in BANDS if ratio >= 0.15)
SPANS_TOGETHER = 5
ROUNDS = 6


def main() -> None:
    """Measure what is missing, then say how often the promise held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--max-loss", type=float, default=0.05)
    parser.add_argument("--model", default="bundled")
    asked = parser.parse_args()
    settings = {
        "model": asked.model,
        "tokens": asked.tokens,
        "max_loss": asked.max_loss,
        "remainder": REMAINDER_VERSION,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known = {line["document"]: line for line in map(json.loads, lines) if line["run"] == settings}
    loaded = load_model(
        asked.model,
        device="cpu",
        dtype="float32",
        model_cache=Settings().model_cache,
        reserve_tokens=256,
    )
    template, model = loaded.template, loaded.language_model
    texts = [template.document_piece(path.read_text()).ids for path in asked.texts]
    prompts = RepeatPrompts.from_template(template)
    for number in range(asked.documents):
        if number in known:
            continue
        place = number % len(texts)
        ids = texts[place]
        first = random.Random(number).randrange(max(1, len(ids) - asked.tokens))
        body = ids[first : first + asked.tokens]
        protected = torch.zeros(len(body), dtype=torch.bool)
        prefix = template.prefix_ids(template.frame().prefix)
        document = DocumentTokens(prefix, body, protected)
        line = {"run": settings, "document": number, "text": asked.texts[place].name}
        line |= judged(model, document, prompts, asked.max_loss)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        known[number] = line
        print(json.dumps(line), flush=True)
    report(list(known.values()), asked.max_loss)


def judged(
    model: LanguageModel, document: DocumentTokens, prompts: RepeatPrompts, max_loss: float
) -> dict[str, object]:
    """Build with "auto", and measure ratios on other spans until the smallest within is known."""
    prompt = (*prompts.first, *prompts.turn_end)
    chosen = built(model, document, prompts, prompt, AutoRatio(CANDIDATES, max_loss, band_ratios))
    assert chosen.chosen is not None, "that is what was asked for"
    used = sample_of(document.ids, 2 * document.num_tokens, prompt)
    samples = other_spans(document.ids, used.ids if used else ())
    whole = built(model, document, None, prompt, (1.0,))
    full = losses(model, whole.context.view(1.0), samples, prompt)
    del whole
    found = {1.0: 0.0}
    context = chosen.context
    for ratio in CANDIDATES[:-1]:
        if ratio > max(context.ratios):
            context = built(model, document, prompts, prompt, CANDIDATES).context
        lost = losses(model, context.view(ratio), samples, prompt) - full
        found[ratio] = float(lost.mean())
        if found[ratio] <= max_loss and ratio >= chosen.chosen:
            break
    seconds = chosen.timings
    return {
        "chosen": chosen.chosen,
        "losses": found,
        "share_of_build": seconds["fidelity_s"] / sum(seconds.values()),
        "measured": None if chosen.fidelity is None else asdict(chosen.fidelity),
    }


def built(
    model: LanguageModel,
    document: DocumentTokens,
    prompts: RepeatPrompts | None,
    prompt: Sequence[int],
    ratios: Sequence[float] | AutoRatio,
) -> BuiltCache:
    """Run one build to its end; without ``prompts`` everything is kept."""
    chunk = chunk_tokens("local", document.num_tokens, model.shape.max_positions)
    policy = (
        None
        if prompts is None
        else KVzip(prompts, scoring="local", chunk_tokens=chunk, remainder=True)
    )
    steps: Generator[Progress, None, BuiltCache] = build(
        model, document, policy=policy, ratios=ratios, repeat_prompt=prompt
    )
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            cache: BuiltCache = finished.value
            return cache


def other_spans(ids: Sequence[int], used: Sequence[int]) -> list[list[int]]:
    """Spans that are none of those used, several chained together for each forward."""
    taken = {tuple(used[i : i + SPAN_TOKENS // 4]) for i in range(len(used))}
    chance = random.Random(len(ids))
    starts = list(range(0, len(ids) - SPAN_TOKENS, SPAN_TOKENS))
    chance.shuffle(starts)
    free = [
        start
        for start in starts
        if not any(
            tuple(ids[at : at + SPAN_TOKENS // 4]) in taken
            for at in range(start, start + SPAN_TOKENS)
        )
    ][: SPANS_TOGETHER * ROUNDS]
    chains = [free[i : i + SPANS_TOGETHER] for i in range(0, len(free), SPANS_TOGETHER)]
    return [[t for start in chain for t in ids[start : start + SPAN_TOKENS]] for chain in chains]


def losses(
    model: LanguageModel, view: ContextView, samples: list[list[int]], prompt: Sequence[int]
) -> torch.Tensor:
    """Of every counted token, its negative log likelihood in nats."""
    found = []
    for chain in samples:
        ids = torch.tensor([*prompt, *chain])
        tail = Tail(model.shape, dtype=model.dtype, device=model.device, num_lead=view.num_lead)
        tail.reserve(len(ids) - 1)
        positions = torch.arange(view.num_tokens, view.num_tokens + len(ids) - 1)[None]
        hidden = model.hidden(ids[None, :-1], positions, QuestionPass(view, tail))[0]
        places = [p for p in range(len(chain)) if p % SPAN_TOKENS >= LEAD_TOKENS]
        rows = torch.tensor(places) + len(prompt) - 1
        logits = model.logits(hidden[rows])
        found.append(torch.nn.functional.cross_entropy(logits, ids[rows + 1], reduction="none"))
    return torch.cat(found).double()


def report(lines: list[dict[str, object]], max_loss: float) -> None:
    """Print the two shares that are promised."""
    kept = near = 0
    for line in lines:
        measured = {float(ratio): loss for ratio, loss in dict(line["losses"]).items()}
        chosen = float(str(line["chosen"]))
        smallest = min(ratio for ratio, loss in measured.items() if loss <= max_loss)
        kept += measured[chosen] <= max_loss
        near += abs(CANDIDATES.index(chosen) - CANDIDATES.index(smallest)) <= 1
    total = len(lines)
    print(
        f"within max_loss: {kept} of {total}; within one ratio of the smallest: {near} of {total}"
    )


if __name__ == "__main__":
    main()
