"""A forward that hands back control after every layer, for work that must not hold others up.

Between two layers other forwards of the same model may run. What a layer is handed is what the
model's own ``forward`` hands it; a test holds the two to the same bits for every architecture.
"""

from typing import Any

import torch
from torch import Tensor

from kvkeep_service.engine.attention import PASS_ARGUMENT, AttentionPass


class LayeredForward:
    """New tokens on their way through the layers. Belongs to one thread at a time."""

    def __init__(self, decoder: Any, token_ids: Tensor, positions: Tensor) -> None:
        """Embed the tokens; ``decoder`` is the transformers model without its head.

        Shapes: token_ids, positions [batch, tokens] int64, on the decoder's device.
        """
        self._decoder = decoder
        self._positions = positions
        with torch.inference_mode():
            self._hidden: Tensor = decoder.embed_tokens(token_ids)
            self._rotations = _rotations(decoder, self._hidden, positions)

    def run_layer(self, layer: int, attention: AttentionPass) -> None:
        """Take the tokens through the next layer. Modifies itself, and what the pass owns."""
        with torch.inference_mode():
            block = self._decoder.layers[layer]
            self._hidden = block(self._hidden, **self._arguments(layer, attention))

    def finish(self) -> Tensor:
        """Last hidden states [batch, tokens, hidden], behind the last norm."""
        with torch.inference_mode():
            states: Tensor = self._decoder.norm(self._hidden)
        return states

    def attend_only(self, layer: int, attention: AttentionPass) -> None:
        """The last layer of a forward whose hidden states nobody reads: no more than attention.

        Modifies what the pass owns.
        """
        with torch.inference_mode():
            block = self._decoder.layers[layer]
            block.self_attn(
                hidden_states=block.input_layernorm(self._hidden),
                **self._arguments(layer, attention),
            )

    def read_by(self, layer: int) -> Tensor:
        """What the next layer's attention reads: [batch, tokens, hidden], behind its first norm."""
        with torch.inference_mode():
            read: Tensor = self._decoder.layers[layer].input_layernorm(self._hidden)
        return read

    def _arguments(self, layer: int, attention: AttentionPass) -> dict[str, Any]:
        return {
            "attention_mask": None,
            "position_ids": self._positions,
            "position_embeddings": self._rotations[layer],
            PASS_ARGUMENT: attention,
        }


def _rotations(decoder: Any, hidden: Tensor, positions: Tensor) -> list[Any]:
    """Of every layer, by how much positions turn queries and keys: cosines and sines."""
    rotate = decoder.rotary_emb
    # Where layers slide, they may turn by other angles than those that see everything.
    if hasattr(rotate, "layer_types"):
        found = {kind: rotate(hidden, positions, kind) for kind in rotate.layer_types}
        return [found[kind] for kind in decoder.config.layer_types]
    return [rotate(hidden, position_ids=positions)] * len(decoder.layers)
