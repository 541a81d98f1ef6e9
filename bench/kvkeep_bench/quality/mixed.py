"""One document of several kinds, and many questions of all kinds about it."""

import random

from kvkeep_bench.quality.items import Item
from kvkeep_bench.quality.needles import needles
from kvkeep_bench.quality.structured import code, tables

QUESTIONS = 20
_PARTS = (needles, tables, code)


def multi_query(number: int, words: int) -> Item:
    """Prose with facts, a price list and program text: twenty questions in random order.

    All are asked of one cache, which nobody could have made for any of them.
    """
    draw = random.Random(f"multi-query {number}")
    # From 1,000 on, so that they share nothing with the documents of the suites of their own.
    parts = [part(1000 + number, words // len(_PARTS)) for part in _PARTS]
    questions = draw.sample([q for part in parts for q in part.questions], QUESTIONS)
    document = "\n\n".join(part.document for part in parts)
    return Item("multi-query", f"multi-query-{number}", document, tuple(questions))
