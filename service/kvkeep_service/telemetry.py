"""Logging: one line of JSON per event on stderr, with the request id where there is one.

No document text, question or answer is ever logged. That includes exception messages of
libraries, which may quote what they choked on: unforeseen errors are logged by type and place.
"""

import sys
import traceback
from pathlib import Path

import structlog


def set_up_logging() -> None:
    """Configure structlog for the process. Modifies: structlog's global configuration."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def where(error: BaseException) -> list[str]:
    """Describe an error and its causes without their messages: type, then innermost frames."""
    lines: list[str] = []
    current: BaseException | None = error
    while current is not None and len(lines) < 8:
        frames = traceback.extract_tb(current.__traceback__)[-3:]
        places = " < ".join(
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)
        )
        lines.append(f"{type(current).__name__} at {places or 'an unknown place'}")
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
    return lines
