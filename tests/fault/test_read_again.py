"""Bytes that were wrong once may have gone wrong on the way: nothing is given up for them."""

import pytest

from kvkeep_storage.documents import get_document, get_mirror
from kvkeep_storage.errors import DocumentCorrupt
from kvkeep_storage.objects import Objects

from ..support.caches import facts_for, random_rows
from ..support.stores import Stores, a_document

pytestmark = [pytest.mark.anyio, pytest.mark.fault]


class CutShort(Objects):
    """A store whose first answers end half-way, without an error."""

    times: int

    async def get(self, key: str) -> bytes:
        content = await super().get(key)
        if self.times == 0:
            return content
        self.times -= 1
        return content[: len(content) // 2]


async def test_a_document_that_was_read_wrongly_once_is_read_again(stores: Stores) -> None:
    key = await stores.register(facts_for(random_rows()))
    way = CutShort.open(stores.root.as_uri())
    way.times = 1
    assert await get_document(way, key) == a_document()
    way.times = 1
    assert (await get_mirror(way, key)).record.id == key.context_id
    way.times = 2
    with pytest.raises(DocumentCorrupt):
        await get_document(way, key)
