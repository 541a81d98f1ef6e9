"""What this process has deleted, so that a Redis that forgot it is told again.

A failover, or a kill of a Redis that syncs once a second, may lose the last writes it had
acknowledged: a deleted context's record is there again then. An id is never given out twice, so
whatever stands under a deleted one is the deleted context.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Final

from kvkeep_storage.hash_fields import hash_fields
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.redis_keys import TenantKeys

# Longer than a failover takes: until then there is no Redis that could have forgotten anything.
REMEMBERED_SECONDS: Final = 600.0
_REMEMBERED_MAX: Final = 2000


class Deletions:
    """The last deletions of this process, for ten minutes and 2,000 of them at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is monotonic."""
        self._clock = clock
        # In the order of their times, so that what is over stands first.
        self._times: OrderedDict[tuple[str, str], float] = OrderedDict()

    def add(self, tenant: str, context_id: str) -> None:
        """Remember a deletion that was carried out. Modifies: this object."""
        self._times[tenant, context_id] = self._clock()
        self._times.move_to_end((tenant, context_id))
        if len(self._times) > _REMEMBERED_MAX:
            self._times.popitem(last=False)

    async def undone(self, metadata: Metadata) -> list[tuple[str, str]]:
        """Tenant and id of those whose record is there again. Raises: MetadataUnavailable."""
        over_at = self._clock() - REMEMBERED_SECONDS
        while self._times and next(iter(self._times.values())) <= over_at:
            self._times.popitem(last=False)
        by_tenant = defaultdict(list)
        for tenant, context_id in self._times:
            by_tenant[tenant].append(context_id)
        found = []
        for tenant, ids in by_tenant.items():
            keys = [TenantKeys(tenant).context(context_id) for context_id in ids]
            records = await hash_fields(metadata.link, keys, "cache_id")
            found += [
                (tenant, context_id)
                for context_id, (cache_id,) in zip(ids, records, strict=True)
                if cache_id
            ]
        return found
