"""Streaming text and sampling: whole characters, honest stops, reproducible draws."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_service.engine.detokenize import TextStream
from kvkeep_service.engine.sampling import Sampler, SamplingOptions

TEXTS = [
    "plain words, and more",
    "日本語 🙂 and 👩‍👩‍👧 families",
    "ends in a half \U0001f600",
    "a � that is really there",
    "\n\n  leading and trailing  \n",
]


def streamed(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.is_stopped:
            return pieces
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_are_the_whole_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    for piece in pieces:
        assert "�" not in piece or "�" in text


def test_bytes_that_never_become_a_character_are_not_lost(tokenizer: Any) -> None:
    ids = tokenizer.encode("ok 🙂", add_special_tokens=False)[:-1]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    ids = tokenizer.encode("one<|im_start|> two", add_special_tokens=False)
    assert "".join(streamed(tokenizer, ids)) == "one two"


@given(text=st.text(alphabet="abAB \n", min_size=1, max_size=30), stop=st.text("abAB", min_size=1))
def test_an_answer_ends_before_the_first_stop_string(bundled: Any, text: str, stop: str) -> None:
    tokenizer = bundled.tokenizer
    pieces = streamed(tokenizer, tokenizer.encode(text, add_special_tokens=False), (stop,))
    assert "".join(pieces) == text.partition(stop)[0]


def test_no_piece_shows_the_beginning_of_a_stop_string(tokenizer: Any) -> None:
    ids = tokenizer.encode("Paris is.\nQuestion: next", add_special_tokens=False)
    shown = ""
    for piece in streamed(tokenizer, ids, ("\nQuestion:", ".\nZebra")):
        shown += piece
        assert "Paris is.".startswith(shown)
    assert shown == "Paris is."


def draws(options: SamplingOptions, count: int = 200) -> list[int]:
    sampler = Sampler(options)
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -9.0])
    return [sampler.pick(logits) for _ in range(count)]


def test_temperature_zero_is_greedy() -> None:
    assert Sampler(SamplingOptions()).is_greedy
    assert not Sampler(SamplingOptions(temperature=1e-9)).is_greedy
    assert set(draws(SamplingOptions(temperature=1e-9))) == {0}


def test_a_seed_makes_draws_reproducible_and_another_seed_changes_them() -> None:
    one = draws(SamplingOptions(temperature=1.0, seed=1))
    assert one == draws(SamplingOptions(temperature=1.0, seed=1))
    assert one != draws(SamplingOptions(temperature=1.0, seed=2))


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        (SamplingOptions(temperature=2.0, top_k=2, seed=3), {0, 1}),
        (SamplingOptions(temperature=1.0, top_p=0.5, seed=3), {0}),
        (SamplingOptions(temperature=1.0, top_p=0.8, seed=3), {0, 1}),
        (SamplingOptions(temperature=5.0, seed=3), {0, 1, 2, 3, 4}),
        (SamplingOptions(temperature=5e-324, seed=3), {0}),
        (SamplingOptions(temperature=1.0, top_p=5e-324, seed=3), {0}),
    ],
    ids=str,
)
def test_top_k_and_top_p_leave_only_the_likely_tokens(
    options: SamplingOptions, possible: set[int]
) -> None:
    assert set(draws(options, 600)) == possible
