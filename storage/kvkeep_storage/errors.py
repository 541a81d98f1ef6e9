"""Everything storage can fail with; kinds differ by what the caller does next.

    StorageError
    ├── Invalid (also a ValueError)   fix the value; it fails again unchanged
    ├── NotFound                      it is not there
    ├── Gone                          it was there and has passed its expiry
    ├── Conflict                      read again, then decide
    │   ├── LeaseLost                 stop: somebody else may own the work now
    │   ├── Unreferenced              stop: no context wants this cache any more
    │   └── DataDirectoryLocked       another process owns the data directory
    ├── Unavailable                   the same call may work later
    │   ├── MetadataUnavailable       Redis
    │   └── ObjectsUnavailable        the object store
    ├── Corrupt                       bytes proven wrong: quarantine and rebuild
    │   ├── DocumentCorrupt           the document itself: nothing to rebuild from
    │   └── RecordCorrupt             a record in Redis: reindex
    ├── Incompatible                  readable, but not by this version: rebuild
    ├── Full                          no space; nothing half-written is visible
    ├── QuotaExceeded                 the tenant has as much as it may have
    └── StoreMismatch                 Redis and the object store do not belong together

``code`` is stable and goes out to users; ``retryable`` says whether the same call may succeed
later. No message carries text of a document.
"""

from typing import ClassVar


class StorageError(Exception):
    """Storage could not do what was asked."""

    code: ClassVar[str] = "storage_error"
    retryable: ClassVar[bool] = False


class Invalid(StorageError, ValueError):
    """A value that storage does not take."""

    code = "invalid_value"

    def __init__(self, field: str, reason: str) -> None:
        """Name the field, and in ``reason`` the value and the limit it breaks."""
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class NotFound(StorageError):
    """Something is not there."""

    code = "not_found"

    def __init__(self, kind: str, name: str) -> None:
        """``kind`` is what was looked for ("context", "cache", "object"), ``name`` which one."""
        super().__init__(f"there is no {kind} {name!r}")
        self.kind = kind
        self.name = name


class Gone(StorageError):
    """Something has passed its expiry and waits to be swept."""

    code = "gone"

    def __init__(self, kind: str, name: str, expired_at: float) -> None:
        """``expired_at`` is in epoch seconds."""
        super().__init__(f"{kind} {name!r} has expired")
        self.kind = kind
        self.name = name
        self.expired_at = expired_at


class Conflict(StorageError):
    """The state of something forbids the change."""

    code = "conflict"

    def __init__(self, kind: str, name: str, reason: str) -> None:
        """Name the thing, and why its state forbids the change."""
        super().__init__(f"{kind} {name!r}: {reason}")
        self.kind = kind
        self.name = name
        self.reason = reason


class LeaseLost(Conflict):
    """A lease or a job is no longer held by this owner; whatever it guarded must stop."""

    code = "lease_lost"

    def __init__(self, kind: str, name: str, owner: str) -> None:
        """``kind`` is "build lease" or "job"; ``owner`` is who asked and no longer holds it."""
        super().__init__(kind, name, f"no longer held by {owner!r}")
        self.owner = owner


class Unreferenced(Conflict):
    """Every context of a cache was deleted while it was built; the build is not committed."""

    code = "cache_unreferenced"

    def __init__(self, cache_id: str) -> None:
        """Name the cache that nobody wants."""
        super().__init__("cache", cache_id, "no context references it any more")
        self.cache_id = cache_id


class DataDirectoryLocked(Conflict):
    """Another process uses this data directory."""

    code = "data_directory_locked"

    def __init__(self, path: str, holder: str) -> None:
        """``holder`` describes who has it: a process id, or "unknown"."""
        super().__init__("data directory", path, f"in use by another process ({holder})")
        self.path = path
        self.holder = holder


class Unavailable(StorageError):
    """A store cannot be reached, or did not answer within its deadline."""

    code = "unavailable"
    retryable = True
    retry_after_seconds: int = 1

    def __init__(self, operation: str, reason: str, *, attempts: int = 1) -> None:
        """Name what was tried, what came back instead of an answer, and how often it was tried."""
        super().__init__(f"{operation}: {reason}")
        self.operation = operation
        self.reason = reason
        self.attempts = attempts


class MetadataUnavailable(Unavailable):
    """Redis cannot be reached, refused the command, or did not answer in time."""

    code = "metadata_unavailable"


class ObjectsUnavailable(Unavailable):
    """The object store cannot be reached, or did not answer in time."""

    code = "storage_unavailable"

    def __init__(
        self, operation: str, reason: str, *, attempts: int = 1, abandoned: bool = False
    ) -> None:
        """``abandoned``: it ran into its deadline, and what it began may still go on."""
        super().__init__(operation, reason, attempts=attempts)
        self.abandoned = abandoned


class Corrupt(StorageError):
    """Stored bytes are proven wrong: a digest, a size or a count differs."""

    code = "cache_corrupt"

    def __init__(
        self, name: str, reason: str, *, cache_id: str | None = None, generation: str | None = None
    ) -> None:
        """``name`` is the object or record; cache and generation say what to quarantine."""
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
        self.cache_id = cache_id
        self.generation = generation


class DocumentCorrupt(Corrupt):
    """A stored document does not match its own digest or schema."""

    code = "document_corrupt"


class RecordCorrupt(Corrupt):
    """A record in Redis lacks a field or holds a value that cannot be one."""

    code = "record_corrupt"


class Incompatible(StorageError):
    """Stored bytes are whole, but of another schema, model, dtype or tokenizer."""

    code = "cache_incompatible"

    def __init__(self, field: str, found: str, expected: str) -> None:
        """Name the field, what is stored, and what this process can use."""
        super().__init__(f"{field} is {found}; {expected} is needed")
        self.field = field
        self.found = found
        self.expected = expected


class Full(StorageError):
    """No space is left for an object; nothing of it is visible."""

    code = "storage_full"
    retryable = True

    def __init__(self, name: str, size_bytes: int) -> None:
        """Name the object and the bytes it would have taken."""
        super().__init__(f"no space left for {name} ({size_bytes} bytes)")
        self.name = name
        self.size_bytes = size_bytes


class QuotaExceeded(StorageError):
    """A tenant asks for more than its quota allows; nothing was changed."""

    code = "quota_exceeded"
    retryable = True

    def __init__(self, quota: str, limit: int, used: int, asked: int) -> None:
        """Name the quota ("contexts", "queued" or "bytes"), and all three in its unit."""
        super().__init__(f"quota of {quota}: {used} of {limit} are used, {asked} more were asked")
        self.quota = quota
        self.limit = limit
        self.used = used
        self.asked = asked


def _advice(objects_store_id: str | None, metadata_store_id: str | None) -> str:
    if metadata_store_id is not None:
        return ": one of the two URLs names another store"
    if objects_store_id is None:
        return ": nothing was ever stored here"
    return ": where its records are lost, `kvkeep-server admin reindex` brings them back"


class StoreMismatch(StorageError):
    """Redis belongs to another object store, or to none: reindex before anything is swept."""

    code = "store_mismatch"

    def __init__(self, objects_store_id: str | None, metadata_store_id: str | None) -> None:
        """Both ids as found; None where there is none."""
        super().__init__(
            f"the object store is {objects_store_id!r}, Redis was filled from {metadata_store_id!r}"
            f"{_advice(objects_store_id, metadata_store_id)}"
        )
        self.objects_store_id = objects_store_id
        self.metadata_store_id = metadata_store_id
