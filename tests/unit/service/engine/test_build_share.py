"""What builds earn by rounds of answers, and what they owe when they took more."""

import pytest
import torch

from kvkeep_service.engine import build_share
from kvkeep_service.engine.build_share import SHARE, BuildShare


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(build_share, "time", clock)
    return clock


def worked(share: BuildShare, clock: Clock, seconds: float) -> None:
    share.resume()
    clock.now += seconds
    share.pause()


def test_a_round_earns_the_slice_that_was_set(clock: Clock) -> None:
    share = BuildShare(0.030, torch.device("cpu"))
    assert share.is_used_up, "answers come first"
    share.earn(0.0, 5.0)
    worked(share, clock, 0.029)
    assert not share.is_used_up
    worked(share, clock, 0.002)
    assert share.is_used_up
    assert share.build_seconds == pytest.approx(0.031)


def test_with_nothing_set_a_round_earns_a_share_of_its_own_time(clock: Clock) -> None:
    share = BuildShare(None, torch.device("cpu"))
    share.earn(0.0, 0.2)
    worked(share, clock, 0.9 * SHARE * 0.2)
    assert not share.is_used_up
    worked(share, clock, 0.2 * SHARE * 0.2)
    assert share.is_used_up


def test_reading_new_questions_earns_nothing_where_others_wait_for_their_tokens(
    clock: Clock,
) -> None:
    share = BuildShare(None, torch.device("cpu"))
    share.earn(read_seconds=5.0, decode_seconds=0.2)
    worked(share, clock, 1.1 * SHARE * 0.2)
    assert share.is_used_up


def test_a_round_that_gave_no_token_earns_by_what_it_read(clock: Clock) -> None:
    share = BuildShare(None, torch.device("cpu"))
    share.earn(read_seconds=5.0, decode_seconds=0.0)
    worked(share, clock, 0.9 * SHARE * 5.0)
    assert not share.is_used_up


def test_what_a_long_work_item_took_is_owed_and_what_is_left_is_not_saved(clock: Clock) -> None:
    share = BuildShare(1.0, torch.device("cpu"))
    share.earn(0.0, 0.1)
    worked(share, clock, 3.5)
    for _ in range(3):
        assert share.is_used_up
        share.earn(0.0, 0.1)
    assert not share.is_used_up
    share.earn(0.0, 0.1)
    share.earn(0.0, 0.1)
    worked(share, clock, 1.1)
    assert share.is_used_up


def test_what_builds_take_while_nobody_asks_is_owed_to_nobody(clock: Clock) -> None:
    share = BuildShare(1.0, torch.device("cpu"))
    worked(share, clock, 500.0)
    share.forget()
    share.earn(0.0, 0.1)
    assert not share.is_used_up
