"""Token ids to text while they arrive: cut at UTF-8 boundaries, ended at stop strings."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """One answer's text. The pieces it hands out, joined, are the whole answer.

    A piece never ends inside a character, and never shows the beginning of what turns out to
    be a stop string; special tokens are left out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        """``stop``: non-empty strings that end the answer and are not part of it."""
        self._tokenizer = tokenizer
        self._stream: Any = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded_length = 0
        self._held = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is now certain, which may be empty."""
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token_id) or ""
        self._decoded_length += len(piece)
        return self._release(piece)

    def finish(self) -> str:
        """The rest: text held back for a stop string, and bytes that never became a character."""
        if self.is_stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        certain = self._release(whole[self._decoded_length :])
        # Nothing is held any more when this last piece completed a stop string.
        rest, self._held = self._held, ""
        return certain + rest

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        certain, self._held = text[: len(text) - held], text[len(text) - held :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
