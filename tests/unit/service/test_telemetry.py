import json

import pytest
import structlog

from kvkeep_service.telemetry import set_up_logging, where

SECRET = "the text of a document"


def fail() -> None:
    raise KeyError(SECRET)


def fail_because() -> None:
    try:
        fail()
    except KeyError as error:
        raise RuntimeError(SECRET) from error


def test_an_error_is_described_by_type_and_place_never_by_its_message() -> None:
    with pytest.raises(RuntimeError) as failed:
        fail_because()
    lines = where(failed.value)
    assert [line.split()[0] for line in lines] == ["RuntimeError", "KeyError"]
    assert "test_telemetry.py" in lines[0]
    assert SECRET not in str(lines)


def test_a_chain_that_never_ends_is_cut() -> None:
    error = last = ValueError(SECRET)
    for _ in range(100):
        error.__cause__ = ValueError(SECRET)
        error = error.__cause__
    assert len(where(last)) == 8


def test_a_log_line_is_json_on_stderr_with_the_request_id(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging()
    try:
        with structlog.contextvars.bound_contextvars(request_id="req_1"):
            structlog.get_logger("test").info("request", status=200)
    finally:
        structlog.reset_defaults()
    out, err = capsys.readouterr()
    line = json.loads(err)
    assert out == ""
    assert (line["event"], line["status"], line["request_id"]) == ("request", 200, "req_1")
