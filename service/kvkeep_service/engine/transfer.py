"""What crosses between host and device at a step: one copy there, and one back.

A copy from page-locked memory is queued like any other work of the device, and the host goes on.
Only ``to_host`` waits, at the end of a step, for everything that was queued before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Found:
    """What a sequence's logits came to, on the host.

    ``best``: the id of the highest. ``logits``: all of them, [vocabulary] fp32, where these were
    asked for.
    """

    best: int
    is_finite: bool
    logits: Tensor | None


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; the host does not wait for the copy."""
    if device.type != "cuda":
        return values.to(device)
    # The allocator gives this memory to nobody else before the copy is done.
    return values.pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, values: Tensor) -> None:
    """Copy a tensor of the host to a buffer of the device; the host does not wait for it.

    What the device was told to do before still finds what the buffer held then.
    """
    pinned = values.pin_memory() if target.device.type == "cuda" else values
    target.copy_(pinned, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """A tensor of the device on the host. Waits for everything that the device has to do."""
    if values.device.type != "cuda":
        return values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return copy


def found(logits: Tensor, are_whole: Sequence[bool]) -> list[Found]:
    """What each row of [rows, vocabulary] fp32 logits came to, in one transfer.

    ``are_whole``: of which rows all logits are wanted.
    """
    count, vocabulary = logits.shape
    best, is_finite = logits.argmax(dim=1), torch.isfinite(logits).all(dim=1)
    numbers = torch.cat((best, is_finite)).int()
    wanted = [row for row, is_whole in zip(logits.unbind(), are_whole, strict=True) if is_whole]
    host = to_host(torch.cat((numbers, *(row.view(torch.int32) for row in wanted))))
    bests, finites = host[: 2 * count].view(2, count).tolist()
    whole = iter(host[2 * count :].view(torch.float32).split(vocabulary))
    return [
        Found(best, bool(is_finite), next(whole) if is_whole else None)
        for best, is_finite, is_whole in zip(bests, finites, are_whole, strict=True)
    ]
