"""The records of storage and the changes of state they allow; pure, no I/O.

Times are epoch seconds. ``ratio`` is the fraction of the KV pairs that is kept.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self, get_args

from kvkeep_storage.errors import Invalid
from kvkeep_storage.fidelity import Fidelity
from kvkeep_storage.record_codec import from_hash, to_hash

Status = Literal["queued", "building", "rebuilding", "ready", "failed", "expired"]
Anchor = Literal["created_at", "last_used_at"]

STATUSES: Final[tuple[Status, ...]] = get_args(Status)
UNFINISHED: Final[tuple[Status, ...]] = ("queued", "building", "rebuilding")

# "expired" is never stored: it is what a passed expires_at reads as.
_TRANSITIONS: Final[Mapping[Status, tuple[Status, ...]]] = {
    "queued": ("building", "ready", "failed"),
    "building": ("building", "ready", "failed"),
    "rebuilding": ("rebuilding", "ready", "failed"),
    "ready": ("rebuilding",),
    "failed": ("queued",),
    "expired": (),
}

# Names become parts of Redis keys and of object paths: no braces, colons or slashes.
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def is_allowed(before: Status, after: Status) -> bool:
    """Whether a context may go from one status to another; staying counts only for builds."""
    return after in _TRANSITIONS[before]


def sources(after: Status) -> tuple[Status, ...]:
    """Every status from which a context may go to ``after``."""
    return tuple(before for before in STATUSES if is_allowed(before, after))


def check_name(field: str, value: str) -> None:
    """Refuse a tenant, id or generation that cannot stand in a key or a path.

    Raises: Invalid, naming the field and the limit.
    """
    if not _NAME.fullmatch(value):
        raise Invalid(
            field, f"{value!r} must be 1 to 128 of A-Z a-z 0-9 _ - . and not start with ."
        )


@dataclass(frozen=True, slots=True)
class Expiry:
    """``expires_after``: so many seconds after creation, or after the last use."""

    anchor: Anchor
    seconds: int

    def __post_init__(self) -> None:
        if self.anchor not in get_args(Anchor):
            raise Invalid(
                "expires_after.anchor", f"{self.anchor!r} is not one of {get_args(Anchor)}"
            )
        if self.seconds < 1:
            raise Invalid("expires_after.seconds", f"{self.seconds} must be at least 1")

    def at(self, created_at: float, last_used_at: float | None) -> float:
        """When a context with these times expires; one never used counts from its creation."""
        used = last_used_at if self.anchor == "last_used_at" else None
        return (created_at if used is None else used) + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRecord:
    """One registered document of one tenant, and the state of its cache.

    ``ratio`` is what was asked for, or what ``tokens_asked``, kept rows per head on average, come
    to; ``ratio_achieved`` what the committed cache holds, ``ratios_available`` the ratios a query
    may name: the committed ones up to ``ratio``, and ``ratio`` itself. ``status`` reads "expired"
    once ``expires_at`` has passed; it is never stored so. ``refresh_requested_at`` is set while a
    ready context waits for a fresh generation and answers from the old one. With ``max_loss``, in
    nats per token, the ratio is to be found: until it is, ``ratio_from`` is the lowest that it
    may be, and ``ratio`` the highest.
    Raises: Invalid, naming the field and the limit.
    """

    tenant: str
    id: str
    cache_id: str
    model: str
    status: Status
    created_at: float
    tokens_document: int
    tokens_protected: int
    tokens_total: int
    policy: str
    policy_applied: str
    ratio: float
    scoring: str
    quantization: str
    full_bytes: int
    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    stage: str | None = None
    fraction: float = 0.0
    ready_at: float | None = None
    last_used_at: float | None = None
    expires_at: float | None = None
    expires_anchor: Anchor | None = None
    expires_seconds: int | None = None
    ratio_achieved: float | None = None
    ratios_available: tuple[float, ...] = ()
    stored_bytes: int | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    queries: int = 0
    error_code: str | None = None
    error_detail: str | None = None
    refresh_requested_at: float | None = None
    tokens_asked: int | None = None
    max_loss: float | None = None
    ratio_from: float | None = None
    fidelity: Fidelity | None = None
    remainder: bool = False

    def __post_init__(self) -> None:
        for name in ("tenant", "id", "cache_id"):
            check_name(f"context.{name}", getattr(self, name))
        if self.status not in STATUSES:
            raise Invalid("context.status", f"{self.status!r} is not one of {STATUSES}")
        if (self.expires_anchor is None) != (self.expires_seconds is None):
            raise Invalid("context.expires_seconds", "anchor and seconds go together or not at all")
        if not 0.0 <= self.fraction <= 1.0:
            raise Invalid("context.fraction", f"{self.fraction} is outside 0 to 1")
        _check_ratio("context.ratio", self.ratio)
        if self.ratio_from is not None:
            _check_ratio("context.ratio_from", self.ratio_from)
            if self.max_loss is None:
                raise Invalid("context.max_loss", "missing, with a ratio to be found by it")
        for name in (
            "tokens_document",
            "tokens_protected",
            "tokens_total",
            "full_bytes",
            "queries",
        ):
            if getattr(self, name) < 0:
                raise Invalid(f"context.{name}", f"{getattr(self, name)} is negative")

    @property
    def awaits_build(self) -> bool:
        """Whether a build of it is to be made: the first, one after damage, or a fresh one.

        Never for one that has expired: nobody may read it any more.
        """
        is_refreshed = self.status == "ready" and self.refresh_requested_at is not None
        return self.status in UNFINISHED or is_refreshed

    def without_cache(self) -> Self:
        """As it is while no cache is attached to it and none is built: queued for one."""
        return replace(
            self,
            status="queued",
            stage=None,
            fraction=0.0,
            ratio_achieved=None,
            ratios_available=(),
            stored_bytes=None,
            fidelity=None,
            refresh_requested_at=None,
        )

    def to_hash(self) -> dict[str, str]:
        """Every field that is not None, as text for a Redis hash."""
        return to_hash(self)

    @classmethod
    def from_hash(cls, stored: Mapping[str, str]) -> Self:
        """Read what ``to_hash`` wrote. Raises: RecordCorrupt, naming what is wrong."""
        return from_hash(cls, "context", stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecord:
    """The committed generation of a cache. ``ratio`` is the fraction kept that was built.

    ``ratios`` ascends and names the kept fractions at which the cache can be read; ``ratio``
    is the last of them. Raises: Invalid, naming the field and the limit.
    """

    tenant: str
    cache_id: str
    generation: str
    manifest_sha256: str
    ratio: float
    ratio_achieved: float
    ratios: tuple[float, ...]
    policy_applied: str
    stored_bytes: int
    model: str
    committed_at: float
    timings: Mapping[str, float]
    fidelity: Fidelity | None = None

    def __post_init__(self) -> None:
        for name in ("tenant", "cache_id", "generation"):
            check_name(f"cache.{name}", getattr(self, name))
        _check_ratio("cache.ratio", self.ratio)
        if list(self.ratios) != sorted(set(self.ratios)):
            raise Invalid("cache.ratios", f"{self.ratios} must ascend")
        if self.stored_bytes < 0:
            raise Invalid("cache.stored_bytes", f"{self.stored_bytes} is negative")

    def to_hash(self) -> dict[str, str]:
        """Every field, as text for a Redis hash."""
        return to_hash(self)

    @classmethod
    def from_hash(cls, stored: Mapping[str, str]) -> Self:
        """Read what ``to_hash`` wrote. Raises: RecordCorrupt, naming what is wrong."""
        return from_hash(cls, "cache", stored)


@dataclass(frozen=True, slots=True)
class BuildLease:
    """The right to build one cache, until it runs out or is taken over.

    ``fencing_token`` grows with every lease of a tenant, so a commit under an old one is
    refused however late it arrives.
    """

    tenant: str
    cache_id: str
    owner: str
    fencing_token: int
    ttl_seconds: float = 10.0

    @property
    def value(self) -> str:
        """What Redis holds while this lease is alive."""
        return f"{self.fencing_token}:{self.owner}"


@dataclass(frozen=True, slots=True)
class Released:
    """What deleting a context left without an owner.

    ``existed``: whether there was such a context. ``cache_id`` is set when its cache lost its
    last reference, ``generation`` when that cache was committed: its objects may be deleted.
    """

    cache_id: str | None
    generation: str | None
    existed: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a tenant's contexts, in the order asked for."""

    records: tuple[ContextRecord, ...]
    has_more: bool


def _check_ratio(field: str, ratio: float) -> None:
    if not 0.0 < ratio <= 1.0:
        raise Invalid(field, f"{ratio} is outside 0 (not included) to 1")
