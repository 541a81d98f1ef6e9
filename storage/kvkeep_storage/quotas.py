"""What one tenant may have at most; pure, no I/O."""

from dataclasses import dataclass
from typing import Final, Literal

from kvkeep_storage.errors import Invalid

Quota = Literal["contexts", "queued", "bytes"]


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of every tenant; None is no limit. Raises: Invalid for a negative one.

    ``contexts`` counts all that exist, ``queued`` those that wait for a build or are being
    built. ``bytes`` is the size of caches as stored, or as estimated until they are: full size
    times ratio. A cache that several contexts share is charged once; documents are not charged.
    """

    contexts: int | None = None
    queued: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("contexts", "queued", "bytes"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise Invalid(f"quotas.{name}", f"{limit} is negative")

    def limits(self, *names: Quota) -> list[str | int]:
        """The limits named, in that order, as a script takes them: empty for none."""
        found = (getattr(self, name) for name in names)
        return ["" if limit is None else limit for limit in found]


NO_QUOTAS: Final = Quotas()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant has, in the units of ``Quotas``."""

    contexts: int
    queued: int
    bytes: int
