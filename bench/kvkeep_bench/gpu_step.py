"""A whole decoding step of a model on a GPU: replayed from a graph, against launched.

Needs the service's packages besides torch and triton. Weights and caches are random, of eight
layers of Llama-3.1-8B: what a launch costs does not depend on what is multiplied.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep_bench.gpu_values import LLAMA_8B, Shape, Values
from kvkeep_service.engine.architecture import check_supported
from kvkeep_service.engine.attention import ATTENTION_NAME, register_attention
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.graphs import CudaCapture, DeviceSteps
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.transfer import found

_RATIO = 0.3
_TAIL_TOKENS = 64
# A step is captured, then checked; and one to spare.
_WARM_UPS = 3
_REPEATS = 30


@dataclass
class Answer:
    """A sequence that goes on for ever with one token."""

    context: ContextView
    tail: Tail
    generated: list[int] = field(default_factory=lambda: [1])

    @property
    def position(self) -> int:
        """As ``Sequence.position``."""
        return self.context.num_tokens + self.tail.tokens


def step_lines(device: torch.device, *, small: bool) -> Iterator[str]:
    """Rows of a table: milliseconds of a step from the host's point of view, its wait included."""
    shape = Shape("tiny", 1, 2, 64) if small else LLAMA_8B
    model = _model(device, shape, num_layers=1 if small else 8)
    values = Values(device, model.dtype, seed=3)
    for tokens in (64,) if small else (8192, 32768):
        for batch, is_shared in ((1, True),) if small else ((1, True), (16, True), (16, False)):
            contexts = [_context(model, shape, values, tokens) for _ in range(batch)]
            if is_shared:
                contexts = contexts[:1] * batch
            launched, _ = _median(DeviceSteps(model), _answers(model, contexts))
            capture = CudaCapture(device) if device.type == "cuda" else None
            captured, counts = _median(DeviceSteps(model, capture), _answers(model, contexts))
            kind = "" if batch == 1 else " shared" if is_shared else " distinct"
            yield (
                f"| {tokens} | {batch}{kind} | {launched:.3f} | {captured:.3f} "
                f"| {captured / launched:.2f} | {counts} |"
            )


def _median(steps: DeviceSteps, answers: list[Answer]) -> tuple[float, str]:
    times = []
    for repeat in range(_WARM_UPS + _REPEATS):
        started = time.perf_counter()
        for one in answers:
            one.tail.reserve(1)
        rows, logits = steps.step(answers)
        picks = found(logits, [False] * len(rows))
        for one, pick in zip(rows, picks, strict=True):
            if one is not None:
                one.generated.append(pick.best)
                one.tail.extend(1)
        if repeat >= _WARM_UPS:
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times), (
        f"{steps.counts.replayed} replayed, {steps.counts.launched} launched, "
        f"{steps.counts.graphs_failed} failed"
    )


def _model(device: torch.device, shape: Shape, num_layers: int) -> LanguageModel:
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=shape.num_q_heads * shape.head_dim,
        intermediate_size=14_336 if num_layers > 1 else 128,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131_072,
    )
    register_attention()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.device(device):
        stock = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    return LanguageModel(stock.eval(), check_supported("random", config))


def _context(model: LanguageModel, shape: Shape, values: Values, tokens: int) -> ContextView:
    lengths = values.lengths(shape, tokens, _RATIO)
    layers = tuple(values.context(shape, lengths) for _ in range(model.shape.num_layers))
    return ContextView(layers, tokens, _RATIO)


def _answers(model: LanguageModel, contexts: list[ContextView]) -> list[Answer]:
    answers = []
    for context in contexts:
        tail = Tail(model.shape, dtype=model.dtype, device=model.device)
        tail.reserve(_TAIL_TOKENS)
        tail.append(torch.randn_like(tail.buffer[:, :, :, :_TAIL_TOKENS]))
        answers.append(Answer(context, tail))
    return answers
