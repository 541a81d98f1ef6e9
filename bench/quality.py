"""How right answers stay under compression: every policy, ratio and suite, on the same items.

    PYTHONSAFEPATH=1 PYTHONPATH=bench .venv/bin/python bench/quality.py --model qwen2.5 \
        --suites needles --systems full "kvzip exact" "kvzip local" --ratios 0.3 --documents 20

A run that was ended goes on where it was: answers are appended to the file that ``--records``
names, and nothing in it is asked again. ``--table`` only prints what is there, and ``--plot
FOLDER`` draws it (matplotlib is in the dependency group ``bench``). Systems of kvpress need
``--kvpress PYTHON``, an interpreter whose environment has kvpress 0.5.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvkeep_bench.engine import EngineSide
from kvkeep_bench.machine import Machine
from kvkeep_bench.models import MODEL_NAMES, BenchModel, find_model
from kvkeep_bench.quality.answers import OurSide
from kvkeep_bench.quality.items import Item, score
from kvkeep_bench.quality.kvpress_side import KVPressSide
from kvkeep_bench.quality.records import Record, Records
from kvkeep_bench.quality.suites import SUITES
from kvkeep_bench.quality.systems import KVPRESS, SYSTEMS, System
from kvkeep_bench.quality.table import markdown
from kvkeep_bench.samples import progress

from kvkeep_service.config import load_settings

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Work:
    """One system on one item, at the ratios that are not answered yet."""

    item: Item
    system: System
    ratios: tuple[float, ...]


class Run:
    """One model, and everything that answers."""

    def __init__(self, model: BenchModel, words: int, records: Records, press: KVPressSide | None):
        """``press`` None: there is no kvpress here."""
        self._model, self._words, self._records, self._press = model, words, records, press
        self._ours = OurSide(EngineSide(model.reference, load_settings().model_cache))

    def work(
        self, suites: Sequence[str], systems: Sequence[str], ratios: Sequence[float], documents: int
    ) -> Iterator[Work]:
        """What is still to be done, document by document."""
        for number in range(documents):
            for suite in suites:
                item = SUITES[suite](number, self._words)
                for name in systems:
                    system = SYSTEMS[name]
                    wanted = [r for r in system.ratios if r in ratios or r == 1.0]
                    left = tuple(r for r in wanted if not self._has(item, name, r))
                    if left:
                        yield Work(item, system, left)

    def do(self, work: Work) -> None:
        """Answer and record. Modifies: the records."""
        item = work.item
        if work.system.name == KVPRESS:
            if self._press is None:
                raise SystemExit("kvpress needs --kvpress PYTHON")
            document, questions = self._ours.token_ids(item)
            answers = {
                ratio: self._press.answers(item, document, questions, ratio)
                for ratio in work.ratios
            }
        else:
            answers = self._ours.answers(item, work.system, work.ratios)
        self._records.add([self._record(work, ratio, texts) for ratio, texts in answers.items()])

    def _has(self, item: Item, system: str, ratio: float) -> bool:
        return self._records.has((self._model.name, self._words, item.name, system, ratio))

    def _record(self, work: Work, ratio: float, texts: tuple[str, ...]) -> Record:
        item = work.item
        scores = tuple(score(q, text) for q, text in zip(item.questions, texts, strict=True))
        return Record(
            self._model.name,
            self._words,
            item.suite,
            item.name,
            work.system.name,
            ratio,
            scores,
            texts,
        )


def main() -> None:
    """Do what is left, then print the table of everything recorded."""
    given = _arguments()
    records = Records(given.records)
    if not given.table:
        with ExitStack() as stack:
            _run(given, records, stack)
    print("\n".join(markdown(records.found)))
    if given.plot is not None:
        # Imported here: the rest runs without matplotlib.
        from kvkeep_bench.quality.plot import draw

        draw(records.found, given.plot)


def _run(given: argparse.Namespace, records: Records, stack: ExitStack) -> None:
    model = find_model(given.model)
    if model is None:
        raise SystemExit(f"{given.model} is not installed")
    press = None
    if given.kvpress is not None:
        errors = stack.enter_context(given.records.with_suffix(".kvpress.log").open("wb"))
        press = stack.enter_context(KVPressSide(given.kvpress, model.directory, errors))
    run = Run(model, given.words, records, press)
    progress(Machine.here().line("float32"))
    todo = list(run.work(given.suites, given.systems, given.ratios, given.documents))
    for index, work in enumerate(todo):
        progress(f"{index + 1} of {len(todo)}: {work.item.name}, {work.system.name}")
        run.do(work)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODEL_NAMES, default="qwen2.5")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    ours = [name for name in SYSTEMS if name != KVPRESS]
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=ours)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.3, 0.2, 0.1])
    parser.add_argument("--documents", type=int, default=4, help="documents of each suite")
    parser.add_argument("--words", type=int, default=1300, help="of a document, about")
    parser.add_argument("--records", type=Path, default=RESULTS / "quality.jsonl")
    parser.add_argument("--kvpress", type=Path, help="a Python that has kvpress")
    parser.add_argument("--table", action="store_true", help="only print what is recorded")
    parser.add_argument("--plot", type=Path, help="a folder for plots of what is recorded")
    return parser.parse_args()


if __name__ == "__main__":
    main()
