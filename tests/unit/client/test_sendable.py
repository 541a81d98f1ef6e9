"""What cannot be sent is refused before anything is, with the name of the argument."""

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvkeep_client import AsyncKVKeep, ExpiresAfter, KVKeep

from .conftest import Served
from .stand_in import StandIn

NAN, INFINITY = float("nan"), float("inf")
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

# How it is asked, what is wrong, and what must be said.
QUERIES: list[tuple[str, Any, Mapping[str, Any], str]] = [
    ("query", 5, {}, "question: must be a text or a list of messages, not int"),
    ("query", None, {}, "question: must be a text or a list of messages, not NoneType"),
    ("query", b"who?", {}, "question: must be a text or a list of messages, not bytes"),
    ("query", [{"role": "user", "content": b"x"}], {}, "messages.0.content: bytes cannot be sent"),
    ("query", "who?", {"ratio": NAN}, "ratio: must be a finite number, not nan"),
    ("query", "who?", {"min_ratio": -INFINITY}, "min_ratio: must be a finite number, not -inf"),
    ("query", "who?", {"temperature": INFINITY}, "temperature: must be a finite number, not inf"),
    ("query", "who?", {"max_tokens": 3j}, "max_tokens: complex cannot be sent as JSON"),
    ("query", "who?", {"seed": 10**5000}, r"seed: must be a number below 2\*\*1024"),
    ("query", "who?", {"stop": ["a", {1}]}, "stop.1: set cannot be sent as JSON"),
    (
        "query",
        "who?",
        {"chat_template_kwargs": {"a": {"b": NAN}}},
        "chat_template_kwargs.a.b: must be a finite number, not nan",
    ),
    ("query", "who?", {"chat_template_kwargs": {1: 2}}, "the names in it must be texts, not 1"),
    ("query", "who?", {"chat_template_kwargs": {"a": DEEP}}, "nested more than 100 deep"),
    ("query_many", 5, {}, "questions: must be a list of texts, not int"),
    ("query_many", "who?", {}, "questions: must be a list of texts, not one text"),
    ("query_many", ["who?"], {"top_p": NAN}, "top_p: must be a finite number, not nan"),
    ("stream", 5, {}, "question: must be a text or a list of messages, not int"),
]
CREATIONS: list[tuple[Any, Mapping[str, Any], str]] = [
    (b"words", {}, "document: bytes cannot be sent as JSON"),
    (Path("lease.txt"), {}, "document: .*Path cannot be sent as JSON"),
    ("words", {"ratio": NAN}, "ratio: must be a finite number, not nan"),
    ("words", {"max_loss": INFINITY}, "max_loss: must be a finite number, not inf"),
    ("words", {"tokens": -(10**5000)}, r"tokens: must be a number below 2\*\*1024"),
    ("words", {"idempotency_key": 7}, "idempotency_key: must be a text, not int"),
    *(
        ("words", {"idempotency_key": key}, "idempotency_key: must be visible ASCII characters")
        for key in ("", " a", "Schlüssel", "\ud800", "a\nb")
    ),
    ("words", {"metadata": {"a": {1}}}, "metadata.a: set cannot be sent as JSON"),
    ("words", {"protect": 5}, "protect: must be a list of pairs .*, not int"),
    ("words", {"protect": [(0, 4), 7]}, r"protect.1: must be a pair \(start, end\), not 7"),
    ("words", {"expires_after": 60}, r"expires_after: must be ExpiresAfter\(seconds\) or None"),
    ("words", {"expires_after": ExpiresAfter(NAN)}, "expires_after.seconds: must be a finite"),  # type: ignore[arg-type]  # on purpose
]


@pytest.fixture
async def akv(served: Served) -> AsyncIterator[AsyncKVKeep]:
    async with AsyncKVKeep(served.url) as kv:
        yield kv


