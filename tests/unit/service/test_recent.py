from dataclasses import dataclass, replace

from kvkeep_service.recent import RecentRecords
from kvkeep_storage.records import ContextRecord

from ..storage.samples import TENANT, a_context

READY = a_context(status="ready")


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def seen(recent: RecentRecords, context_id: str = READY.id) -> ContextRecord | None:
    return recent.find(TENANT, context_id)


def test_a_ready_record_is_found_for_its_time_after_it_was_asked_for_and_no_longer() -> None:
    clock = Clock()
    recent = RecentRecords(60.0, clock)
    asked_at = recent.now()
    clock.now += 20
    recent.saw(READY, asked_at)
    clock.now += 39.9
    assert seen(recent) is READY
    clock.now += 0.2
    assert seen(recent) is None


def test_what_is_not_ready_never_answers_and_takes_the_earlier_record_with_it() -> None:
    recent = RecentRecords(60.0, Clock())
    for status in ("queued", "building", "rebuilding", "failed", "expired"):
        recent.saw(READY, recent.now())
        recent.saw(replace(READY, status=status), recent.now())
        assert seen(recent) is None


def test_a_context_that_redis_does_not_know_is_forgotten() -> None:
    recent = RecentRecords(60.0, Clock())
    recent.saw(READY, recent.now())
    recent.missed(TENANT, READY.id)
    assert seen(recent) is None


def test_a_look_up_that_was_under_way_never_revives_what_was_deleted_meanwhile() -> None:
    clock = Clock()
    recent = RecentRecords(60.0, clock)
    asked_at = recent.now()
    recent.saw(READY, asked_at)
    clock.now += 1
    recent.deleted(TENANT, READY.id)
    assert seen(recent) is None
    for _ in range(58):
        clock.now += 1
        recent.saw(READY, asked_at)
        assert seen(recent) is None


def test_another_tenant_s_record_of_the_same_id_is_another_record() -> None:
    recent = RecentRecords(60.0, Clock())
    recent.saw(READY, recent.now())
    assert recent.find("other", READY.id) is None


def test_with_no_time_at_all_nothing_is_remembered() -> None:
    recent = RecentRecords(0.0, Clock())
    recent.saw(READY, recent.now())
    assert seen(recent) is None


def test_the_number_of_records_is_bounded_and_the_oldest_goes_first() -> None:
    recent = RecentRecords(60.0, Clock())
    for number in range(10_001):
        recent.saw(replace(READY, id=f"ctx_{number}"), recent.now())
    assert seen(recent, "ctx_0") is None
    assert seen(recent, "ctx_1") is not None
    assert seen(recent, "ctx_10000") is not None
