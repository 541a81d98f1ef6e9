import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_storage.errors import Invalid, RecordCorrupt
from kvkeep_storage.fidelity import Fidelity, RatioFidelity
from kvkeep_storage.records import (
    STATUSES,
    UNFINISHED,
    CacheRecord,
    ContextRecord,
    Expiry,
    Status,
    check_name,
    is_allowed,
    sources,
)

from .samples import a_cache, a_context

ALLOWED = {
    ("queued", "building"),
    ("queued", "ready"),
    ("queued", "failed"),
    ("building", "building"),
    ("building", "ready"),
    ("building", "failed"),
    ("rebuilding", "rebuilding"),
    ("rebuilding", "ready"),
    ("rebuilding", "failed"),
    ("ready", "rebuilding"),
    ("failed", "queued"),
}

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**60)


@pytest.mark.parametrize("before", STATUSES)
@pytest.mark.parametrize("after", STATUSES)
def test_a_context_changes_status_only_as_the_life_cycle_says(
    before: Status, after: Status
) -> None:
    assert is_allowed(before, after) == ((before, after) in ALLOWED)
    assert (before in sources(after)) == ((before, after) in ALLOWED)


def test_a_context_that_waits_can_always_become_ready_or_fail() -> None:
    for status in UNFINISHED:
        assert is_allowed(status, "ready")
        assert is_allowed(status, "failed")


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("asked_at", [None, 1_790_000_000.0])
def test_a_build_is_awaited_by_what_is_not_finished_or_asked_for_anew_and_never_by_what_expired(
    status: Status, asked_at: float | None
) -> None:
    record = a_context(status=status, refresh_requested_at=asked_at)
    is_refreshed = status == "ready" and asked_at is not None
    assert record.awaits_build == (status in UNFINISHED or is_refreshed)


@given(
    name=st.none() | st.text(),
    metadata=st.dictionaries(st.text(), st.text()),
    created_at=numbers,
    ready_at=st.none() | numbers,
    ratio=st.floats(0, 1, exclude_min=True),
    available=st.lists(st.floats(0, 1, exclude_min=True)).map(tuple),
    timings=st.dictionaries(st.text(), numbers),
    queries=counts,
    stored_bytes=st.none() | counts,
    error_detail=st.none() | st.text(),
    remainder=st.booleans(),
)
def test_a_context_reads_back_exactly_as_it_was_written(**changes: Any) -> None:
    changes["ratios_available"] = changes.pop("available")
    record = a_context(**changes)
    assert ContextRecord.from_hash(record.to_hash()) == record


@given(
    ratio_achieved=numbers,
    committed_at=numbers,
    timings=st.dictionaries(st.text(), numbers),
    stored_bytes=counts,
    ratios=st.sets(st.floats(0, 1, exclude_min=True)).map(lambda found: tuple(sorted(found))),
)
def test_a_cache_reads_back_exactly_as_it_was_written(**changes: Any) -> None:
    record = a_cache(**changes)
    assert CacheRecord.from_hash(record.to_hash()) == record


def test_an_absent_value_is_an_absent_field_and_empty_text_is_not() -> None:
    assert "name" not in a_context(name=None).to_hash()
    assert a_context(name="").to_hash()["name"] == ""
    assert ContextRecord.from_hash(a_context(name="").to_hash()).name == ""