def test_what_cannot_be_asked_is_named(server: StandIn, kv: KVKeep) -> None:
    context = kv.contexts.create("some words")
    for method, asked, options, told in QUERIES:
        with pytest.raises((TypeError, ValueError), match=told):
            getattr(context, method)(asked, **options)
    assert len(server.seen) == 1


@pytest.mark.anyio
async def test_what_cannot_be_asked_is_named_to_those_who_await(
    server: StandIn, akv: AsyncKVKeep
) -> None:
    context = await akv.contexts.create("some words")
    for method, asked, options, told in QUERIES:
        with pytest.raises((TypeError, ValueError), match=told):
            await getattr(context, method)(asked, **options)
    assert len(server.seen) == 1


def test_what_cannot_be_registered_is_named(server: StandIn, kv: KVKeep) -> None:
    for document, options, told in CREATIONS:
        with pytest.raises((TypeError, ValueError), match=told):
            kv.contexts.create(document, **options)
    assert not server.seen


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda kv: kv.contexts.get(5), "a context id is a text, not int"),
        (lambda kv: kv.contexts.get("\ud800"), "context_id: a lone surrogate is not text"),
        (lambda kv: kv.contexts.delete("\ud800"), "context_id: a lone surrogate is not text"),
        (lambda kv: list(kv.contexts.list(metadata=5)), "metadata: must be a mapping"),
        (lambda kv: list(kv.contexts.list(metadata={"\ud800": ""})), "metadata: a lone surrogate"),
        (lambda kv: list(kv.contexts.list(metadata={"a": "\ud800"})), "metadata.a: a lone surr"),
        (lambda kv: list(kv.contexts.list(status="\ud800")), "status: a lone surrogate"),
        (lambda kv: list(kv.contexts.list(status=["ready"])), "status: must be a text, not list"),
        (lambda kv: KVKeep(kv.url, timeout_seconds=NAN), "timeout_seconds: must be 0 or more"),
        (lambda kv: KVKeep(kv.url, timeout_seconds=0), "timeout_seconds: must be above 0"),
        (lambda kv: KVKeep(kv.url, max_retries=1.5), "max_retries: must be a whole number"),
        (lambda kv: _context(kv).update(metadata=5), "metadata: must be a mapping"),
        (lambda kv: _context(kv).update(name={1}), "name: set cannot be sent as JSON"),
        (lambda kv: _context(kv).wait(timeout_seconds=NAN), "timeout_seconds: must be 0 or more"),
        (lambda kv: _context(kv).wait(timeout_seconds=10**400), "timeout_seconds: must be a numb"),
        (lambda kv: _context(kv).wait(timeout_seconds="1"), "timeout_seconds: must be a number"),
    ],
)
def test_arguments_of_other_calls_are_named(
    kv: KVKeep, wrong: Callable[[KVKeep], object], told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        wrong(kv)


@pytest.mark.parametrize("client", [KVKeep, AsyncKVKeep])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        # As a file has it whose last line ends; nothing shows the key.
        ({"api_key": "secret\n"}, r"^api_key: must be visible ASCII characters[^\n]*$"),
        ({"api_key": "Schlüssel"}, r"^api_key: must be visible ASCII characters"),
        ({"api_key": 5}, "api_key: must be a text, not int"),
        ({"url": 5}, "URL must be a text, not int"),
        ({"url": "http://"}, "names no host"),
        ({"url": "http://[::1"}, "cannot be read"),
    ],
)
def test_a_client_that_could_reach_nobody_is_not_made(
    client: Callable[..., object], options: Mapping[str, Any], told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        client(**options)


def test_mappings_and_tuples_of_any_kind_can_be_sent(server: StandIn, kv: KVKeep) -> None:
    kv.contexts.create("some words", metadata=MappingProxyType({"matter": "1"}), protect=((0, 4),))
    assert server.seen[0].body == {
        "document": "some words",
        "metadata": {"matter": "1"},
        "protect": [{"start": 0, "end": 4}],
    }


def _context(kv: KVKeep) -> Any:
    return kv.contexts.create("some words")
