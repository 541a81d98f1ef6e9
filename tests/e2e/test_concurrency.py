"""Many questions at once on several contexts: nobody's answer depends on anybody else's."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..support.documents import contract
from ..support.server import Server

pytestmark = pytest.mark.e2e

AT_ONCE = 8


def test_field_06_fifty_questions_at_once_are_answered_as_each_is_alone(server: Server) -> None:
    contexts = [
        server.create(contract(title, clauses))["id"]
        for title, clauses in (("Lease", 12), ("Purchase of land", 40), ("Carriage by sea", 75))
    ]
    asked = [(contexts[number % 3], _question(number)) for number in range(50)]
    alone = {pair: server.ask(*pair)["token_ids"] for pair in asked}
    # Answers that were all alike could be mixed up unseen.
    assert len({tuple(ids) for ids in alone.values()}) == len(asked)

    random.Random(1).shuffle(asked)
    # A build runs in between, and must disturb nobody either.
    building = server.register(contract("Something else to read", 120))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        together = list(threads.map(lambda pair: server.ask(*pair)["token_ids"], asked))
    differing = [pair for pair, ids in zip(asked, together, strict=True) if ids != alone[pair]]
    assert differing == []
    assert server.query(building["id"], "Who pays?", wait=60).status_code == 200


def test_field_58_equal_documents_registered_at_once_are_built_once(server: Server) -> None:
    before = len(server.generations())
    text = contract("Registered by several at once", 30)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        contexts = list(threads.map(lambda _: server.create(text), range(AT_ONCE)))
    assert len({context["id"] for context in contexts}) == AT_ONCE
    assert len(server.generations()) == before + 1
    answers = {tuple(server.ask(context["id"], "Who pays?")["token_ids"]) for context in contexts}
    assert len(answers) == 1


def _question(number: int) -> str:
    """A question of its own words and length."""
    words = contract("Words to ask with", 5).split()
    return " ".join(random.Random(number).choices(words, k=5 + number))
