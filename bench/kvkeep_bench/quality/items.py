"""What every suite is made of: a document, its questions, and how an answer is judged."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Judge = Literal["contains_all", "share_contained", "withholds", "looks_like"]
PROSE = Path(__file__).resolve().parents[3] / "tests" / "data" / "alice.txt"
_SKIPPED_CHARACTERS = 2000
"""The title page and the contents of the prose."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question. ``wanted``: texts that its answer should hold, or, withheld, should not.

    Judged by looks, it is one regular expression that the whole answer should match.

    ``max_tokens`` is room for a whole sentence before the value: with 24, one wordy answer in seven
    was cut off in the middle of it, and a system was judged by how short its sentences are.
    """

    text: str
    wanted: tuple[str, ...]
    judge: Judge = "contains_all"
    max_tokens: int = 96


@dataclass(frozen=True, slots=True)
class Item:
    """One document with its questions; ``name`` says suite and number, and is unique."""

    suite: str
    name: str
    document: str
    questions: tuple[Question, ...]
    system: str | None = None
    instructions: str | None = None


Suite = Callable[[int, int], Item]
"""From a document's number and its length in words to an item; equal arguments, equal item."""


def score(question: Question, answer: str) -> float:
    """How right an answer is, in [0, 1].

    Letter case, commas in numbers, spaces and a plural's s are no matter; parts of words and of
    numbers do not count.
    """
    if question.judge == "looks_like":
        (pattern,) = question.wanted
        return float(re.fullmatch(pattern, answer.strip(), re.DOTALL) is not None)
    found = _plain(answer)
    held = [
        re.search(rf"(?<!\w){re.escape(_plain(text))}s?(?!\w)", found) is not None
        for text in question.wanted
    ]
    match question.judge:
        case "contains_all":
            return float(all(held))
        case "share_contained":
            return sum(held) / len(held)
        case "withholds":
            return float(not any(held))


def with_sentences(
    paragraphs: Sequence[str], sentences: Sequence[str], places: Sequence[int]
) -> str:
    """Prose with one sentence ending the paragraph at each place (indices, increasing)."""
    placed: dict[int, list[str]] = {}
    for sentence, place in zip(sentences, places, strict=True):
        placed.setdefault(place, []).append(sentence)
    return "\n\n".join(
        " ".join((paragraph, *placed.get(index, ()))) for index, paragraph in enumerate(paragraphs)
    )


def prose(number: int, words: int) -> list[str]:
    """Paragraphs of natural prose, ``words`` words or a little more.

    Each number begins somewhere else; the book begins anew at its end.
    """
    whole = [
        " ".join(part.split())
        for part in re.split(r"\n\s*\n", PROSE.read_text()[_SKIPPED_CHARACTERS:])
    ]
    whole = [part for part in whole if len(part.split()) > 5]
    # A step that shares no factor with most counts of paragraphs spreads the beginnings.
    first = number * 37 % len(whole)
    return list(_until(words, whole[first:] + whole[:first]))


def spread(count: int, total: int) -> list[int]:
    """``count`` places spread evenly over ``total``, neither the first nor the last."""
    return [1 + (total - 2) * index // count for index in range(count)]


def _until(words: int, paragraphs: Sequence[str]) -> Iterator[str]:
    given = 0
    for paragraph in paragraphs:
        if given >= words:
            return
        given += len(paragraph.split())
        yield paragraph


def _plain(text: str) -> str:
    without_commas = re.sub(r"(?<=\d)[,.](?=\d{3}\b)", "", text.casefold())
    return " ".join(without_commas.split())
