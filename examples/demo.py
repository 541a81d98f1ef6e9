"""The whole of kvkeep in one go: start a server, register a document, ask it three questions.

Run by ``make demo``. Everything happens on this machine, in ``.demo-data``: the bundled model,
an embedded Valkey, and caches as safetensors files. The server is stopped and started again
before the last question, so that the answer comes from the stored cache.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvkeep_client import Context, KVKeep

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / ".demo-data"
DOCUMENT = ROOT / "examples" / "handbook.md"
QUESTIONS = (
    "When was the lighthouse built?",
    "How high is the tower?",
    "What is the telephone number of the warden's office?",
)
MIB = 2**20

console = Console(highlight=False)


@contextmanager
def running_server() -> Iterator[KVKeep]:
    """Start ``kvkeep-server`` on a free port and stop it again; its log goes to the data folder."""
    command = [str(Path(sys.executable).with_name("kvkeep-server")), "serve"]
    flags = ["--model", "bundled", "--data", str(DATA), "--port", "0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVKEEP_")}
    environment |= {k: v for k, v in os.environ.items() if k == "KVKEEP_MODEL_CACHE"}
    with (DATA / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            log_tail = (DATA / "server.log").read_text().splitlines()[-5:]
            sys.exit("\n".join(["the server did not start:", *log_tail]))
        with KVKeep(line.split()[-1]) as client:
            yield client
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def ask(context: Context, questions: tuple[str, ...]) -> None:
    """Ask and print answers with their timings."""
    for question in questions:
        answer = context.query(question, max_tokens=48)
        console.print(f"\n  [bold]{question}[/bold]\n  {answer.answer}")
        timings = answer.timings
        console.print(
            f"  [dim]cache from {timings.source}: first token after {timings.ttft_ms:.0f} ms,"
            f" then {timings.decode_tps:.1f} tokens/s; {answer.usage.cached_tokens} of"
            f" {answer.usage.prompt_tokens} prompt tokens came from the cache[/dim]"
        )


def show(context: Context, seconds: float) -> None:
    """Print what the build did, and what it cost."""
    info = context.refresh().info
    sizes, timings = info.compression, info.timings
    assert sizes.stored_bytes is not None
    assert sizes.ratio_achieved is not None
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("document", f"{info.tokens.document} tokens")
    table.add_row(
        "KV pairs kept",
        f"{sizes.ratio_achieved:.1%} of the document's,"
        f" chosen by {sizes.policy_applied} ({sizes.scoring} scoring)",
    )
    table.add_row("full KV cache", f"{sizes.full_bytes / MIB:.1f} MiB")
    share = sizes.stored_bytes / sizes.full_bytes
    table.add_row(
        "stored",
        f"{sizes.stored_bytes / MIB:.1f} MiB ({share:.1%}), as safetensors, with all that stays",
    )
    table.add_row(
        "built in",
        f"{seconds:.1f} s (prefill {timings['prefill_s']:.1f} s,"
        f" scoring {timings['score_s']:.1f} s,"
        f" remainders {timings['remainder_s']:.1f} s,"
        f" measuring what is lost {timings['fidelity_s']:.1f} s)",
    )
    console.print(table)


def main() -> None:
    """Run the demo; exits with 0 when every step worked."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    console.print("Starting kvkeep with the bundled 135M model (its first start takes a minute) …")
    with running_server() as client:
        console.print(f"Registering {DOCUMENT.name} at {client.url} …")
        started = time.perf_counter()
        context = client.contexts.create(path=DOCUMENT, name="Lighthouse handbook", ratio=0.3)
        context.wait(progress=console.is_terminal)
        show(context, time.perf_counter() - started)
        ask(context, QUESTIONS[:2])
        context_id = context.id
    console.print("\nThe server has stopped. Starting it again; the cache is on disk …")
    with running_server() as client:
        ask(client.contexts.get(context_id), QUESTIONS[2:])
    console.print(f"\nDone. The stored cache is in {DATA.relative_to(ROOT)}/objects/caches.")
    console.print(
        "[dim]A 135M model reads out what stands in the text and is often wrong beyond that;"
        " give the server a larger one for real use (see README).[/dim]"
    )


if __name__ == "__main__":
    main()
