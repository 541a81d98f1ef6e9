"""What may go into a request: checked here, because only here the argument still has its name."""

import math
from collections.abc import Mapping, Sequence

from kvkeep_client.models import ExpiresAfter

_DEPTH_MAX = 100
# No field takes as large a number, and Python writes no number of more than 4,300 digits.
_INT_BITS_MAX = 1024


def plain(value: object, field: str) -> object:
    """The same value of what JSON knows: mappings become dicts, sequences lists.

    Raises: TypeError, ValueError, naming ``field`` and what is accepted.
    """
    return _plain(value, field, _DEPTH_MAX)


def asked_fields(question: object) -> dict[str, object]:
    """A question or a conversation, as the field it is sent in. Raises: TypeError."""
    if isinstance(question, str):
        return {"question": question}
    if not _is_list(question):
        raise TypeError(f"question: must be a text or a list of messages, not {_kind(question)}")
    return {"messages": plain(question, "messages")}


def list_of_texts(questions: object) -> object:
    """Several questions. Raises: TypeError."""
    if isinstance(questions, str):
        raise TypeError("questions: must be a list of texts, not one text: query asks one question")
    if not _is_list(questions):
        raise TypeError(f"questions: must be a list of texts, not {_kind(questions)}")
    return plain(questions, "questions")


def span_fields(spans: object) -> list[object]:
    """Half-open character spans as the API has them. Raises: TypeError."""
    if not isinstance(spans, Sequence) or isinstance(spans, str):
        raise TypeError(f"protect: must be a list of pairs (start, end), not {_kind(spans)}")
    fields: list[object] = []
    for index, span in enumerate(spans):
        if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 2:
            raise TypeError(f"protect.{index}: must be a pair (start, end), not {span!r}")
        start, end = (plain(item, f"protect.{index}") for item in span)
        fields.append({"start": start, "end": end})
    return fields


def expiry_fields(expires_after: object) -> dict[str, object] | None:
    """An expiry as the API has it; None is never. Raises: TypeError, ValueError."""
    if expires_after is None:
        return None
    if not isinstance(expires_after, ExpiresAfter):
        raise TypeError(
            f"expires_after: must be ExpiresAfter(seconds) or None, not {_kind(expires_after)}"
        )
    seconds = plain(expires_after.seconds, "expires_after.seconds")
    return {"anchor": expires_after.anchor, "seconds": seconds}


def mapping(value: object, field: str) -> dict[str, object]:
    """A mapping of names to values. Raises: TypeError, ValueError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{field}: must be a mapping of names to texts, not {_kind(value)}")
    return {name: plain(item, f"{field}.{name}") for name, item in value.items()}


def check_seconds(value: float | None, field: str) -> None:
    """Refuse a time that nothing would ever reach. Raises: TypeError, ValueError."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{field}: must be a number of seconds, not {_kind(value)}")
    if isinstance(value, int):
        _check_size(value, field)
    if not value >= 0:
        raise ValueError(f"{field}: must be 0 or more seconds, not {value}")


def url_text(value: object, field: str) -> str:
    """A text that an address can carry. Raises: TypeError, ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{field}: must be a text, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field}: a lone surrogate is not text") from error
    return value


def header_text(value: object, field: str) -> str:
    """A text that a header can carry, which is not empty. Raises: TypeError, ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{field}: must be a text, not {_kind(value)}")
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        raise ValueError(
            f"{field}: must be visible ASCII characters, at least one, with spaces only between"
        )
    return value


def _plain(value: object, field: str, depth: int) -> object:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        _check_size(value, field)
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{field}: must be a finite number, not {value}")
        return value
    if depth == 0:
        raise ValueError(f"{field}: is nested more than {_DEPTH_MAX} deep")
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{field}: the names in it must be texts, not {name!r}")
        return {name: _plain(item, f"{field}.{name}", depth - 1) for name, item in value.items()}
    if _is_list(value):
        assert isinstance(value, Sequence)
        return [_plain(item, f"{field}.{place}", depth - 1) for place, item in enumerate(value)]
    raise TypeError(f"{field}: {_kind(value)} cannot be sent as JSON")


def _check_size(value: int, field: str) -> None:
    if value.bit_length() > _INT_BITS_MAX:
        raise ValueError(f"{field}: must be a number below 2**{_INT_BITS_MAX}")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(
        value, str | bytes | bytearray | memoryview
    )


def _kind(value: object) -> str:
    return type(value).__name__
