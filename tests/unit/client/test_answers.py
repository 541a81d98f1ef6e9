import pytest

from kvkeep_client import Context, ContextNotReady, KVKeep, StreamInterrupted, Unavailable

from .stand_in import StandIn


@pytest.fixture
def context(kv: KVKeep) -> Context:
    return kv.contexts.create("some words").wait()


def test_the_pieces_equal_the_answer(server: StandIn, context: Context) -> None:
    server.pieces = [
        "31",
        " M\N{LATIN SMALL LETTER A WITH DIAERESIS}rz",
        "\u2028",
        "\U0001f600\r\n",
        "",
    ]
    stream = context.stream("When?")
    assert list(stream) == server.pieces
    assert stream.answer.answer == "".join(server.pieces)
    assert stream.answer.usage.completion_tokens == 5


def test_there_is_no_answer_before_the_end(context: Context) -> None:
    with context.stream("When?") as stream, pytest.raises(RuntimeError, match="to its end"):
        _ = stream.answer


def test_an_error_before_the_first_token_is_raised_by_the_call(kv: KVKeep) -> None:
    context = kv.contexts.create("some words")
    with pytest.raises(ContextNotReady):
        context.stream("When?")


def test_an_error_on_the_way_is_raised_where_the_text_ends(
    server: StandIn, context: Context
) -> None:
    server.stream_ends_with = "error"
    received: list[str] = []
    with pytest.raises(Unavailable) as caught:
        received.extend(context.stream("When?"))
    assert received == server.pieces
    assert caught.value.code == "worker_unavailable"
    assert caught.value.status == 503
    assert caught.value.request_id == "req_of_the_body"


@pytest.mark.parametrize("end", ["silence", "break"])
def test_an_answer_that_breaks_off_never_passes_for_whole(
    server: StandIn, context: Context, end: str
) -> None:
    server.stream_ends_with = end
    received: list[str] = []
    stream = context.stream("When?")
    with pytest.raises(StreamInterrupted) as caught:
        received.extend(stream)
    assert received == server.pieces
    assert caught.value.request_id == "req_of_the_header"
    with pytest.raises(RuntimeError):
        _ = stream.answer


def test_a_question_whose_text_was_handed_out_is_not_asked_again(
    server: StandIn, context: Context
) -> None:
    server.stream_ends_with = "break"
    with pytest.raises(StreamInterrupted):
        list(context.stream("When?"))
    assert len([seen for seen in server.calls("POST") if seen.path.endswith("/query")]) == 1


def test_leaving_the_loop_hangs_up(server: StandIn, context: Context) -> None:
    server.stream_ends_with = "forever"
    for _ in context.stream("When?"):
        break
    assert server.hung_up.wait(timeout=30)


def test_closing_hangs_up(server: StandIn, context: Context) -> None:
    server.stream_ends_with = "forever"
    stream = context.stream("When?")
    stream.close()
    stream.close()
    assert server.hung_up.wait(timeout=30)
