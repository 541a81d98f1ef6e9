"""Decode steps on a GPU: replayed from a graph once one is captured, and proved right first.

The first step of a shape runs as it is, and is captured afterwards. The second runs as it is too,
and its graph beside it, with contents that were not there when it was captured: only when both
came to the same are later steps replayed. Whatever goes wrong with a graph, answers go on without
any for as long as the process lives.
"""

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol

import structlog
import torch
from torch import Tensor

from kvkeep_kernels.step_tables import StepShape
from kvkeep_service.engine.cache import Tail
from kvkeep_service.engine.device_step import Decoding, DeviceStep, One, parts_of
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine_counts import StepCounts
from kvkeep_service.telemetry import where

MOST_SHAPES: Final = 24
"""Shapes whose buffers and graphs are kept; the least recently used goes."""

# Of the length of the logits: the same kernels, but that a library may choose another product.
_TOLERANCES: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

# Of each tail: all of them may be gigabytes, and a graph that is wrong writes where one was.
_COMPARED_ROWS: Final = 16

_log = structlog.get_logger(__name__)


class GraphDiffers(Exception):
    """A graph did not do what its step did, by so much of the logits' length."""

    def __init__(self, difference: float) -> None:
        super().__init__(f"its logits differ by {difference:.3g} of their length")
        self.difference = difference


class Captured(NamedTuple):
    """A graph: what runs it again, what it writes each time, and what memory it holds."""

    replay: Callable[[], None]
    logits: Tensor
    size_bytes: int


class Capture(Protocol):
    """What records the device's work of a call. Everything in it has run before."""

    def __call__(self, run: Callable[[], Tensor]) -> Captured:
        """Record the work, doing it or not. Raises: whatever keeps it from being captured."""
        ...


class CudaCapture:
    """Graphs of one GPU, which share the memory of what they compute in between."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is done yet."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        # Which torch names by a type that it does not export.
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> Captured:
        """As ``Capture.__call__``. Waits for the device."""
        # Entered again around all of it: a capture that fails does not leave its own stream.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream()):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
                self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            # Other threads copy rows and allocate meanwhile, which is none of this graph's work.
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                logits = run()
            size_bytes = torch.cuda.memory_reserved() - before
        return Captured(graph.replay, logits, max(0, size_bytes))


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Whether a GPU captures graphs, and who is told of their memory on the engine's thread.

    ``on_held`` takes bytes that graphs have taken, or, below 0, given back; it returns at once.
    """

    is_on: bool = True
    on_held: Callable[[int], None] = lambda _: None


def _end_of(tail: Tail) -> Tensor:
    """The last rows of a tail and the one behind them, as a view."""
    last = tail.length + 1
    return tail.buffer[:, :, :, max(0, last - _COMPARED_ROWS) : last]


@dataclass(slots=True)
class _Shaped:
    """What is kept of one shape."""

    step: DeviceStep
    graph: Captured | None = None
    is_checked: bool = False


class Logits(NamedTuple, Generic[One]):
    """Logits [rows, vocabulary] fp32, overwritten by the next step, and whose each row is."""

    rows: list[One | None]
    logits: Tensor


class DeviceSteps:
    """Steps of batches of any shape. Of the engine's thread.

    Contexts and tails of the last step are held until the next one, or ``clear``.
    """

    def __init__(
        self,
        model: LanguageModel,
        capture: Capture | None = None,
        on_held: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``capture``: None runs every step as it is.

        ``on_held`` is called with the bytes that a graph has taken, or, below 0, given back.
        """
        self._model = model
        self._capture = capture
        self._on_held = on_held
        self._shaped: dict[tuple[StepShape, ...], _Shaped] = {}
        self._last: _Shaped | None = None
        self._replayed = self._launched = self._failed = 0

    @property
    def counts(self) -> StepCounts:
        """Since the start. May be read from any thread."""
        return StepCounts(self._replayed, self._launched, self._failed)

    def step(self, sequences: Several[One]) -> Logits[One]:
        """Logits of every sequence's next token. Queues the work; does not wait for it.

        Modifies the buffers of the tails, which have room for one row more, not their counts.
        """
        parts = parts_of(self._model, sequences)
        shaped = self._of_shape(tuple(part.shape for part in parts))
        if self._last is not None and self._last is not shaped:
            self._last.step.forget()
        self._last = shaped
        members = [[sequences[index] for index in part.members] for part in parts]
        rows = shaped.step.prepare(members)
        return Logits(rows, self._logits(shaped, rows))

    def clear(self) -> None:
        """Let go of contexts and tails; graphs stay."""
        if self._last is not None:
            self._last.step.forget()
            self._last = None

    def _of_shape(self, shapes: tuple[StepShape, ...]) -> _Shaped:
        shaped = self._shaped.pop(shapes, None) or _Shaped(DeviceStep(self._model, shapes))
        self._shaped[shapes] = shaped
        if len(self._shaped) > MOST_SHAPES:
            self._drop_graph(self._shaped.pop(next(iter(self._shaped))))
        return shaped

    def _logits(self, shaped: _Shaped, rows: Several[Decoding | None]) -> Tensor:
        if shaped.graph is not None and shaped.is_checked:
            shaped.graph.replay()
            self._replayed += 1
            return shaped.graph.logits
        logits = shaped.step.run()
        self._launched += 1
        if self._capture is not None:
            try:
                if shaped.graph is None:
                    shaped.graph = self._capture(shaped.step.run)
                    self._on_held(shaped.graph.size_bytes)
                else:
                    self._check(shaped, shaped.graph, rows, logits)
            # Libraries, drivers and our own check fail in their own ways; each means the same here.
            except Exception as error:  # noqa: BLE001
                self._give_up(error)
        return logits

    def _check(
        self, shaped: _Shaped, graph: Captured, rows: Several[Decoding | None], logits: Tensor
    ) -> None:
        """Compare what a graph does with what its step has just done. Waits for the device.

        Leaves the ends of the tails as the step has left them, whatever the graph wrote there.
        """
        used = [number for number, one in enumerate(rows) if one is not None]
        tails = [_end_of(one.tail) for one in rows if one is not None]
        kept = [tail.clone() for tail in tails]
        try:
            for tail in tails:
                # The row that the graph is to write: were it not to, everything would be NaN.
                tail[:, :, :, -1] = torch.nan
            graph.replay()
            pairs = [(graph.logits[used], logits[used]), *zip(tails, kept, strict=True)]
            errors = [(found - wanted).norm() / wanted.norm() for found, wanted in pairs]
        finally:
            for tail, rows_before in zip(tails, kept, strict=True):
                tail.copy_(rows_before)
        if not bool(torch.isfinite(logits[used]).all()):
            # Some sequence is about to fail by itself; a later step shows what the graph is worth.
            return
        error = float(torch.stack(errors).max())
        # Not "error > tolerance", which a NaN would pass.
        if not error <= _TOLERANCES[self._model.dtype]:
            raise GraphDiffers(error)
        shaped.is_checked = True

    def _give_up(self, error: Exception) -> None:
        self._failed += 1
        self._capture = None
        for shaped in self._shaped.values():
            self._drop_graph(shaped)
        _log.warning(
            "decode_graphs_off",
            error=type(error).__name__,
            difference=error.difference if isinstance(error, GraphDiffers) else None,
            where=where(error),
            effect="until the server is started anew, steps are launched one kernel at a time",
        )

    def _drop_graph(self, shaped: _Shaped) -> None:
        if shaped.graph is not None:
            self._on_held(-shaped.graph.size_bytes)
            shaped.graph = None
