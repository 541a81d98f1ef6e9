"""Marks around control tokens in what users wrote, so that they are tokenised as text.

A template is rendered with marked texts; what stands between marks is text in the rendering too.
"""

import re
from collections.abc import Iterable

# Private-use characters: no template writes them, and user text is cleared of them.
_START, _END = "\U000f0000", "\U000f0001"
_HOLE_START, _HOLE_END = "\U000f0002", "\U000f0003"
_PRIVATE = re.compile(f"[{_START}-{_HOLE_END}]")
_MARKED = re.compile(f"{_START}(.*?){_END}", re.DOTALL)


def hole(name: str) -> str:
    """A text that no user can write, to be looked for in a rendering."""
    return f"{_HOLE_START}{name}{_HOLE_END}"


def cleared(text: str) -> str:
    """User text without characters that are ours: a space stands for each."""
    return _PRIVATE.sub(" ", text)


def unmarked(marked: str) -> str:
    """The text without marks; a mark that lacks its other half stays."""
    return _MARKED.sub(r"\1", marked)


def parts(marked: str) -> list[str]:
    """Cut at the marks: what stands at an odd place is text whatever it looks like."""
    return _MARKED.split(marked)


class ControlTokens:
    """The control tokens of one model, found in texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        """Where one token begins another, the longest is found."""
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def marked(self, text: str) -> str:
        """Clear a user's text and mark the control tokens in it."""
        return self._pattern.sub(f"{_START}\\g<0>{_END}", cleared(text))

    def count(self, text: str) -> int:
        """How many control tokens a text names."""
        return sum(1 for _ in self._pattern.finditer(text))
