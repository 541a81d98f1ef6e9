"""The names that users may rely on: a change here is a change of the SDK's version."""

import inspect

import pytest

import kvkeep_client
from kvkeep_client import (
    AnswerStream,
    AsyncAnswerStream,
    AsyncContext,
    AsyncContexts,
    AsyncKVKeep,
    AsyncSession,
    Context,
    Contexts,
    KVKeep,
    KVKeepError,
    Session,
)


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_package_exports_what_it_promises() -> None:
    exported = {name for name in vars(kvkeep_client) if not name.startswith("_")}
    modules = {name for name, value in vars(kvkeep_client).items() if inspect.ismodule(value)}
    assert exported - modules == set(kvkeep_client.__all__)


def test_every_error_can_be_imported_from_the_package() -> None:
    found, waiting = set[str](), [KVKeepError]
    while waiting:
        kind = waiting.pop()
        found.add(kind.__name__)
        waiting += kind.__subclasses__()
    assert found <= set(kvkeep_client.__all__)


def test_the_clients_methods_are_these() -> None:
    assert public(KVKeep) == {"close", "url"}
    assert public(Contexts) == {"create", "delete", "get", "list"}
    assert public(Context) == {
        "delete",
        "document",
        "events",
        "id",
        "name",
        "prefetch",
        "query",
        "query_many",
        "rebuild",
        "refresh",
        "session",
        "status",
        "stream",
        "update",
        "wait",
    }
    assert public(Session) == {"answer_id", "ask", "fork", "stream"}


@pytest.mark.parametrize(
    ("blocking", "twin"),
    [
        (KVKeep, AsyncKVKeep),
        (Contexts, AsyncContexts),
        (Context, AsyncContext),
        (Session, AsyncSession),
        (AnswerStream, AsyncAnswerStream),
    ],
)
def test_the_client_for_event_loops_has_the_same_methods(blocking: type, twin: type) -> None:
    assert public(blocking) == public(twin)
    for name in public(blocking):
        if callable(getattr(blocking, name)):
            parameters = [inspect.signature(getattr(kind, name)) for kind in (blocking, twin)]
            assert parameters[0].parameters == parameters[1].parameters, name
