"""The names of every key in Redis.

Keys of a tenant share the hash tag ``{tenant}``, so that a script may touch several of them in a
cluster too. What belongs to no tenant stands under ``{kvkeep}``.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from kvkeep_storage.records import check_name

STORE_ID: Final = "{kvkeep}:store_id"
TENANTS: Final = "{kvkeep}:tenants"
BUILDS: Final = "{kvkeep}:builds"
LEASE_PATTERN: Final = "kvkeep:{*}:lease:*"


def refusals(job_id: str) -> str:
    """Hash: the builders that can never do this job, and since when there is no other."""
    return f"{BUILDS}:refused:{job_id}"


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """The keys of one tenant. Raises: Invalid for a tenant that cannot stand in a key.

    Ids end a key, so looking up any text is safe; records check theirs when they are made.
    """

    tenant: str

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant)

    @property
    def contexts(self) -> str:
        """Sorted set of all context ids, in the order of their ids."""
        return self._key("contexts")

    @property
    def unfinished(self) -> str:
        """Set of the ids of contexts that wait for a build."""
        return self._key("unfinished")

    @property
    def expiry(self) -> str:
        """Sorted set of context ids by the epoch second they expire."""
        return self._key("expiry")

    @property
    def caches(self) -> str:
        """Set of the ids of committed caches."""
        return self._key("caches")

    @property
    def charges(self) -> str:
        """Hash: the bytes charged for each cache, and their sum."""
        return self._key("charges")

    @property
    def fence(self) -> str:
        """The last fencing token given out."""
        return self._key("fence")

    def context(self, context_id: str) -> str:
        """Hash: one context record."""
        return self._key(f"context:{context_id}")

    def cache(self, cache_id: str) -> str:
        """Hash: one cache record."""
        return self._key(f"cache:{cache_id}")

    def references(self, cache_id: str) -> str:
        """Set of the ids of the contexts that share a cache."""
        return self._key(f"references:{cache_id}")

    def waiting(self, cache_id: str) -> str:
        """Sorted set of the contexts that wait for a build of a cache, by its estimated bytes."""
        return self._key(f"waiting:{cache_id}")

    def build_lease(self, cache_id: str) -> str:
        """Text "token:owner" of the build lease of a cache; expires with it."""
        return self._key(f"lease:build:{cache_id}")

    def read_leases(self, cache_id: str) -> str:
        """Sorted set of a cache's readers by the millisecond their lease ends."""
        return self._key(f"lease:read:{cache_id}")

    def idempotency(self, key: str) -> str:
        """Hash: what became of the request with this idempotency key, of any length."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        return self._key(f"idempotency:{digest}")

    def _key(self, name: str) -> str:
        return f"kvkeep:{{{self.tenant}}}:{name}"
