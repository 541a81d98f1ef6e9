"""Random rows: what a policy must beat, the same ones whenever a document is built again."""

import struct
from collections.abc import Generator
from hashlib import sha256
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvkeep_service.engine.build import Parameters
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens

_BITS = 24
"""All that an fp32 in [0, 1) holds exactly."""


class Random:
    """The policy. Its seed is the digest of the token ids, which the cache's identity has too.

    Numbers are Philox's own bits, which numpy promises never to change: neither the version of a
    library nor the device changes what is kept.
    """

    name = "random"
    version = 1
    repeats = False
    watcher = None
    sample = None
    parameters: ClassVar[Parameters] = {"generator": "philox"}

    def score(
        self, model: LanguageModel, cache: FullCache, document: DocumentTokens
    ) -> Generator[float, None, Tensor]:
        """As ``ScoringPolicy.score``; one work item per layer."""
        del cache
        shape, total = model.shape, len(document.ids)
        num_layers = len(shape.evicting)
        scores = torch.empty(num_layers, shape.num_kv_heads, total, device=model.device)
        bits = np.random.Philox(key=_seed(document))
        for layer in range(num_layers):
            drawn = bits.random_raw(shape.num_kv_heads * total) >> np.uint64(64 - _BITS)
            numbers = torch.from_numpy(drawn.astype(np.float32) / 2**_BITS)
            scores[layer] = numbers.reshape(shape.num_kv_heads, total)
            yield (layer + 1) / num_layers
        return scores


def _seed(document: DocumentTokens) -> int:
    """A key of 128 bits."""
    ids = [*document.prefix_ids, *document.ids]
    return int.from_bytes(sha256(struct.pack(f"<{len(ids)}Q", *ids)).digest()[:16], "little")
