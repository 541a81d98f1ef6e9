"""Contexts in codes of 8 and 4 bits: smaller, and answered alike from memory and from disk."""

from pathlib import Path

import pytest

from ..support.documents import contract
from ..support.server import Server

pytestmark = pytest.mark.e2e

QUESTION = "How many days does the carrier have in matters of payment?"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_quantised_context_answers_the_same_after_a_restart(
    tmp_path: Path, tiny_model: Path, dtype: str
) -> None:
    text = contract("Carriage of goods by road", 20)
    settings = {"model": tiny_model, "threads": 1, "dtype": dtype}
    with Server(tmp_path / "data", **settings) as server:
        contexts = {
            kind: server.create(text, compression={"quantization": kind})
            for kind in ("none", "int8", "fp8", "int4")
        }
        for kind, context in contexts.items():
            assert context["compression"]["quantization"] == kind
        stored = [context["compression"]["stored_bytes"] for context in contexts.values()]
        assert stored == sorted(stored, reverse=True)
        assert len(set(stored)) == len(server.generations()) == 4
        before = [server.ask(x["id"], QUESTION, max_tokens=24) for x in contexts.values()]
        assert {answer["timings"]["source"] for answer in before} == {"resident"}
        lower = server.ask(contexts["int4"]["id"], QUESTION, max_tokens=24, ratio=0.2)
        server.kill()
        server.start()
        after = [server.ask(x["id"], QUESTION, max_tokens=24) for x in contexts.values()]
        assert {answer["timings"]["source"] for answer in after} == {"store"}
        for warm, cold in zip(before, after, strict=True):
            assert cold["token_ids"] == warm["token_ids"]
        again = server.ask(contexts["int4"]["id"], QUESTION, max_tokens=24, ratio=0.2)
        assert again["token_ids"] == lower["token_ids"]
