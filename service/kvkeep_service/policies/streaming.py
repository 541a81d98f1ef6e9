"""Streaming: the first tokens, and then the most recent ones, whatever they say.

Source: arXiv 2309.17453, section 3.2 (attention sinks with a rolling cache). Positions are not
renumbered: here no row is turned after it was stored.
"""

from collections.abc import Generator
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep_service.engine.build import Parameters
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens

NUM_SINKS = 4


class Streaming:
    """The policy: the same rows in every head. The prefix, never evicted, has most sinks."""

    name = "streaming"
    version = 1
    repeats = False
    watcher = None
    sample = None
    parameters: ClassVar[Parameters] = {"sinks": NUM_SINKS}

    def score(
        self, model: LanguageModel, cache: FullCache, document: DocumentTokens
    ) -> Generator[float, None, Tensor]:
        """As ``ScoringPolicy.score``; the score of a row is its position, exact in fp32."""
        del cache
        position = torch.arange(document.num_prefix, document.num_tokens, device=model.device)
        order = torch.where(position < NUM_SINKS, document.num_tokens, position).float()
        yield 1.0
        return order.expand(len(model.shape.evicting), model.shape.num_kv_heads, -1)
