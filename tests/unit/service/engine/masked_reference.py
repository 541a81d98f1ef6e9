"""A dense model with evicted rows masked out: what eviction must equal, by another road.

Stock transformers forwards with a stock ``DynamicCache`` and plain softmax attention; only the
mask is ours. Nothing here uses the engine or the kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

_NAME = "masked-reference"


class MaskedReference:
    """A stock model that sees, per layer and KV head, only some of the first N positions.

    ``visible[layer]`` is bool [kv heads, N]; None sees everything. A sliding window hides what it
    hides besides. After a forward, ``seen`` holds each layer's rotated queries and all its keys,
    ``scales`` what their products are multiplied by, ``values`` all its values, and ``read`` the
    hidden states that its attention took.
    """

    def __init__(self, stock: PreTrainedModel) -> None:
        self._model = stock
        # Without the configuration it keeps every key of a layer with a window too.
        self._cache = DynamicCache()
        self.visible: list[Tensor] | None = None
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.scales: dict[int, float] = {}
        self.values: dict[int, Tensor] = {}
        self.read: dict[int, Tensor] = {}
        for layer, block in enumerate(stock.model.layers):
            block.input_layernorm.register_forward_hook(self._keep(layer))

    def forward(self, ids: list[int], position: int) -> Tensor:
        """Append tokens from ``position`` on; returns their logits [tokens, vocabulary]."""
        positions = torch.arange(position, position + len(ids))[None]
        with self._installed(), torch.inference_mode():
            out = self._model(
                torch.tensor([ids]), position_ids=positions, cache=self._cache, use_cache=True
            )
        logits: Tensor = out.logits[0]
        return logits

    def projection(self, layer: int) -> Tensor:
        """The output projection of a layer: [hidden, heads * head_dim]."""
        weight: Tensor = self._model.model.layers[layer].self_attn.o_proj.weight
        return weight

    def forget(self, tokens: int) -> None:
        """Drop the last tokens from the cache."""
        self._cache.crop(-tokens)

    def _keep(self, layer: int) -> Callable[[Any, Any, Tensor], None]:
        def hook(_: Any, __: Any, out: Tensor) -> None:
            self.read[layer] = out[0]

        return hook

    @contextmanager
    def _installed(self) -> Iterator[None]:
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation(_NAME)
        try:
            yield
        finally:
            self._model.set_attn_implementation(before)

    def _attend(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        _mask: None,
        scaling: float,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        layer, group_size = module.layer_idx, q.shape[1] // k.shape[1]
        self.scales[layer] = scaling
        self.seen[layer], self.values[layer] = (q[0], k[0]), v[0]
        logits = q @ k.repeat_interleave(group_size, dim=1).transpose(2, 3) * scaling
        tokens, total = q.shape[2], k.shape[2]
        earlier = total - tokens
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        logits[..., earlier:].masked_fill_(future, -torch.inf)
        if sliding_window is not None:
            age = torch.arange(earlier, total)[:, None] - torch.arange(total)
            logits.masked_fill_(age >= sliding_window, -torch.inf)
        if self.visible is not None:
            hidden = ~self.visible[layer].repeat_interleave(group_size, dim=0)
            logits[..., : hidden.shape[1]].masked_fill_(hidden[None, :, None], -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        out = weights @ v.repeat_interleave(group_size, dim=1)
        return out.transpose(1, 2), None
