"""Where every object lies. The only place that spells a path; pure.

Names are checked before they become part of a path, so no tenant can reach another's.
"""

from dataclasses import dataclass

from kvkeep_storage.records import check_name

STORE = "store.json"
CACHES = "caches"
DOCUMENTS = "documents"
MANIFEST = "manifest.json"
CHECKS = "checks"
"""Where a start tries out whether the store takes writes; nothing stays there."""


@dataclass(frozen=True, slots=True)
class GenerationKey:
    """One generation of one cache: the directory that a commit fills once.

    Raises: Invalid when a name cannot stand in a path.
    """

    tenant: str
    cache_id: str
    generation: str

    def __post_init__(self) -> None:
        for field in ("tenant", "cache_id", "generation"):
            check_name(field, getattr(self, field))

    @property
    def prefix(self) -> str:
        """The directory of this generation."""
        return f"{CACHES}/{self.tenant}/{self.cache_id}/{self.generation}"

    @property
    def manifest(self) -> str:
        """The manifest, which is written last."""
        return f"{self.prefix}/{MANIFEST}"

    def slab(self, band: int) -> str:
        """The slab of one band; 0 is the most important."""
        return f"{self.prefix}/kv-{band:02d}.safetensors"


@dataclass(frozen=True, slots=True)
class DocumentKey:
    """One registered document and what reindexing needs to know of its context.

    Raises: Invalid when a name cannot stand in a path.
    """

    tenant: str
    context_id: str

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant)
        check_name("context_id", self.context_id)

    @property
    def body(self) -> str:
        """The document as registered: the source of truth for rebuilds."""
        return f"{DOCUMENTS}/{self.tenant}/{self.context_id}/document.json"

    @property
    def mirror(self) -> str:
        """The mutable facts of the context: the one object that is ever replaced."""
        return f"{DOCUMENTS}/{self.tenant}/{self.context_id}/context.json"
