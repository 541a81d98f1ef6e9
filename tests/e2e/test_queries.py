"""Answers as they are written: pieces, ends, seeds, ratios, and askers who go away."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from kvkeep_client import KVKeep

from ..support.documents import contract
from ..support.server import Server

pytestmark = pytest.mark.e2e

QUESTION = "Who insures the goods, and for how long?"
# As many as the engine decodes together; one more query has to wait for one of them to end.
RUNNING_AT_ONCE = 32


@pytest.fixture(scope="module")
def context(server: Server) -> str:
    created = server.create(contract("Carriage of goods", 30))
    return str(created["id"])


def test_streamed_pieces_are_the_answer_and_equal_the_one_given_whole(
    server: Server, context: str
) -> None:
    whole = server.ask(context, QUESTION, max_tokens=60)
    with _stream(server, context, max_tokens=60) as events:
        *tokens, done = list(events)
    assert [name for name, _ in tokens] == ["token"] * len(tokens)
    assert [data["index"] for _, data in tokens] == list(range(len(tokens)))
    assert len(tokens) > 1
    assert done[0] == "done"
    assert "".join(data["text"] for _, data in tokens) == done[1]["answer"] == whole["answer"]
    assert done[1]["token_ids"] == whole["token_ids"]
    assert done[1]["usage"] == whole["usage"]


def test_text_of_broken_characters_is_that_of_the_whole_answer(
    server: Server, context: str, tiny_model: Path
) -> None:
    # Sampled from a random model, byte tokens come in any order: halves of characters abound.
    with _stream(server, context, max_tokens=200, temperature=2.0, seed=3) as events:
        *tokens, (_, answer) = list(events)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert answer["answer"] == tokenizer.decode(answer["token_ids"], skip_special_tokens=True)
    assert "".join(data["text"] for _, data in tokens) == answer["answer"]
    assert "\N{REPLACEMENT CHARACTER}" in answer["answer"]
    assert all(data["text"] for _, data in tokens)


def test_the_sdk_streams_the_same_answer(server: Server, context: str) -> None:
    with KVKeep(server.url) as kv:
        stream = kv.contexts.get(context).stream(QUESTION, max_tokens=20)
        assert "".join(stream) == stream.answer.answer
        assert stream.answer.answer == server.ask(context, QUESTION, max_tokens=20)["answer"]


def test_an_answer_ends_at_max_tokens_and_says_so(server: Server, context: str) -> None:
    for most in (1, 2, 7):
        answer = server.ask(context, QUESTION, max_tokens=most)
        assert answer["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == most


def test_an_answer_ends_where_the_positions_of_the_model_end(server: Server) -> None:
    most = server.http.get("/version").json()["max_document_tokens"]
    context = server.create(" pear" * (most - 40), compression={"policy": "none"})
    answer = server.ask(context["id"], QUESTION, max_tokens=1000)
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 8192


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(server: Server, context: str) -> None:
    whole = server.ask(context, QUESTION, max_tokens=40)["answer"]
    # It begins inside one token and ends inside another.
    stop = whole[20:40]
    expected = whole[: whole.index(stop)]
    answer = server.ask(context, QUESTION, max_tokens=40, stop=["no such words", stop])
    assert answer["answer"] == expected
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 40
    with _stream(server, context, max_tokens=40, stop=[stop]) as events:
        *tokens, _ = list(events)
    assert "".join(data["text"] for _, data in tokens) == expected


def test_a_seed_gives_the_same_answer_again_and_another_gives_another(
    server: Server, context: str
) -> None:
    def sampled(seed: int) -> list[int]:
        options = {"temperature": 1.5, "top_p": 0.99, "top_k": 1000, "seed": seed}
        ids: list[int] = server.ask(context, QUESTION, **options)["token_ids"]
        return ids

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_a_lower_ratio_answers_as_a_cache_that_was_built_at_it(server: Server) -> None:
    text = contract("Ratios of one document", 40)
    at_tenth = {"ratio": 0.1, "allow_lossy": True}
    built_low = server.create(text, compression=at_tenth)
    alone = server.ask(built_low["id"], QUESTION)
    assert alone["ratio"] == 0.1

    built_high = server.create(text, compression={"ratio": 0.5})
    read_low = server.ask(built_high["id"], QUESTION, **at_tenth)
    read_high = server.ask(built_high["id"], QUESTION)
    assert (read_low["ratio"], read_high["ratio"]) == (0.1, 0.5)
    assert read_low["token_ids"] == alone["token_ids"]
    assert read_high["token_ids"] != alone["token_ids"]
    # The context that was built low stays low, though its cache now holds more.
    again = server.ask(built_low["id"], QUESTION)
    assert (again["ratio"], again["token_ids"]) == (0.1, alone["token_ids"])


def test_askers_who_go_away_free_their_places(server: Server, context: str) -> None:
    with ExitStack() as stays, ExitStack() as leaves:
        staying = stays.enter_context(_stream(server, context, max_tokens=800))
        leaving = [
            leaves.enter_context(_stream(server, context, max_tokens=5000))
            for _ in range(RUNNING_AT_ONCE - 1)
        ]
        for events in (staying, *leaving):
            assert next(events)[0] == "token"
        leaves.close()
        # All places were taken, and the first to end by itself would be the one who stays.
        late = server.ask(context, QUESTION, max_tokens=2)
        *_, (name, stayed) = list(staying)
    assert name == "done"
    assert stayed["usage"]["completion_tokens"] == 800
    assert late["created_at"] < stayed["created_at"]


def _stream(server: Server, context_id: str, **fields: object) -> "_Events":
    return _Events(server, context_id, fields)


class _Events:
    """The events of one streamed answer, with a connection of its own that can be dropped."""

    def __init__(self, server: Server, context_id: str, fields: dict[str, object]) -> None:
        self._client = httpx2.Client(base_url=server.url, timeout=server.http.timeout)
        body = {"question": QUESTION, "stream": True, "return_token_ids": True, **fields}
        self._response = self._client.stream("POST", f"/contexts/{context_id}/query", json=body)

    def __enter__(self) -> Iterator[tuple[str, Any]]:
        response = self._response.__enter__()
        assert response.status_code == 200
        return self._events(response.iter_lines())

    def __exit__(self, *_: object) -> None:
        self._response.__exit__(None, None, None)
        self._client.close()

    @staticmethod
    def _events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))
