"""Whose build comes next, when one tenant has queued many."""

import pytest

from kvkeep_service.ports import DocumentSpec
from kvkeep_service.registration import Registration

from ...support.documents import contract
from .tiny import AT_THIRD
from .workbench import Workbench

pytestmark = pytest.mark.anyio


async def test_tenants_are_built_for_in_turn_however_many_one_has_queued(bench: Workbench) -> None:
    def wanted(title: str) -> Registration:
        return Registration(DocumentSpec(contract(title, 10)), AT_THIRD, None, {}, None, None)

    names = {}
    for tenant, title in (("a", "A1"), ("a", "A2"), ("a", "A3"), ("b", "B1"), ("c", "C1")):
        names[(await bench.registry.register(tenant, wanted(title))).id] = title
    bench.builder.start()
    ends = []
    while len(ends) < len(names):
        end = await bench.jobs.next_end()
        if end.how == "settled":
            ends.append(names[end.context_id])
            assert end.attempts == 1, "being passed over is no attempt"
    assert ends == ["A1", "B1", "A2", "C1", "A3"]
