"""Plain transformers, as a user would run it: the denominator of every ratio."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvkeep_service.engine.gguf import quiet_loading

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Generated:
    """A greedy answer, the seconds to its first token, and the seconds of each later one."""

    token_ids: list[int]
    first_token_s: float
    step_s: float


class StockModel:
    """The stock model with its default attention (torch's SDPA)."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        """Load the same weights that the engine runs."""
        with quiet_loading():
            # Its class is chosen at run time.
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation="sdpa"
            )
        self._model: Any = model.eval()

    def prefill(self, ids: Tensor, chunk_tokens: int | None) -> None:
        """Read ids [1, tokens] into a cache: in one forward, or in chunks. No logits."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            for piece in ids.split(chunk_tokens or ids.shape[1], dim=1):
                self._model.model(input_ids=piece, cache=cache, use_cache=True)

    def step_over(self, tokens: int) -> Callable[[], None]:
        """What reads one more token after a cache of ``tokens`` random rows, which it makes."""
        cache = self._random_cache(tokens)
        token = torch.tensor([[100]])

        def step() -> None:
            self._model(input_ids=token, past_key_values=cache, use_cache=True)

        return step

    def answer_over(self, tokens: int, question_tokens: int, answer_tokens: int) -> float:
        """Seconds of ``generate`` for one question after a full cache of random rows.

        Making the cache is not counted: it is read once, and used by every question.
        """
        cache = self._random_cache(tokens)
        ids = torch.randint(100, 20_000, (1, tokens + question_tokens))
        started = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=answer_tokens,
            do_sample=False,
            eos_token_id=[],
        )
        return time.perf_counter() - started

    def _random_cache(self, tokens: int) -> DynamicCache:
        config = self._model.config
        heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            k, v = torch.randn(2, 1, heads, tokens, head_dim).to(self._model.dtype)
            cache.update(k, v, layer)
        return cache

    def generate(self, ids: Tensor, tokens: int, chunk_tokens: int | None) -> Generated:
        """Answer ids [1, tokens] greedily with ``generate``, never stopping early.

        ``chunk_tokens``: as in ``prefill``; ids are read from the start, nothing is re-used.
        """
        clock = _Clock()
        started = time.perf_counter()
        out: Any = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=[],
            prefill_chunk_size=chunk_tokens,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        first, last = clock.times[0], clock.times[-1]
        return Generated(
            out[0, ids.shape[1] :].tolist(), first - started, (last - first) / (tokens - 1)
        )


class _Clock(StoppingCriteria):
    """Stops nothing: notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Note the time. Returns [batch] bool, all false."""
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)
