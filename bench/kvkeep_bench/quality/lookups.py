"""The tasks that break first under eviction: much alike, and nothing to tell what will be asked.

The kinds are those of RULER (arXiv 2404.06654, section 3); texts and values are drawn here.
"""

import random
import uuid
from collections import Counter

from kvkeep_bench.quality.items import Item, Question

_ASKED = 10
_WORDS = (
    "anchor", "basket", "candle", "dagger", "engine", "feather", "garden", "hammer", "island",
    "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil", "quiver", "ribbon",
    "saddle", "teapot", "umbrella", "violin", "walnut", "yellow", "zipper", "bottle", "copper",
    "dragon", "escape", "falcon", "goblet", "harbor", "insect", "jungle", "lantern", "magnet",
    "nickel", "orchid", "pepper",
)  # fmt: skip
_SENTENCES = {
    "KORVA": ("the soup boiled over", "she sliced the bread", "the oven was too hot",
              "he peeled six onions", "we ran out of flour"),
    "LUMEN": ("it rained until noon", "the fog came in early", "a storm broke the mast",
              "snow lay on the roofs", "the wind turned north"),
    "TESSEL": ("the choir sang too fast", "he tuned the guitar", "the drummer was late",
               "she wrote a slow waltz", "they practised the chorus"),
    "BRIXO": ("the train left at dawn", "we lost our luggage", "the ferry was full",
              "he missed his flight", "the road was closed"),
}  # fmt: skip
"""Made-up labels of kitchen, weather, music and travel. The last of each is asked for."""


def shared_prefix_keys(number: int, words: int) -> Item:
    """Units whose names begin alike, each with a word of its own."""
    draw = random.Random(f"keys {number}")
    count = max(_ASKED, words // 12)
    numbers = draw.sample(range(1000, 10_000), count)
    values = [f"{draw.choice(_WORDS)} {draw.choice(_WORDS)}" for _ in numbers]
    names = [f"KX-4471-{value}" for value in numbers]
    lines = [
        f"The pass phrase of unit {name} is {value}."
        for name, value in zip(names, values, strict=True)
    ]
    asked = draw.sample(range(count), _ASKED)
    questions = tuple(
        Question(f"What is the pass phrase of unit {names[i]}?", (values[i],)) for i in asked
    )
    return Item("shared-prefix keys", f"keys-{number}", "\n".join(lines), questions)


def uuids(number: int, words: int) -> Item:
    """Random identifiers that name random identifiers."""
    draw = random.Random(f"uuids {number}")
    # An identifier is some twenty tokens, a word of prose one and a third.
    count = max(_ASKED, words // 30)
    pairs = [(_uuid(draw), _uuid(draw)) for _ in range(count)]
    lines = [f"Record {key} refers to {value}." for key, value in pairs]
    asked = draw.sample(pairs, _ASKED)
    questions = tuple(
        Question(f"What does record {key} refer to?", (value,)) for key, value in asked
    )
    return Item("UUIDs", f"uuids-{number}", "\n".join(lines), questions)


def common_words(number: int, words: int) -> Item:
    """A long list of words, a few of which stand there far more often than the others."""
    draw = random.Random(f"common {number}")
    frequent = draw.sample(_WORDS, 3)
    rare = [word for word in _WORDS if word not in frequent]
    each = max(6, words // 10)
    listed = [word for word in frequent for _ in range(each)]
    listed += [rare[i % len(rare)] for i in range(max(0, words // 2 - len(listed)))]
    draw.shuffle(listed)
    most = [word for word, _ in Counter(listed).most_common(3)]
    lines = "\n".join(f"{index + 1}. {word}" for index, word in enumerate(listed))
    question = Question(
        "Which three words stand in the list most often?", tuple(most), "share_contained", 32
    )
    return Item("common words", f"common-{number}", lines, (question,))


def many_shot(number: int, words: int) -> Item:
    """Labelled examples of made-up labels; new sentences are to be labelled."""
    draw = random.Random(f"shots {number}")
    shots = []
    for index in range(max(24, words // 12)):
        label, sentences = list(_SENTENCES.items())[index % len(_SENTENCES)]
        shots.append((f"{draw.choice(sentences[:-1])}, number {draw.randrange(100)}", label))
    draw.shuffle(shots)
    document = "\n".join(f"Sentence: {sentence}\nLabel: {label}" for sentence, label in shots)
    questions = tuple(
        Question(
            f"Give the label of one more sentence, as above.\nSentence: {sentences[-1]}", (label,)
        )
        for label, sentences in _SENTENCES.items()
    )
    return Item("many-shot", f"shots-{number}", document, questions)


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))
