"""Steps replayed from a tape equal the oracle; run by ``test_graphs`` in the interpreter."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvkeep_kernels import reference
from kvkeep_kernels.layout import CodeKind, ContextRows, DenseKV
from kvkeep_service.engine import device_step, transfer
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.decode import SequenceOptions, decode_step, kept_between_steps
from kvkeep_service.engine.device_step import DeviceStep, parts_of
from kvkeep_service.engine.graphs import DeviceSteps, GraphOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.sampling import SamplingOptions
from kvkeep_service.engine_counts import StepCounts

from ....support.ragged_values import placed, quantized, ragged
from ....support.tape import TapeCapture
from .gated import sequence
from .models import VOCABULARY, engine_model, tiny_config


@dataclass
class Asked:
    """A sequence, and a tail of the same rows for the oracle."""

    context: ContextView
    tail: Tail
    twin: Tail
    generated: list[int] = field(default_factory=lambda: [3])

    @property
    def position(self) -> int:
        return self.context.num_tokens + self.tail.tokens


@dataclass
class OraclePass:
    one: Asked

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        own, bounds = self.one.twin.write(layer, k[0], v[0]), self.one.twin.bounds(layer)
        rows = self.one.context.layers[layer]
        out = reference.ragged_decode(q[:, :, 0], rows, [own], scale=scale, bounds=bounds)
        return out[:, :, None]


def small_model(kind: str) -> LanguageModel:
    """Smaller than others have: the interpreter takes milliseconds for each program."""
    config = tiny_config(kind)
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 2, 1
    if config.model_type == "gemma3_text":
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(11)
    return engine_model(AutoModelForCausalLM.from_config(config).eval())


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model("llama")


def view(
    model: LanguageModel, seed: int, *lengths: int, kind: CodeKind | None = None
) -> ContextView:
    """A context of random rows, so many in each layer."""
    shape = model.shape

    def rows(layer: int) -> ContextRows:
        made = ragged(lengths[layer : layer + 1], shape.head_dim, seed + layer)
        return quantized(placed(made, 900) if shape.windows else made, kind)

    return ContextView(tuple(rows(layer) for layer in range(shape.num_layers)), 900, 0.3)


def asked(model: LanguageModel, context: ContextView, tokens: int, num_lead: int = 0) -> Asked:
    """``num_lead``: rows that stand for evicted ones, in front of the first token's."""
    shape = model.shape
    leading = torch.randn(shape.num_layers, 2, shape.num_kv_heads, num_lead, shape.head_dim)
    rows = torch.randn(shape.num_layers, 2, shape.num_kv_heads, tokens, shape.head_dim)
    tails = [
        Tail(shape, dtype=model.dtype, device=model.device, num_lead=num_lead) for _ in range(2)
    ]
    for tail in tails:
        tail.reserve(tokens)
        for layer, (k, v) in enumerate(leading):
            tail.write_lead(layer, DenseKV(k, v))
        tail.append(rows)
    return Asked(context, *tails)


def check_step(steps: DeviceSteps, model: LanguageModel, batch: list[Asked]) -> None:
    """One step of the batch, compared with that of each sequence alone, by the oracle."""
    expected = []
    for one in batch:
        one.tail.reserve(1)
        one.twin.reserve(1)
        ids, positions = torch.tensor([[one.generated[-1]]]), torch.tensor([[one.position]])
        hidden = model.hidden(ids, positions, OraclePass(one))
        expected.append(model.logits(hidden[:, -1])[0])
    rows, logits = steps.step(batch)
    assert sorted(map(id, batch)) == sorted(id(one) for one in rows if one)
    for one, logits_alone in zip(batch, expected, strict=True):
        own = logits[[row is one for row in rows].index(True)]
        torch.testing.assert_close(own, logits_alone, rtol=1e-3, atol=1e-3)
        one.tail.extend(1)
        one.twin.extend(1)
        torch.testing.assert_close(one.tail.rows(0), one.twin.rows(0), rtol=1e-3, atol=1e-4)
        one.generated.append(int(logits_alone.argmax()))


def test_replayed_steps_equal_the_oracle_while_sequences_grow_join_and_leave(
    model: LanguageModel,
) -> None:
    one, other, empty = view(model, 1, 40, 7), view(model, 20, 3, 90), view(model, 40, 0, 1)
    # The second's buffer is full two steps on.
    a, b, c = asked(model, one, 5, num_lead=4), asked(model, other, 62), asked(model, one, 1)
    steps = DeviceSteps(model, TapeCapture())
    for _ in range(3):
        check_step(steps, model, [a, b, c])
    assert b.tail.buffer.shape[3] > 64
    d, e = asked(model, empty, 9), asked(model, other, 33)
    for batch in ([c, a, d], [d, c, e, b]):
        check_step(steps, model, batch)
    assert steps.counts == StepCounts(replayed=3, launched=2, graphs_failed=0)


