"""What a build needs in memory, known before it starts."""

import torch

from kvkeep_service.engine.model import LanguageModel

_REPEAT_TOKENS = 2048 + 128
"""The longest input that a policy reads beside the document: a chunk and what asks to repeat it."""
_BYTES_PER_ROW = 4 + 4 + 8 + 5 + 40
"""A policy's score, its copy with the prefix, the position of a row that may stay, its cluster and
what is lost with it; and what ranking rows takes meanwhile."""
_CLUSTERING_COPIES = 8
"""Of one head's keys or values in fp32, while rows that are alike are found."""


def build_bytes(model: LanguageModel, num_tokens: int) -> int:
    """Most bytes that a build of ``num_tokens`` tokens holds: full cache, scratch of scoring.

    That scratch is one layer's: what a repeat input sees of the document, and its own rows. Kept
    rows take the place of the full cache, layer by layer. Activations of a slice, which do not
    grow with the document, are not counted.
    """
    shape = model.shape
    rows = shape.num_layers * shape.num_kv_heads * num_tokens
    seen = num_tokens + min(num_tokens, _REPEAT_TOKENS)
    scratch = 2 * shape.num_kv_heads * seen * shape.head_dim * model.dtype.itemsize
    clustering = _CLUSTERING_COPIES * num_tokens * shape.head_dim * torch.float32.itemsize
    others = max(scratch, clustering) + _BYTES_PER_ROW * rows
    return shape.full_bytes(num_tokens, model.dtype) + others
