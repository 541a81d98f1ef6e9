"""Documents for tests: as long as is wanted, each saying something of its own."""

_SUBJECTS = ("delivery", "payment", "liability", "notice", "storage", "insurance", "audit")
_PARTIES = ("the buyer", "the seller", "the carrier", "the agent", "either party")


def contract(title: str, num_clauses: int) -> str:
    """A contract of numbered clauses, about 28 tokens each; other titles give other texts."""
    clauses = [
        f"{number}. In matters of {_SUBJECTS[(number * 3 + len(title)) % len(_SUBJECTS)]}, "
        f"{_PARTIES[number % len(_PARTIES)]} has {number * 7 % 60 + 1} days, "
        f"and pays {number * 113 + len(title)} euros if they pass."
        for number in range(1, num_clauses + 1)
    ]
    return "\n".join([title, *clauses])
