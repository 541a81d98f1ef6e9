"""Names of contexts and answers: a prefix and a ULID, which sorts by the time it was made.

Ids of one process ascend strictly, also within a millisecond: lists are in the order of ids.
"""

import re
from typing import Final

from ulid import ULID

_CONTEXT: Final = re.compile(r"ctx_[0-7][0-9A-HJKMNP-TV-Z]{25}")
_ANSWER: Final = re.compile(r"ans_[0-7][0-9A-HJKMNP-TV-Z]{25}")


def new_context_id() -> str:
    """Name a context."""
    return f"ctx_{ULID()}"


def new_answer_id() -> str:
    """Name an answer."""
    return f"ans_{ULID()}"


def new_request_id() -> str:
    """Name a request that came without a name."""
    return f"req_{ULID()}"


def is_answer_id(text: str) -> bool:
    """Whether an answer could have this name."""
    return _ANSWER.fullmatch(text) is not None


def is_context_id(text: str) -> bool:
    """Whether a context could have this name; nothing else may reach a key or a path."""
    return _CONTEXT.fullmatch(text) is not None
