"""How our kernels get into a stock transformers model: one registered attention function.

No model file is patched or copied. The model's forward carries a keyword argument, the
*attention pass*, down to every layer; the pass knows what this forward is for (prefill, repeat,
question, decode), owns the KV it appends to, and calls the kernels.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "kvkeep"
PASS_ARGUMENT = "kvkeep_pass"


class AttentionPass(Protocol):
    """What one forward does in each layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Append the new rows where they belong and attend.

        Shapes: q [batch, num_q_heads, tokens, head_dim]; k, v [batch, num_kv_heads, tokens,
            head_dim], rotated. Returns q's shape.
        """
        ...


def register_attention() -> None:
    """Make ``attn_implementation="kvkeep"`` known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, _attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **arguments: Any,
) -> tuple[Tensor, None]:
    attention_pass: AttentionPass = arguments[PASS_ARGUMENT]
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention_pass.attend(layer, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are never built: a pass knows what is visible."""
    return
