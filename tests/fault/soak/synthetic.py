"""Caches whose every byte follows from tenant and document, so that each load can be checked."""

from functools import cache
from hashlib import sha256

from kvkeep_storage.artifact import CacheRows
from kvkeep_storage.fingerprint import digest_token_ids
from kvkeep_storage.manifest import ManifestFacts

from ...support.caches import RATIOS, facts_for, prefix_of, random_rows

TENANTS = ("acme", "globex")
NUM_TEXTS = 6
"""So few that contexts often share a cache, and caches are often deleted and built again."""


def text_of(number: int) -> str:
    """The document of this number."""
    return f"Agreement {number}. " + "The parties agree on what follows. " * (number + 1)


def facts_of(tenant: str, text: str, ratio: float) -> ManifestFacts:
    """What a build of the document says, and with it the fingerprint."""
    return facts_for(
        rows_of(tenant, text, ratio),
        token_ids_digest=digest_token_ids(list(text.encode())),
        tenant_salt=tenant,
    )


def rows_of(tenant: str, text: str, ratio: float) -> CacheRows:
    """The one right content of the document's cache, built or read at a ratio."""
    return prefix_of(_all_rows(tenant, text), RATIOS.index(ratio) + 1)


@cache
def _all_rows(tenant: str, text: str) -> CacheRows:
    seed = int.from_bytes(sha256(f"{tenant}\0{text}".encode()).digest()[:8], "big")
    return random_rows(seed, head_dim=64, rows_max=150)
