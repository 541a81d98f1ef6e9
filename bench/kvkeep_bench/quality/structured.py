"""Documents that are not prose: program text and tables, written here."""

import random

from kvkeep_bench.quality.items import Item, Question

_QUESTIONS = 8
_AREAS = ("CACHE", "QUEUE", "UPLOAD", "SEARCH", "EXPORT", "SESSION", "BACKUP", "REPORT", "LOGIN",
          "PAYMENT", "ARCHIVE", "NOTICE")  # fmt: skip
_MEASURES = ("TIMEOUT", "LIMIT", "RETRIES", "BATCH", "WINDOW", "DELAY")
_MATERIALS = ("brass", "oak", "steel", "copper", "slate", "linen", "cork", "glass")
_PARTS = ("hinge", "valve", "bracket", "gear", "washer", "spindle", "flange", "coupling")

_FUNCTION = '''\
def {verb}_{noun}(items: list[int], start: int) -> int:
    """Return what is left of the {noun} after {number} items."""
    total = start
    for index, item in enumerate(items):
        if index % {number} == 0:
            total += item
    return total
'''


def code(number: int, words: int) -> Item:
    """A Python module: constants of like names among functions of like shape."""
    draw = random.Random(f"code {number}")
    names = [f"{area}_{measure}" for area in _AREAS for measure in _MEASURES]
    count = max(_QUESTIONS, min(len(names), words // 25))
    constants = {name: str(draw.randrange(11, 9999)) for name in draw.sample(names, count)}
    parts = []
    for index, (name, value) in enumerate(constants.items()):
        parts.append(f"{name} = {value}\n")
        if index % 2:
            parts.append(
                _FUNCTION.format(
                    verb=draw.choice(("fold", "drain", "merge", "count")),
                    noun=f"{draw.choice(_AREAS).lower()}_{index}",
                    number=draw.randrange(2, 9),
                )
            )
    asked = draw.sample(sorted(constants), _QUESTIONS)
    questions = tuple(
        Question(f"What is the value of the constant {name}?", (constants[name],)) for name in asked
    )
    return Item("code", f"code-{number}", "\n".join(parts), questions)


def tables(number: int, words: int) -> Item:
    """A price list as a Markdown table."""
    draw = random.Random(f"tables {number}")
    goods = [f"{material} {part}" for material in _MATERIALS for part in _PARTS]
    count = max(_QUESTIONS, min(len(goods), words // 14))
    rows = {
        name: (f"P{draw.randrange(100, 1000)}", f"{draw.randrange(2, 90)}.{draw.randrange(10, 99)}")
        for name in draw.sample(goods, count)
    }
    lines = ["| part | shelf | price |", "|---|---|---|"]
    lines += [f"| {name} | {shelf} | {price} |" for name, (shelf, price) in rows.items()]
    asked = draw.sample(sorted(rows), _QUESTIONS)
    questions = tuple(
        Question(f"What is the price of the {name}?", (rows[name][1],)) for name in asked
    )
    return Item("tables", f"tables-{number}", "\n".join(lines), questions)
