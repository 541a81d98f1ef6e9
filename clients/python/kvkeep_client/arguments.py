"""What is typed as an option of ``kvkeep put``, read into what the SDK takes.

All raise BadParameter, naming the option, what was typed and what is wanted.
"""

from collections.abc import Sequence
from typing import Literal

import typer

from kvkeep_client.models import ExpiresAfter


def ratio_or_auto(text: str | None) -> float | Literal["auto"] | None:
    """A number, or auto."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError as error:
        raise _wrong("--ratio", text, "neither a number nor auto") from error


def spans(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Ranges of characters, START:END each, END being one past the last."""
    found: list[tuple[int, int]] = []
    for text in texts:
        start, _, end = text.partition(":")
        if not (start.isdecimal() and end.isdecimal() and int(start) < int(end)):
            raise _wrong("--protect", text, "not START:END, two character positions in order")
        found.append((int(start), int(end)))
    return found


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Metadata, KEY=VALUE each."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise _wrong("--metadata", text, "not KEY=VALUE")
        if key in found:
            raise _wrong("--metadata", text, f"the second value of {key}")
        found[key] = value
    return found


def expiry(seconds: int | None) -> ExpiresAfter | None:
    """So many seconds after the last question; 0 is never."""
    return ExpiresAfter(seconds) if seconds else None


def _wrong(option: str, text: str, reason: str) -> typer.BadParameter:
    return typer.BadParameter(f"{text!r} is {reason}", param_hint=option)
