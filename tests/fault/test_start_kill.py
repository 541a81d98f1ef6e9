"""A start that is killed leaves nothing that later starts do not remove."""

import os
from pathlib import Path

import pytest

from kvkeep_storage.objects import Objects

from ..support.stores import entries_below

pytestmark = [pytest.mark.anyio, pytest.mark.fault]


async def test_what_a_killed_check_of_the_store_left_goes_at_a_later_start(tmp_path: Path) -> None:
    killed = Objects.open(tmp_path.as_uri())
    for name in ("0123", "4567"):
        await killed.put(f"checks/{name}", b"")
    os.utime(tmp_path / "checks" / "0123", (1, 1))
    store = Objects.open(tmp_path.as_uri())
    await store.check(deadline_seconds=20)
    # The other one may belong to a start that is still alive.
    assert entries_below(tmp_path) == ["checks", "checks/4567"]
    os.utime(tmp_path / "checks" / "4567", (1, 1))
    await store.check(deadline_seconds=20)
    assert entries_below(tmp_path) == []
