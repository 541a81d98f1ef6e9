"""What lies in an object store, by one listing: generations of caches, and documents.

A listing is no snapshot: what comes or goes meanwhile is in it or not.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvkeep_storage import keys
from kvkeep_storage.errors import Invalid
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.objects import ObjectInfo, Objects

Key = TypeVar("Key", DocumentKey, GenerationKey)


@dataclass(frozen=True, slots=True)
class Stored:
    """All objects of one generation, or of one document; ``newest_at`` is in epoch seconds."""

    objects: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects together."""
        return sum(item.size_bytes for item in self.objects)

    @property
    def newest_at(self) -> float:
        """When the last of them was written, by the store's clock."""
        return max(item.modified_at for item in self.objects)

    def has(self, key: str) -> bool:
        """Whether the object of this key is among them."""
        return any(item.key == key for item in self.objects)


async def stored_generations(objects: Objects) -> dict[GenerationKey, Stored]:
    """Every generation of every tenant, committed or not. Raises: ObjectsUnavailable."""
    return _grouped(
        await objects.objects_below(keys.CACHES), 3, lambda names: GenerationKey(*names)
    )


async def stored_documents(objects: Objects) -> dict[DocumentKey, Stored]:
    """Every document or mirror of every tenant. Raises: ObjectsUnavailable."""
    return _grouped(
        await objects.objects_below(keys.DOCUMENTS), 2, lambda names: DocumentKey(*names)
    )


def _grouped(
    found: list[ObjectInfo], depth: int, key_of: Callable[[list[str]], Key]
) -> dict[Key, Stored]:
    """Group objects by the ``depth`` names below the first directory of their paths."""
    groups: dict[Key, list[ObjectInfo]] = {}
    for item in found:
        names = item.key.split("/")
        if len(names) > depth + 1:
            # A name that we would not give is not ours.
            with suppress(Invalid):
                groups.setdefault(key_of(names[1 : depth + 1]), []).append(item)
    return {key: Stored(tuple(items)) for key, items in groups.items()}
