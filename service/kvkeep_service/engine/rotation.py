"""Rope as a matrix: turning queries back to where they were before it, and its mean."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a model multiplies queries and keys by at some positions.

    Shapes: cos, sin [positions, rotated] fp32, as a transformers rotary embedding gives them:
    dimension i is turned with dimension i + rotated / 2, and dimensions past ``rotated`` stay.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def none(cls, positions: int, head_dim: int, device: torch.device) -> "Rotation":
        """That of a layer without rope: nothing moves."""
        size = (positions, head_dim)
        return cls(torch.ones(size, device=device), torch.zeros(size, device=device))

    def undo(self, rotated: Tensor) -> Tensor:
        """What was rotated: [heads, positions, head_dim] fp32, position by position."""
        width = self.cos.shape[1]
        turned, rest = rotated[..., :width], rotated[..., width:]
        # Turning back is the transpose, but for factors that some kinds of rope scale by.
        back = (turned * self.cos - _half_turn(turned) * self.sin) / (self.cos**2 + self.sin**2)
        return torch.cat([back, rest], dim=-1)

    def mean_matrix(self, head_dim: int) -> Tensor:
        """The transpose of the mean rotation matrix, [head_dim, head_dim]: for rows, x @ it."""
        width = self.cos.shape[1]
        unit = torch.eye(width, device=self.cos.device)
        whole = torch.eye(head_dim, device=self.cos.device)
        cos, sin = self.cos.mean(dim=0), self.sin.mean(dim=0)
        whole[:width, :width] = unit * cos + _half_turn(unit) * sin
        return whole


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
