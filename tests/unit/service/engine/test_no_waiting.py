"""A decoding step hands the device its work and waits once, at its end, for what came of it."""

from dataclasses import dataclass, field

import pytest
import torch

from kvkeep_service.engine import transfer
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import Tail
from kvkeep_service.engine.decode import Sequence, SequenceOptions, decode_step, prefill_question
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.sampling import SamplingOptions
from kvkeep_service.engine.tail_batch import TailBatch
from kvkeep_service.ports import Quantization

from ....support.host_syncs import HostSyncs
from .gated import RATIOS, policy, sequence
from .models import engine_model, random_document, run_build, stock_model

SAMPLED = SamplingOptions(temperature=0.8, top_p=0.9, top_k=40, seed=3)
OPTIONS = (
    SequenceOptions(50),
    SequenceOptions(50, sampling=SAMPLED),
    SequenceOptions(50, top_logprobs=3),
    SequenceOptions(50, sampling=SAMPLED, top_logprobs=0),
)


@dataclass
class Watch:
    """What a step did until its one transfer, and how many transfers there were."""

    syncs: HostSyncs = field(default_factory=HostSyncs)
    transfers: int = 0

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        self.syncs.__exit__()
        self.transfers += 1
        copy = values.clone()
        # Whoever goes on reading what is the device's finds nothing there.
        values.fill_(-1)
        return copy


def watched_step(
    model: LanguageModel,
    batch: list[Sequence],
    together: TailBatch | None,
    monkeypatch: pytest.MonkeyPatch,
) -> Watch:
    watch = Watch()
    monkeypatch.setattr(transfer, "to_host", watch.to_host)
    with watch.syncs:
        outcomes = decode_step(model, batch, together)
    assert all(isinstance(outcome, str) for outcome in outcomes)
    return watch


def running(model: LanguageModel, built: list[BuiltCache]) -> list[Sequence]:
    """Sequences on several contexts, at several ratios, one of which continues a session."""
    batch = [
        sequence(model, built[n % len(built)].context.view(RATIOS[n % 3]), [n, n + 1], options)
        for n, options in enumerate(OPTIONS * 2)
    ]
    kept = Tail(model.shape, dtype=model.dtype, device=model.device)
    first = sequence(model, built[0].context.view(0.1), [7, 8, 9], SequenceOptions(50))
    prefill_question(model, first)
    kept = first.tail.copied(3)
    again = Sequence(
        *(model, built[0].context.view(0.1), [7, 8, 9, 10], SequenceOptions(50)),
        tokenizer=None,
        stop_ids=frozenset(),
        tail=kept,
    )
    again._text = first._text
    batch.append(again)
    for one in batch:
        prefill_question(model, one)
    return batch


@pytest.mark.parametrize("has_room_for_tails", [False, True], ids=["alone", "side by side"])
@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi3-longrope", "qwen3-moe"])
def test_a_step_waits_for_the_device_once_at_its_end(
    kind: str,
    quantization: Quantization,
    has_room_for_tails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = engine_model(stock_model(kind))
    built = [
        run_build(model, random_document(tokens, seed=tokens), policy(), RATIOS, quantization)
        for tokens in (150, 260)
    ]
    batch = running(model, built)
    together = TailBatch(model.shape, dtype=model.dtype) if has_room_for_tails else None
    for step in range(3):
        watch = watched_step(model, batch[step:], together, monkeypatch)
        assert watch.syncs.seen == []
        assert watch.transfers == 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: [1, 2][x[0].long()],
    ],
)
def test_what_would_wait_is_seen(wait: object) -> None:
    values = torch.ones(3)
    with HostSyncs() as syncs:
        wait(values)
    assert syncs.seen


def test_what_came_of_logits_is_what_they_say() -> None:
    logits = torch.randn(4, 50)
    logits[1, 7] = torch.inf
    logits[3, 9] = torch.nan
    rows = transfer.found(logits, [False, True, False, False])
    assert [row.is_finite for row in rows] == [True, False, True, False]
    assert [row.best for row in rows] == logits.argmax(dim=1).tolist()
    assert [row.logits is None for row in rows] == [True, False, True, True]
    assert rows[1].logits is not None
    assert torch.equal(rows[1].logits, logits[1])
