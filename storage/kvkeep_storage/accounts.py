"""Who has how much: what lies in the object store and what is charged, tenant by tenant."""

from collections import Counter
from dataclasses import dataclass

from kvkeep_storage.inventory import stored_documents, stored_generations
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.quotas import Usage


@dataclass(frozen=True, slots=True)
class Account:
    """One tenant. ``cache_bytes`` has every generation, those not yet swept included."""

    tenant: str
    usage: Usage
    document_bytes: int
    cache_bytes: int


async def accounts(objects: Objects, metadata: Metadata) -> list[Account]:
    """Every tenant that has records or objects, by name. Modifies nothing.

    Raises: ObjectsUnavailable, MetadataUnavailable.
    """
    document_bytes, cache_bytes = Counter[str](), Counter[str]()
    for document, stored in (await stored_documents(objects)).items():
        document_bytes[document.tenant] += stored.size_bytes
    for generation, stored in (await stored_generations(objects)).items():
        cache_bytes[generation.tenant] += stored.size_bytes
    tenants = {*await metadata.tenants(), *document_bytes, *cache_bytes}
    return [
        Account(
            tenant,
            await metadata.usage(tenant),
            document_bytes[tenant],
            cache_bytes[tenant],
        )
        for tenant in sorted(tenants)
    ]
