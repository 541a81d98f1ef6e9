"""Policies through the real server: exact shares, budgets of tokens, refusals by name."""

import pytest

from ..support.documents import contract
from ..support.server import Server

pytestmark = pytest.mark.e2e

QUESTION = "How many days does the carrier have in matters of payment?"


def test_every_policy_keeps_its_share_and_answers(server: Server) -> None:
    text = contract("Carriage of goods by inland waterway", 15)
    ids = set()
    for name in ("kvzip", "snapkv", "expected_attention", "streaming", "random", "none"):
        context = server.create(text, compression={"policy": name})
        told = context["compression"]
        assert told["policy"] == told["policy_applied"] == name
        assert told["ratio"] == (1.0 if name == "none" else 0.3)
        assert told["ratio_achieved"] == pytest.approx(told["ratio"], abs=1e-3)
        assert told["scoring"] == ("local" if name == "kvzip" else "none")
        assert told["tokens"] is None
        ids.add(tuple(server.ask(context["id"], QUESTION)["token_ids"]))
    assert len(ids) > 1, "what is kept changes what a random model says"


def test_whole_heads_are_refused_until_the_model_is_calibrated(server: Server) -> None:
    body = {"document": contract("Lease", 15), "compression": {"policy": "kvzip_head"}}
    refused = server.http.post("/contexts", json=body)
    assert (refused.status_code, refused.json()["code"]) == (409, "head_scores_missing")
    assert "kvkeep-server calibrate" in refused.json()["detail"]


def test_a_budget_of_tokens_is_kept_reported_and_shared(server: Server) -> None:
    text = contract("Lease of a crane", 15)
    asked = {"policy": "streaming", "tokens": 120}
    first = server.create(text, compression=asked)
    told, eligible = first["compression"], first["tokens"]["document"]
    assert told["tokens"] == 120
    assert told["ratio"] == told["ratio_achieved"] == 120 / eligible
    assert told["ratio"] in told["ratios_available"]
    answer = server.ask(first["id"], QUESTION)
    assert answer["ratio"] == told["ratio"]

    # An equal cache is there: nothing is built, and the answer is the same.
    again = server.register(text, compression=asked)
    assert (again["status"], again["compression"]["tokens"]) == ("ready", 120)
    assert server.ask(again["id"], QUESTION)["token_ids"] == answer["token_ids"]

    everything = server.create(text, compression=asked | {"tokens": 1_000_000})
    assert everything["compression"]["ratio"] == everything["compression"]["ratio_achieved"] == 1.0
    fewest = -(-15 * eligible // 100)
    for compression, told in (
        (asked | {"tokens": 3}, f"at least {fewest}"),
        (asked | {"ratio": 0.3}, "either tokens or ratio"),
        (asked | {"tokens": 0}, "compression.tokens"),
        (asked | {"scoring": "exact"}, "compression.scoring"),
    ):
        response = server.http.post(
            "/contexts", json={"document": text, "compression": compression}
        )
        assert response.status_code == 422
        assert told in response.text