def test_contexts_of_several_forms_are_parts_of_one_step(model: LanguageModel) -> None:
    kinds: tuple[CodeKind | None, ...] = (None, "int8")
    batch = [asked(model, view(model, n, 9, 20, kind=kind), n + 2) for n, kind in enumerate(kinds)]
    steps = DeviceSteps(model, TapeCapture())
    for _ in range(3):
        check_step(steps, model, batch)
    assert steps.counts == StepCounts(replayed=1, launched=2, graphs_failed=0)


def test_windows_see_as_far_in_a_replayed_step() -> None:
    model = small_model("gemma3")
    # A window of 48 tokens ends within the tail of one that has more.
    batch = [asked(model, view(model, 5, 30, 12), 46)]
    steps = DeviceSteps(model, TapeCapture())
    for _ in range(3):
        check_step(steps, model, batch)
    assert steps.counts.replayed == 1


def test_what_is_launched_does_not_depend_on_contents(model: LanguageModel) -> None:
    names = []
    for lengths, tokens in (((1, 0), (1,)), ((70, 30), (70, 130))):
        context = view(model, 7, *lengths)
        other = view(model, 9, *lengths)
        batch = [asked(model, (context, other)[n % 2], count) for n, count in enumerate(tokens)]
        for one in batch:
            one.tail.reserve(1)
        # As many as the larger batch, whatever the smaller one has.
        parts = parts_of(model, batch * (2 // len(batch)))
        step = DeviceStep(model, [part.shape for part in parts])
        step.prepare([batch])
        capture = TapeCapture()
        capture(step.run)
        names.append(capture.tapes[0].names)
    assert names[0] == names[1]
    assert any("attend_items" in name for name in names[0])


class BakedLengths(DeviceStep):
    """A step whose tails have the lengths that they had when it was captured."""

    def run(self) -> Tensor:
        for place, (_, tail, _) in enumerate(self._described):
            self._each[2, place].fill_(tail.tokens + 1)
        return super().run()


class BakedToken(DeviceStep):
    """A step that reads the token of its capture again and again."""

    def run(self) -> Tensor:
        self._each[0].fill_(self.token)
        return super().run()

    def prepare(self, parts: list[list[Asked]]) -> list[Asked | None]:
        self.token = parts[0][0].generated[-1]
        return super().prepare(parts)


class Asking(DeviceStep):
    """A step that wants to know something of the device."""

    def run(self) -> Tensor:
        return super().run() + 0 * self._each[0].sum().item()


class FromHost(DeviceStep):
    """A step that brings a number of its own."""

    def run(self) -> Tensor:
        return super().run() + torch.tensor([0.0])


@pytest.mark.parametrize("kind", [BakedLengths, BakedToken, Asking, FromHost])
def test_a_step_that_is_not_what_it_was_captured_for_is_never_replayed(
    kind: Callable[..., DeviceStep], model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep_service.engine.graphs.DeviceStep", kind)
    held: list[int] = []
    one = asked(model, view(model, 3, 30, 9), 6)
    steps = DeviceSteps(model, TapeCapture(), held.append)
    for token in (3, 120):
        one.generated.append(token % VOCABULARY)
        check_step(steps, model, [one])
    assert steps.counts == StepCounts(replayed=0, launched=2, graphs_failed=1)
    assert sum(held) == 0


def test_contexts_and_tails_are_held_for_one_step_and_let_go_of_at_the_end(
    model: LanguageModel,
) -> None:
    steps = DeviceSteps(model)
    left, stays = asked(model, view(model, 3, 3, 9), 6), asked(model, view(model, 5, 3, 9), 6)
    check_step(steps, model, [left, stays])
    kept = [weakref.ref(left.tail.buffer), weakref.ref(stays.tail.buffer)]
    check_step(steps, model, [stays])
    del left
    assert kept[0]() is None
    steps.clear()
    del stays
    assert kept[1]() is None


def test_a_step_is_one_copy_there_and_one_back(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[int] = []
    back: list[int] = []

    def fill(target: Tensor, values: Tensor) -> None:
        there.append(len(values))
        target.copy_(values)

    def to_host(values: Tensor) -> Tensor:
        back.append(len(values))
        return values

    # It would run its self-test, which others do.
    monkeypatch.setattr("kvkeep_service.engine.decode.uses_triton", lambda _: True)
    monkeypatch.setattr(device_step, "fill", fill)
    monkeypatch.setattr(transfer, "to_host", to_host)
    drawn = SequenceOptions(9, sampling=SamplingOptions(temperature=1.0, seed=1))
    batch = []
    for options in (SequenceOptions(9), drawn):
        one = sequence(model, view(model, 2, 5, 6), [1, 2], options)
        one.tail.append(torch.randn_like(one.tail.buffer[:, :, :, :2]))
        one.generated.append(3)
        batch.append(one)
    steps = kept_between_steps(model, GraphOptions())
    assert isinstance(steps, DeviceSteps)
    for _ in range(2):
        assert all(isinstance(text, str) for text in decode_step(model, batch, steps))
    assert [len(one.generated) for one in batch] == [3, 3]
    # Who decodes over what is copied when that changes; token, position and length every time.
    assert there[0] > there[1] == 4 * 2
    # Of the greedy one which logit is the highest, of the other all of them too.
    assert back == [2 * 2 + VOCABULARY] * 2