@pytest.mark.parametrize("field", ["status", "created_at", "ratio", "tenant", "cache_id"])
def test_a_record_that_lacks_a_field_is_corrupt_and_says_which(field: str) -> None:
    stored = a_context().to_hash()
    del stored[field]
    with pytest.raises(RecordCorrupt, match=field) as caught:
        ContextRecord.from_hash(stored)
    assert caught.value.code == "record_corrupt"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("status", "sleeping"),
        ("ratio", "0.0"),
        ("ratio", "nan"),
        ("created_at", "inf"),
        ("queries", "-1"),
        ("queries", "many"),
        ("metadata", "[]"),
        ("metadata", '{"a": 1}'),
        ("timings", '{"a": "b"}'),
        ("timings", "{"),
        ("ratios_available", "0.1,x"),
        ("remainder", "True"),
        ("remainder", "1"),
        ("colour", "red"),
    ],
)
def test_a_record_with_an_impossible_value_is_corrupt(field: str, text: str) -> None:
    with pytest.raises(RecordCorrupt):
        ContextRecord.from_hash(a_context().to_hash() | {field: text})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tenant": "a/b"}, "context.tenant"),
        ({"tenant": "{a}"}, "context.tenant"),
        ({"cache_id": ".."}, "context.cache_id"),
        ({"ratio": 0.0}, "context.ratio"),
        ({"ratio": 1.01}, "context.ratio"),
        ({"ratio": math.nan}, "context.ratio"),
        ({"fraction": 1.5}, "context.fraction"),
        ({"status": "sleeping"}, "context.status"),
        ({"expires_seconds": 5}, "context.expires_seconds"),
        ({"tokens_total": -1}, "context.tokens_total"),
    ],
)
def test_a_context_that_cannot_be_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        a_context(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "changes",
    [{"ratios": (0.2, 0.1)}, {"ratios": (0.1, 0.1)}, {"stored_bytes": -1}, {"generation": "a:b"}],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=r"cache\."):
        a_cache(**changes)


@pytest.mark.parametrize("name", ["", "a" * 129, "a b", "a:b", "a/b", ".hidden", "é", "a\n"])
def test_a_name_that_could_leave_its_key_or_folder_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="tenant"):
        check_name("tenant", name)


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "-x", "a" * 128])
def test_a_name_of_plain_characters_is_taken(name: str) -> None:
    check_name("tenant", name)


def test_an_expiry_counts_from_its_anchor() -> None:
    assert Expiry("created_at", 10).at(100.0, 500.0) == 110.0
    assert Expiry("last_used_at", 10).at(100.0, 500.0) == 510.0
    assert Expiry("last_used_at", 10).at(100.0, None) == 110.0


@pytest.mark.parametrize("seconds", [0, -1])
def test_an_expiry_in_no_time_is_refused(seconds: int) -> None:
    with pytest.raises(Invalid, match=str(seconds)):
        Expiry("created_at", seconds)


def test_every_field_of_a_record_survives_when_all_are_set() -> None:
    record = a_context(
        name="n",
        metadata={"k": "v"},
        stage="scoring",
        fraction=0.1,
        ready_at=1.5,
        last_used_at=2.5,
        expires_at=3.5,
        expires_anchor="last_used_at",
        expires_seconds=7,
        ratio_achieved=0.31,
        ratios_available=(0.1, 0.3),
        stored_bytes=3,
        timings={"a": 1.0},
        queries=2,
        error_code="c",
        error_detail="d",
        refresh_requested_at=7.0,
        tokens_asked=900,
        max_loss=0.05,
        ratio_from=0.15,
        fidelity=Fidelity(1, 36, 0.3, (RatioFidelity(0.3, 0.4, 0.9, 0.01),)),
    )
    assert set(record.to_hash()) == {field.name for field in fields(ContextRecord)}
    assert ContextRecord.from_hash(record.to_hash()) == record


def test_without_its_cache_a_record_says_nothing_that_the_cache_did() -> None:
    ready = a_context(
        status="ready",
        name="n",
        queries=2,
        stage="storing",
        fraction=1.0,
        ratio_achieved=0.31,
        ratios_available=(0.1, 0.3),
        stored_bytes=3,
        refresh_requested_at=7.0,
        fidelity=Fidelity(1, 36, 0.3, (RatioFidelity(0.3, 0.4, 0.9, 0.01),)),
    )
    assert ready.without_cache() == a_context(name="n", queries=2)
