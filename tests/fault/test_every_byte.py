import random

import numpy as np
import pytest

from kvkeep_storage.errors import Corrupt

from ..support.caches import assert_equal_rows, facts_for, random_rows
from ..support.stores import Stores

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

# As small as a cache can be with everything in it: two slabs, a head with rows and one without.
ROWS = random_rows(
    counts=np.array([[[2, 0]], [[1, 0]]], np.int32),
    ratios=(0.1, 0.2),
    head_dim=2,
    num_layers=1,
    protected_rows=0,
    remainder=True,
)
FACTS = facts_for(ROWS)


@pytest.mark.parametrize("name", ["kv-00.safetensors", "kv-01.safetensors", "manifest.json"])
async def test_field_09_a_flipped_bit_in_any_byte_of_a_stored_file_is_never_an_answer(
    stores: Stores, name: str
) -> None:
    await stores.register(FACTS)
    path = stores.folder(await stores.build(ROWS, FACTS)) / name
    whole = path.read_bytes()
    chosen = random.Random(name)
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(Corrupt):
            await stores.load(FACTS)
    path.write_bytes(whole)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


@pytest.mark.parametrize("name", ["kv-00.safetensors", "kv-01.safetensors", "manifest.json"])
async def test_field_15_a_stored_file_cut_anywhere_is_never_an_answer(
    stores: Stores, name: str
) -> None:
    await stores.register(FACTS)
    path = stores.folder(await stores.build(ROWS, FACTS)) / name
    whole = path.read_bytes()
    # Every place in the first hundred bytes and the last, and some in between.
    sizes = [*range(100), *range(100, len(whole) - 100, 37), *range(len(whole) - 100, len(whole))]
    for size in sizes:
        path.write_bytes(whole[:size])
        with pytest.raises(Corrupt):
            await stores.load(FACTS)
