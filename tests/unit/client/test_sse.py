import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_client import UnexpectedResponse
from kvkeep_client.sse import EventDecoder


def decoded(chunks: list[bytes]) -> list[tuple[str, object]]:
    decoder = EventDecoder()
    return [(event.name, event.data.values) for chunk in chunks for event in decoder.feed(chunk)]


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


@given(
    texts=st.lists(st.text(), min_size=1, max_size=4),
    cuts=st.lists(st.integers(min_value=0)),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_any_text_survives_however_it_is_cut(
    texts: list[str], cuts: list[int], newline: str
) -> None:
    lines = [
        f"event: token{newline}data: {json.dumps({'text': text}, ensure_ascii=False)}{newline * 2}"
        for text in texts
    ]
    # A comment at the end: a lone CR is only known to be one when the next byte is there.
    data = "".join([*lines, ": ping\n\n"]).encode()
    assert decoded(chunked(data, cuts)) == [("token", {"text": text}) for text in texts]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_newlines_end_a_line(separator: str) -> None:
    # All of these end a line for str.splitlines.
    text = json.dumps({"text": f"a{separator}b"}, ensure_ascii=False)
    assert decoded([f"data: {text}\n\n".encode()]) == [("message", {"text": f"a{separator}b"})]


def test_comments_and_unknown_fields_are_no_events() -> None:
    assert decoded([b": ping\n\nid: 7\nretry: 100\n\nevent: lonely\n\n"]) == []


def test_data_on_several_lines_is_one_value() -> None:
    assert decoded([b'data: {"a":\ndata: 1}\n\n']) == [("message", {"a": 1})]


def test_a_name_holds_for_one_event_only() -> None:
    stream = [b'event: done\ndata: {}\n\ndata: {"a": 1}\n\n']
    assert decoded(stream) == [("done", {}), ("message", {"a": 1})]


def test_an_event_that_was_not_finished_is_never_handed_out() -> None:
    assert decoded([b'event: done\ndata: {"a": 1}\n']) == []


@pytest.mark.parametrize("data", [b"data: nonsense\n\n", b"data: [1]\n\n", b"data: \xff\xff\n\n"])
def test_a_stream_that_is_not_kvkeeps_is_refused(data: bytes) -> None:
    with pytest.raises(UnexpectedResponse):
        decoded([data])
