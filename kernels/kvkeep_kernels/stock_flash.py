"""Torch's flash attention of a GPU, with its log-sum-exp, once it was right on that GPU.

Where it is not, whole logits are made instead (``cpu_attention.flash``), and ``failure`` says why.
"""

from functools import cache

import torch
from torch import Tensor

_TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""What is allowed on outputs of about 1; 16-bit dtypes share a kernel, fp32 has its own."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp [batch, heads, rows] fp32, of [batch, heads, rows, head_dim]."""
    if q.dtype == torch.float32:
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal, scale=scale
        )
        # Its rows are padded to whole warps.
        return out, lse[..., : q.shape[2]]
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, False, scale=scale
    )
    return found[0], found[1]


@cache
def failure(device: torch.device) -> str | None:
    """Why torch's kernels do not serve a device, or nothing. The first answer waits for it."""
    if device.type != "cuda":
        return f"flash attention needs a GPU, not {device.type}"
    for dtype, tolerance in _TOLERANCES.items():
        try:
            error = _error(device, dtype)
        # Kernels that are not built in, or not for this GPU, fail in ways of their own.
        except Exception as raised:  # noqa: BLE001
            return f"{dtype}: {type(raised).__name__}: {raised}"
        # Not "error > tolerance", which a NaN would pass.
        if not error <= tolerance:
            return f"{dtype}: error {error:.3g}, allowed {tolerance}"
    return None


def _error(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference from attention in fp64, causal and not, over shared keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 33, 64, generator=generator).to(device, dtype)
    k, v = torch.randn(2, 2, 1, 33, 64, generator=generator).to(device, dtype).unbind(0)
    k, v = k.expand(q.shape), v.expand(q.shape)
    differences = []
    for is_causal in (False, True):
        logits = q.double() @ k.double().transpose(2, 3) * 0.125
        if is_causal:
            future = torch.ones(33, 33, dtype=torch.bool, device=device).triu(1)
            logits.masked_fill_(future, -torch.inf)
        out, lse = attend(q, k, v, 0.125, is_causal=is_causal)
        expected = torch.softmax(logits, -1) @ v.double()
        differences += [out - expected, lse - torch.logsumexp(logits, -1)]
    return float(torch.cat([part.flatten() for part in differences]).abs().max())
