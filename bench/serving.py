"""Many questions at once on one engine, with and without a build, against others that serve.

    PYTHONSAFEPATH=1 PYTHONPATH=bench .venv/bin/python bench/serving.py --plot docs/plots \
        [--llama PYTHON] [--quick] [--clients 1 4 16] [--build-slice-ms MS]

Clients of the engine's thread itself: HTTP is left out. Caches hold random rows, which cost what a
document's cost, and are there at once; documents that are built are random tokens. One run gives
every figure of a row's comparison, in pieces by turns: rates and percentiles of different runs do
not compare. Takes 9 minutes and, with ``--llama``, 3 more; 3 in all with ``--quick``.

Results go to serving.md and serving.jsonl below bench/results, at the end: a run that is
interrupted changes nothing. ``--plot FOLDER`` draws them (matplotlib is in the dependency group
``bench``), and ``--drawn`` does so without a run. ``--llama`` names a Python that has xllamacpp,
which brings llama.cpp's server; it is asked with Qwen2.5's GGUF (see bench/main_job.py).
"""

import argparse
from pathlib import Path

from kvkeep_bench.machine import Machine
from kvkeep_bench.samples import progress
from kvkeep_bench.serving_bench import Bench, Sizes
from kvkeep_bench.serving_rows import Findings

RESULTS = Path(__file__).parent / "results"


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
    if given.plot is not None:
        # Imported here: the rest runs without matplotlib.
        from kvkeep_bench.serving_plot import draw

        for path in draw(findings, given.plot):
            progress(f"drawn: {path}")


def _measured(given: argparse.Namespace) -> Findings:
    machine = Machine.here().line("float32")
    sizes = Sizes(seconds=6.0 if given.quick else 24.0)
    with Bench(sizes, given.build_slice_ms) as bench:
        together = bench.against_generate()
        rows = bench.closed(given.clients) + bench.open(given.rates)
    if given.llama is not None:
        together += Bench.against_llama(sizes, given.llama)
    else:
        progress("llama.cpp's server is left out: no --llama")
    slice_ms = given.build_slice_ms
    shown = "not set" if slice_ms is None else f"{slice_ms:g} ms"
    return Findings(
        (machine, sizes.line(), f"KVKEEP_BUILD_SLICE_MS: {shown}.", *bench.remarks),
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
    parser.add_argument("--plot", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--drawn", action="store_true", help="of what was recorded before")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    return parser.parse_args()


if __name__ == "__main__":
    main()
