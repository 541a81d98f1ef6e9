"""A registration that is killed leaves nothing that only an acknowledged one may leave."""

import pytest

from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import ContextRecord

from ..support.stores import Stores
from .soak.storage_calls import Calls, Place

pytestmark = [pytest.mark.anyio, pytest.mark.fault]


async def test_no_context_is_ready_before_its_mirror_is_written(
    stores: Stores, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = Metadata.attach

    async def attach_with_a_mirror(
        self: Metadata, tenant: str, context_id: str, now: float
    ) -> ContextRecord | None:
        # Killed right after this, a context that became ready here would never be mirrored.
        assert (stores.root / DocumentKey(tenant, context_id).mirror).exists()
        return await attach(self, tenant, context_id, now)

    async with Calls.open(Place.local(valkey_url, stores.root)) as calls:
        monkeypatch.setattr(Metadata, "attach", attach_with_a_mirror)
        record = await calls.register("acme", 1, 0.3, None)
    assert record.status == "queued"
