"""Many questions at once on one engine, with and without a build, against others that serve.

    PYTHONSAFEPATH=1 PYTHONPATH=bench .venv/bin/python bench/serving.py --docs docs/serving.md \
        [--llama PYTHON] [--quick] [--clients 1 4 16] [--build-slice-ms MS]

Clients of the engine's thread itself: HTTP is left out. Caches hold random rows, which cost what a
document's cost, and are there at once; documents that are built are random tokens. One run gives
every figure of a row's comparison, in pieces by turns: rates and percentiles of different runs do
not compare. Takes 9 minutes and, with ``--llama``, 3 more; 4 in all with ``--quick``.

Results go to serving.md and serving.jsonl below bench/results, at the end: a run that is
interrupted changes nothing. ``--docs FILE`` also puts the table between the two marks in that file
and draws plots beside it (matplotlib is in the dependency group ``bench``); with ``--drawn``, of
what was recorded before, without a run. ``--llama`` names a Python that has xllamacpp, which
brings llama.cpp's server; it is asked with Qwen2.5's GGUF (see bench/main_job.py).
"""

import argparse
from pathlib import Path

from kvkeep_bench.machine import Machine
from kvkeep_bench.serving_bench import AgainstLlama, Bench, Sizes
from kvkeep_bench.serving_rows import Findings

RESULTS = Path(__file__).parent / "results"
_BEGIN, _END = "<!-- bench/serving.py: begin -->", "<!-- bench/serving.py: end -->"


def main() -> None:
    """Measure, unless told not to; then print the table and draw it."""
    given = _arguments()
    recorded = given.results / "serving.jsonl"
    if not given.drawn:
        _measured(given).save(recorded)
    findings = Findings.load(recorded)
    text = findings.markdown()
    print(text)
    (given.results / "serving.md").write_text(text)
    if given.docs is not None:
        # Imported here: the rest runs without matplotlib.
        from kvkeep_bench.serving_plot import draw

        draw(findings, given.docs.parent / "plots")
        given.docs.write_text(_with_table(given.docs.read_text(), text))


def _with_table(document: str, table: str) -> str:
    before, _, rest = document.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    if not after:
        raise SystemExit(f"no {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n\n{table}\n{_END}{after}"


def _measured(given: argparse.Namespace) -> Findings:
    machine = Machine.here().line("float32")
    sizes = Sizes(seconds=6.0 if given.quick else 24.0)
    with Bench(sizes, given.build_slice_ms) as bench:
        together = bench.against_generate()
        rows = bench.closed(given.clients) + bench.open(given.rates)
    remarks = bench.remarks
    if given.llama is not None:
        against = AgainstLlama.measured(sizes, given.llama)
        together += against.together
        remarks.append(against.remark)
    else:
        remarks.append("llama.cpp's server was left out: no --llama was given.")
    slice_ms = given.build_slice_ms
    shown = "not set" if slice_ms is None else f"{slice_ms:g} ms"
    return Findings(
        (machine, sizes.line(), f"KVKEEP_BUILD_SLICE_MS: {shown}.", *remarks),
        tuple(together),
        tuple(rows),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="serving under load, on a CPU")
    parser.add_argument("--quick", action="store_true", help="short rows: to see that it runs")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--rates", type=float, nargs="*", default=[0.25, 0.5, 1.0])
    parser.add_argument("--build-slice-ms", type=float, default=None)
    parser.add_argument("--llama", type=Path, default=None, metavar="PYTHON")
    parser.add_argument("--docs", type=Path, default=None, metavar="FILE")
    parser.add_argument("--drawn", action="store_true", help="of what was recorded before")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    return parser.parse_args()


if __name__ == "__main__":
    main()
