"""How long builds may run between two rounds of answers."""

import time

import torch

SHARE = 0.4
"""Of the time that a round's tokens took, what builds get before the next one."""


class BuildShare:
    """Counts the time of builds against what rounds of answers have earned for them.

    What a work item takes beyond it is owed, and later rounds pay for it: over time builds get
    their share and no more, and between two tokens lies never more than it and one work item.
    """

    def __init__(self, slice_seconds: float | None, device: torch.device) -> None:
        """``slice_seconds`` is earned by each round; None earns ``SHARE`` of its time."""
        self._slice_seconds = slice_seconds
        self._is_cuda = device.type == "cuda"
        self._left = 0.0
        self._since: float | None = None
        self.build_seconds = 0.0

    @property
    def is_used_up(self) -> bool:
        """Whether answers, if there are any, come first now."""
        return self._left <= 0.0

    def earn(self, read_seconds: float, decode_seconds: float) -> None:
        """A round of answers has ended. What was left of the last one is not saved up.

        Where a round gave tokens, the time in which it read new questions earns nothing: who
        waited for that would wait for a build in proportion, and then for the next questions.
        """
        seconds = decode_seconds or read_seconds
        earned = SHARE * seconds if self._slice_seconds is None else self._slice_seconds
        self._left = min(self._left, 0.0) + earned

    def resume(self) -> None:
        """A build computes from now on."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """It does no more, or answers may come in between: charge what it took."""
        if self._since is None:
            return
        if self._is_cuda:
            # What was launched is not computed yet, and the next token would wait for it.
            torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - self._since
        self._since = None
        self._left -= seconds
        self.build_seconds += seconds

    def forget(self) -> None:
        """Nobody asks: what builds take now is owed to nobody, and the first to come goes first."""
        self._left = 0.0
