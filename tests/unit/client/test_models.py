from collections.abc import Callable
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime

import pytest

from kvkeep_client import UnexpectedResponse
from kvkeep_client.fields import Fields
from kvkeep_client.models import BuildProgress, read_answer, read_context, read_page
from kvkeep_client.shown import details

from .stand_in import JSON, StandIn, answer_object, context_object


def ready() -> JSON:
    server = StandIn(contexts={"ctx": context_object(1, {"document": "a b c", "name": "Lease"})})
    server.finish("ctx", "ready")
    return server.contexts["ctx"]


def test_a_context_is_read_whole() -> None:
    info = read_context(Fields(ready(), "context"))
    assert (info.name, info.status, info.is_ready) == ("Lease", "ready", True)
    assert info.created_at == datetime(2026, 11, 29, 15, 12, 7, 123000, tzinfo=UTC)
    assert (info.tokens.document, info.tokens.protected, info.tokens.total) == (3, 3, 6)
    assert info.compression.ratios_available == (0.15, 0.3)
    assert info.compression.stored_bytes == 2048
    assert info.timings == {"prefill_s": 4.2}
    assert info.progress is None
    assert info.error is None


def test_a_context_being_built_says_how_far_it_is() -> None:
    info = read_context(Fields(context_object(1, {"document": "a"}), "context"))
    assert info.progress == BuildProgress(stage="queued", fraction=0.0)
    assert info.compression.ratio_achieved is None
    assert not info.is_settled


def test_an_answer_is_read_whole() -> None:
    ids = {"prompt_token_ids": [1, 2], "token_ids": [3]}
    answer = read_answer(Fields(answer_object("ctx_1", "On 31 March.") | ids, "answer"))
    assert (answer.answer, answer.finish_reason) == ("On 31 March.", "stop")
    assert (answer.usage.cached_tokens, answer.usage.total_tokens) == (40, 53)
    assert answer.timings.source == "store"
    assert (answer.prompt_token_ids, answer.token_ids) == ((1, 2), (3,))


def test_token_ids_are_none_when_nobody_asked() -> None:
    answer = read_answer(Fields(answer_object("ctx_1", "Yes."), "answer"))
    assert (answer.prompt_token_ids, answer.token_ids) == (None, None)


def test_fields_of_a_newer_server_are_kept_and_harm_nothing() -> None:
    info = read_context(Fields(ready() | {"colour": "green"}, "context"))
    assert info.received["colour"] == "green"
    assert "colour" not in repr(info)


def test_what_the_server_said_cannot_be_changed() -> None:
    info = read_context(Fields(ready(), "context"))
    with pytest.raises(FrozenInstanceError):
        info.status = "failed"  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda o: o.pop("status"), "context.status is missing"),
        (lambda o: o.update(status=3), "context.status: expected a string, got int"),
        (lambda o: o.update(queries="17"), "context.queries: expected a whole number"),
        (lambda o: o.update(queries=True), "context.queries: expected a whole number"),
        (lambda o: o.update(tokens=None), "context.tokens: expected a JSON object, got null"),
        (lambda o: o["tokens"].pop("total"), "context.tokens.total is missing"),
        (lambda o: o.update(created_at="yesterday"), "context.created_at: expected an RFC 3339"),
        (lambda o: o.update(timings={"x": "1"}), "context.timings.x: expected a number"),
        (lambda o: o["compression"].update(ratios_available=[0.1, "0.3"]), "an array of numbers"),
        (lambda o: o["compression"].update(ratios_available=0.3), "expected an array"),
    ],
)
def test_a_field_of_another_type_is_named(change: Callable[[JSON], object], named: str) -> None:
    context = ready()
    change(context)
    with pytest.raises(UnexpectedResponse, match=named):
        read_context(Fields(context, "context"))


def test_a_page_knows_where_the_next_one_starts() -> None:
    page = read_page(Fields({"data": [ready()], "last_id": "ctx_9", "has_more": True}, "list"))
    assert (len(page.contexts), page.last_id, page.has_more) == (1, "ctx_9", True)


def test_a_page_that_does_not_say_whether_it_is_the_last_is_refused() -> None:
    with pytest.raises(UnexpectedResponse, match="has_more: expected true or false"):
        read_page(Fields({"data": [], "last_id": None, "has_more": "no"}, "list"))


def test_what_was_lost_is_read_and_worked_out() -> None:
    shown = context_object(1, {"document": "x", "compression": {"ratio": "auto", "max_loss": 0.1}})
    at_ratio = {"ratio": 0.3, "nll_kept": 0.55, "top1_agreement": 0.9, "loss_error": 0.01}
    measured = {"spans": 2, "tokens": 72, "nll_full": 0.5, "nll_kept": 0.55, "top1_agreement": 0.9}
    info = read_context(Fields.of({**shown, "fidelity": {**measured, "ratios": [at_ratio]}}, "it"))
    assert (info.compression.ratio, info.compression.max_loss) == (None, 0.1)
    assert info.fidelity is not None
    assert info.fidelity.loss == pytest.approx(0.05)
    assert info.fidelity.ratios[0].loss_error == 0.01


def test_what_was_not_measured_at_the_contexts_own_ratio_is_none_and_the_rest_is_shown() -> None:
    at_ratio = {"ratio": 0.3, "nll_kept": 0.55, "top1_agreement": 0.9, "loss_error": 0.01}
    measured = {"spans": 2, "tokens": 72, "nll_full": 0.5, "nll_kept": None, "top1_agreement": None}
    fidelity = {**measured, "ratios": [at_ratio]}
    info = read_context(Fields.of({**ready(), "fidelity": fidelity}, "it"))
    assert info.fidelity is not None
    assert info.fidelity.loss is None
    assert dict(details(info))["lost"].endswith("nats per token: +0.050 at 0.3")
