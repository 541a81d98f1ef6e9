"""Why a server or a command does not start; never seen over HTTP.

StartRefused
├── SettingsInvalid
├── ModelUnsupported
└── ModelUnavailable
"""

from collections.abc import Sequence


class StartRefused(Exception):
    """The server cannot start as configured; the message says what to change."""


class SettingsInvalid(StartRefused):
    """One or more settings are wrong; the message has one line per setting."""

    def __init__(self, problems: Sequence[str]) -> None:
        """Take one sentence per setting: variable, value and limit."""
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ModelUnsupported(StartRefused):
    """The model's architecture is not one this engine serves correctly."""

    def __init__(self, model: str, reason: str) -> None:
        """Name the model reference and what about it is not supported."""
        super().__init__(f"model {model!r} is not supported: {reason}")
        self.model = model
        self.reason = reason


class ModelUnavailable(StartRefused):
    """The model reference cannot be found, read or downloaded."""

    def __init__(self, model: str, reason: str) -> None:
        """Name the model reference and why it cannot be had."""
        super().__init__(f"model {model!r} cannot be loaded: {reason}")
        self.model = model
        self.reason = reason
