"""``ratio: "auto"`` through the real server: found by a build, kept, and known at once later."""

import pytest

from ..support.documents import contract
from ..support.server import Server, eventually

pytestmark = pytest.mark.e2e

TEXT = contract("Towage of barges above the third lock", 60)


def test_a_ratio_that_is_asked_for_by_its_loss_is_found_kept_and_known_at_once(
    server: Server,
) -> None:
    asked = {"ratio": "auto", "max_loss": 0.05}
    # Before the build nobody knows it.
    first = server.register(TEXT, compression=asked)
    assert (first["status"], first["compression"]["ratio"]) == ("queued", None)
    found = server.create(TEXT, compression=asked)
    told, fidelity = found["compression"], found["fidelity"]
    assert told["max_loss"] == 0.05
    assert told["ratio"] == told["ratios_available"][-1]
    assert told["ratio_achieved"] == pytest.approx(told["ratio"], abs=2e-3)

    # What was measured allows the ratio, and forbids those measured below it.
    losses = {
        one["ratio"]: max(0.0, one["nll_kept"] - fidelity["nll_full"]) + 1.75 * one["loss_error"]
        for one in fidelity["ratios"]
    }
    assert losses.get(told["ratio"], 0.0) <= 0.05
    assert all(loss > 0.05 for ratio, loss in losses.items() if ratio < told["ratio"])

    # Operators see it too.
    metrics = server.http.get("/metrics").text
    assert 'kvkeep_builds_total{outcome="committed"}' in metrics
    assert "kvkeep_build_loss_nats_count" in metrics

    # It is an ordinary ratio from then on.
    answer = server.ask(found["id"], "How many euros are paid?")
    assert answer["ratio"] == told["ratio"]
    # What was measured decides for whoever comes later, without a build.
    known = server.register(TEXT, compression=asked)
    assert (known["status"], known["compression"]["ratio"]) == ("ready", told["ratio"])

    stored = set(server.generations())
    assert server.http.post(f"/contexts/{found['id']}/rebuild").status_code == 202
    eventually(lambda: set(server.generations()) - stored)
    assert server.context(found["id"])["compression"]["ratio"] == told["ratio"]
    again = server.ask(found["id"], "How many euros are paid?")
    assert again["token_ids"] == answer["token_ids"]


def test_a_document_that_cannot_be_measured_keeps_everything(server: Server) -> None:
    context = server.create(contract("Short", 15), compression={"ratio": "auto"})
    assert context["compression"]["ratio"] == 1.0


def test_a_loss_that_is_no_number_or_without_auto_is_refused(server: Server) -> None:
    for compression, field in (
        ({"ratio": "auto", "max_loss": -1}, "compression.max_loss"),
        ({"ratio": 0.3, "max_loss": 0.1}, "compression.max_loss"),
        ({"ratio": "automatic"}, "compression.ratio"),
    ):
        refused = server.http.post("/contexts", json={"document": TEXT, "compression": compression})
        assert refused.status_code == 422
        assert field in refused.text
