"""What was answered, one JSON line per item, system and ratio: a run goes on where it was ended."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Record:
    """The answers of one system to one item, and their scores in [0, 1]."""

    model: str
    words: int
    suite: str
    item: str
    system: str
    ratio: float
    scores: tuple[float, ...]
    answers: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int, str, str, float]:
        """What a run need not do twice."""
        return (self.model, self.words, self.item, self.system, self.ratio)


class Records:
    """A file of records that only grows."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a last line that was cut short is passed over."""
        self._path = path
        self.found: list[Record] = list(_read(path)) if path.exists() else []
        self._keys = {record.key for record in self.found}

    def has(self, key: tuple[str, int, str, str, float]) -> bool:
        """Whether this was answered before."""
        return key in self._keys

    def add(self, records: Sequence[Record]) -> None:
        """Append, and be sure that it is written. Modifies: the file."""
        with self._path.open("a") as file:
            for record in records:
                file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        self.found += records
        self._keys |= {record.key for record in records}


def _read(path: Path) -> Iterable[Record]:
    # What follows the last line's end was being written when the run was ended.
    whole, _, _ = path.read_text().rpartition("\n")
    for line in whole.splitlines():
        found = json.loads(line)
        yield Record(
            **{**found, "scores": tuple(found["scores"]), "answers": tuple(found["answers"])}
        )
