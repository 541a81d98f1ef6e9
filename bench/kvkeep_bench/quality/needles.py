"""Facts of several kinds planted in natural prose: many questions about one document."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvkeep_bench.quality.items import Item, Question, prose, spread, with_sentences

QUESTIONS = 20
_PLACES = (
    "Norwell", "Harrowgate", "Tessaly", "Brindle Bay", "Oakmere", "Vantry", "Lissom",
    "Carrowby", "Pell Harbour", "Dunmore", "Eastlow", "Fennick", "Gallowhill", "Ivywood",
    "Kestrel Point", "Marlby", "Quarry End", "Redwater", "Silverton", "Thornbury",
    "Upper Wick", "Wexcombe", "Yarrow", "Zeal Common",
)  # fmt: skip
_FIRST = ("Tamsin", "Orrin", "Beatrix", "Cuthbert", "Delphine", "Ambrose", "Isolde", "Ludovic",
          "Marguerite", "Percival", "Rosalind", "Thaddeus")  # fmt: skip
_LAST = ("Ferro", "Okonjo", "Wrenfield", "Castellan", "Brightwater", "Moreau", "Halloran",
         "Petrov", "Lindqvist", "Abernathy", "Nakamura", "Silvestri")  # fmt: skip
_ANIMALS = ("heron", "otter", "badger", "lynx", "tortoise", "falcon", "hedgehog", "salamander",
            "wolverine", "pelican")  # fmt: skip
_COLOURS = ("crimson", "turquoise", "amber", "violet", "emerald", "ivory", "scarlet", "indigo")
_INSTRUMENTS = ("cello", "bassoon", "harpsichord", "trombone", "mandolin", "oboe", "zither")
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
Draw = random.Random


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of fact: a sentence and a question with holes, and how its value is drawn."""

    sentence: str
    question: str
    value: Callable[[Draw], str]


_KINDS = (
    _Kind(
        "The archivist of {place} is called {value}.",
        "What is the name of the archivist of {place}?",
        lambda draw: f"{draw.choice(_FIRST)} {draw.choice(_LAST)}",
    ),
    _Kind(
        "The lighthouse of {place} was finished in the year {value}.",
        "In which year was the lighthouse of {place} finished?",
        lambda draw: str(draw.randrange(1500, 1900)),
    ),
    _Kind(
        "The cellar door in {place} opens with the code {value}.",
        "Which code opens the cellar door in {place}?",
        lambda draw: "".join(draw.choices(_LETTERS, k=2)) + str(draw.randrange(1000, 10000)),
    ),
    _Kind(
        "The animal on the flag of {place} is a {value}.",
        "Which animal is on the flag of {place}?",
        lambda draw: draw.choice(_ANIMALS),
    ),
    _Kind(
        "The bridge toll at {place} is {value} crowns.",
        "How many crowns is the bridge toll at {place}?",
        lambda draw: str(draw.randrange(11, 990)),
    ),
    _Kind(
        "The gates of {place} are painted {value}.",
        "In which colour are the gates of {place} painted?",
        lambda draw: draw.choice(_COLOURS),
    ),
    _Kind(
        "The mayor of {place} plays the {value}.",
        "Which instrument does the mayor of {place} play?",
        lambda draw: draw.choice(_INSTRUMENTS),
    ),
)


def needles(number: int, words: int) -> Item:
    """Twenty facts in prose, asked for in another order than they stand in."""
    draw = Draw(f"needles {number}")
    paragraphs = prose(number, words)
    pairs = [(place, kind) for place in _PLACES for kind in _KINDS]
    chosen = draw.sample(pairs, QUESTIONS)
    values = [kind.value(draw) for _, kind in chosen]
    facts = [
        kind.sentence.format(place=place, value=value)
        for (place, kind), value in zip(chosen, values, strict=True)
    ]
    questions = [
        Question(kind.question.format(place=place), (value,))
        for (place, kind), value in zip(chosen, values, strict=True)
    ]
    draw.shuffle(questions)
    document = with_sentences(paragraphs, facts, spread(QUESTIONS, len(paragraphs)))
    return Item("needles", f"needles-{number}", document, tuple(questions))
