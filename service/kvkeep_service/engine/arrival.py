"""Layers on their way into a context's buffers: told by the event loop, awaited by the engine."""

import threading
from collections.abc import Callable

_LAYER_SECONDS = 30.0


class NotYet(Exception):
    """There is other work, or a layer takes long: the forward is given up, to be begun again."""


class LayerArrival:
    """Which layers of a context are verified, in order; or why no more of them will be.

    Safe in any thread. Only ``wait`` blocks.
    """

    def __init__(self, num_layers: int) -> None:
        """No layer is there yet."""
        self._num_layers = num_layers
        self._num_arrived = 0
        self._error: BaseException | None = None
        self._is_interrupted = False
        self._listeners: list[Callable[[], None]] = []
        self._news = threading.Condition()

    @property
    def is_settled(self) -> bool:
        """Whether ``wait`` will never block: every layer is there, or none will be any more."""
        with self._news:
            return self._is_settled

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call something, in whatever thread, as soon as ``is_settled``; now, if it is."""
        with self._news:
            if not self._is_settled:
                self._listeners.append(call)
                return
        call()

    def arrived(self, layer: int) -> None:
        """This layer and all before it are verified."""
        with self._news:
            self._num_arrived = layer + 1
        self._tell()

    def fail(self, error: BaseException) -> None:
        """The layers that are not there will not come. Changes nothing once all have come."""
        with self._news:
            if self._num_arrived < self._num_layers:
                self._error = error
        self._tell()

    def interrupt(self) -> None:
        """Give up the wait of now, or the next one, until ``resume``."""
        with self._news:
            self._is_interrupted = True
            self._news.notify_all()

    def resume(self) -> None:
        """Let ``wait`` block again."""
        with self._news:
            self._is_interrupted = False

    def wait(self, layer: int) -> None:
        """Return once a layer may be read.

        Raises: NotYet when interrupted, or after half a minute; whatever ended the load.
        """
        with self._news:
            self._news.wait_for(lambda: self._is_decided(layer), _LAYER_SECONDS)
            if self._num_arrived > layer:
                return
            if self._error is not None:
                raise self._error
            raise NotYet

    @property
    def _is_settled(self) -> bool:
        return self._error is not None or self._num_arrived == self._num_layers

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()
            listeners = self._listeners if self._is_settled else []
            if listeners:
                self._listeners = []
        for call in listeners:
            call()

    def _is_decided(self, layer: int) -> bool:
        return self._num_arrived > layer or self._error is not None or self._is_interrupted
