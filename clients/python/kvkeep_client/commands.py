"""The commands of ``kvkeep``: put, ask, chat, prefetch, rebuild, ls, rm, show.

Standard output has the result and nothing else, so that it can be piped; everything about the
way there goes to standard error. With ``--json`` both are JSON.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep_client.arguments import expiry, pairs, ratio_or_auto, spans
from kvkeep_client.calls import CreateOptions, QueryOptions
from kvkeep_client.choices import Normalization, Policy, Quantization, Scoring
from kvkeep_client.client import KVKeep
from kvkeep_client.contexts import Context
from kvkeep_client.errors import KVKeepError, ServerUnreachable
from kvkeep_client.failures import going_on, problem, replacing, told
from kvkeep_client.shown import details, row, summary
from kvkeep_client.terminal import say, typed_lines, write_answer, write_json, write_line

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(
    epilog="Exit codes: 0 done, 1 the request failed, 2 wrong usage, 3 no server answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")]
Url = Annotated[
    str | None,
    typer.Option("--url", envvar="KVKEEP_URL", help="The server; http://127.0.0.1:8000 otherwise."),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="KVKEEP_API_KEY", show_envvar=True, help="The bearer key."),
]
ContextId = Annotated[str, typer.Argument(metavar="CTX", help="A context's id, ctx_….")]
Ratio = Annotated[float | None, typer.Option(help="Fraction of the KV cache to keep, or read.")]
AllowLossy = Annotated[
    bool,
    typer.Option("--allow-lossy", help="Allow a ratio below 0.15, at which answers suffer."),
]


def _show_version(asked: bool) -> None:
    if asked:
        write_line(f"kvkeep {version('kvkeep-client')}")
        raise typer.Exit


@app.callback()
def kvkeep(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Register long documents once, and ask questions about them."""


@app.command()
def put(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="A UTF-8 text file.")
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call it; the file's name otherwise.")
    ] = None,
    ratio: Annotated[
        str | None, typer.Option(help="Fraction of the KV cache to keep, or auto.")
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(min=0, help="With --ratio auto, what may be lost, in nats per token."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that each head keeps, instead of a ratio.")
    ] = None,
    allow_lossy: AllowLossy = False,
    policy: Annotated[Policy, typer.Option(help="What picks what stays.")] = Policy.KVZIP,
    scoring: Annotated[Scoring, typer.Option(help="How to score.")] = Scoring.AUTO,
    neighbours: Annotated[
        int,
        typer.Option(min=0, max=4, help="Chunks that local scoring sees on each side."),
    ] = 0,
    quantization: Annotated[
        Quantization,
        typer.Option(help="What kept numbers become: 8 bits (int8, fp8), 4, or what they were."),
    ] = Quantization.NONE,
    normalization: Annotated[
        Normalization,
        typer.Option(help="What scores count by: attention, or also what it adds (kvzip_plus)."),
    ] = Normalization.NONE,
    remainder: Annotated[
        bool, typer.Option(help="Whether a few rows of each head stand for those evicted.")
    ] = True,
    protect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="START:END",
            help="Characters never to evict, from START up to END, counted from 0; repeatable.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system text, kept before the document.")
    ] = None,
    instructions: Annotated[
        str | None, typer.Option(help="A text between system and document, kept too.")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Kept with the context; repeatable."),
    ] = None,
    expires_after: Annotated[
        int | None,
        typer.Option(min=0, metavar="SECONDS", help="So long after the last question; 0: never."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Return when questions can be asked.")] = True,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Register a document and print its context id, then wait until it is ready."""
    options: CreateOptions = {
        "name": file.name if name is None else name,
        "system": system,
        "instructions": instructions,
        "metadata": pairs(metadata or ()),
        "protect": spans(protect or ()),
        "ratio": ratio_or_auto(ratio),
        "max_loss": max_loss,
        "tokens": tokens,
        "allow_lossy": allow_lossy,
        "policy": policy.value,
        "scoring": scoring.value,
        "neighbours": neighbours,
        "quantization": quantization.value,
        "normalization": normalization.value,
        "remainder": remainder,
    }
    if expires_after is not None:
        options["expires_after"] = expiry(expires_after)
    with _connected(url, api_key, as_json=as_json) as kv:
        context = kv.contexts.create(path=file, **options)
        if not as_json:
            # At once: whatever ends the wait, it is known what was registered.
            write_line(context.id)
        _conclude(context, wait=wait, as_json=as_json)


@app.command()
def ask(
    context_id: ContextId,
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION...", help="One or more.")],
    ratio: Ratio = None,
    min_ratio: Annotated[
        float | None, typer.Option(help="The least that will do while more is loaded.")
    ] = None,
    allow_lossy: AllowLossy = False,
    max_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 256,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Ask a question, whose answer appears as it is written; or several at once."""
    options: QueryOptions = {
        "ratio": ratio,
        "min_ratio": min_ratio,
        "allow_lossy": allow_lossy,
        "max_tokens": max_tokens,
    }
    with _connected(url, api_key, as_json=as_json) as kv:
        context = kv.contexts.get(context_id)
        if not context.info.is_ready:
            _wait(context, as_json=as_json)
        if len(questions) > 1:
            answers = context.query_many(questions, **options)
            if as_json:
                write_json([answer.received for answer in answers])
                return
            for question, answer in zip(questions, answers, strict=True):
                write_line(f"{question}\n{answer.answer}\n")
            return
        if as_json:
            write_json(context.query(questions[0], **options).received)
            return
        with context.stream(questions[0], **options) as stream:
            write_answer(stream)
        if stream.answer.finish_reason == "length":
            say(f"(cut at {max_tokens} tokens: --max-tokens sets the limit)")


@app.command()
def chat(
    context_id: ContextId,
    ratio: Ratio = None,
    allow_lossy: AllowLossy = False,
    max_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 256,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Talk about a context: a question a line, each going on from the last, until the end."""
    options: QueryOptions = {"ratio": ratio, "allow_lossy": allow_lossy, "max_tokens": max_tokens}
    with _connected(url, api_key, as_json=False) as kv:
        context = kv.contexts.get(context_id)
        if not context.info.is_ready:
            _wait(context, as_json=False)
        session = context.session()
        for question in typed_lines():
            with session.stream(question, **options) as stream:
                write_answer(stream)
            # All that follows is read as the first question was.
            options["ratio"] = None


@app.command()
def prefetch(
    context_id: ContextId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
) -> None:
    """Load a context now, so that the next question finds it in memory."""
    with _connected(url, api_key, as_json=as_json) as kv:
        info = kv.contexts.get(context_id).prefetch().info
    if as_json:
        write_json(info.received)


@app.command()
def rebuild(
    context_id: ContextId,
    wait: Annotated[bool, typer.Option(help="Return when questions can be asked.")] = True,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Build a context's cache again; a ready one answers from the old cache meanwhile."""
    with _connected(url, api_key, as_json=as_json) as kv:
        context = kv.contexts.get(context_id).rebuild()
        if context.status == "ready" and not as_json:
            say(replacing(context_id))
        else:
            _conclude(context, wait=wait, as_json=as_json)


@app.command("ls")
def list_contexts(
    status: Annotated[str | None, typer.Option(help="Only contexts in this status.")] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """List contexts, newest first."""
    with _connected(url, api_key, as_json=as_json) as kv:
        infos = [context.info for context in kv.contexts.list(status=status)]
    if as_json:
        write_json([info.received for info in infos])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("CONTEXT", "STATUS"):
        table.add_column(title, no_wrap=True)
    for title in ("TOKENS", "KEPT", "SIZE", "QUERIES"):
        table.add_column(title, justify="right", no_wrap=True)
    # Where a terminal is too narrow it is the names that wrap, never the ids.
    table.add_column("NAME")
    for info in infos:
        table.add_row(*(Text(cell) for cell in row(info)))
    # Piped, a row is one line of whatever length.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


@app.command("rm")
def remove(
    context_ids: Annotated[list[str], typer.Argument(metavar="CTX...", help="Ids to delete.")],
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Delete contexts with their caches; one that is gone already is no error."""
    with _connected(url, api_key, as_json=as_json) as kv:
        for context_id in context_ids:
            kv.contexts.delete(context_id)
    if as_json:
        write_json({"deleted": context_ids})


@app.command()
def show(
    context_id: ContextId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
) -> None:
    """Show one context."""
    with _connected(url, api_key, as_json=as_json) as kv:
        info = kv.contexts.get(context_id).info
    if as_json:
        write_json(info.received)
        return
    for title, value in details(info):
        write_line(f"{title:<10}{value}")


def _conclude(context: Context, *, wait: bool, as_json: bool) -> None:
    """Show what a build was asked for, once it is built where ``wait`` is set."""
    if wait:
        _wait(context, as_json=as_json)
    if as_json:
        write_json(context.info.received)
    else:
        say(summary(context.info))


def _wait(context: Context, *, as_json: bool) -> None:
    try:
        context.wait(progress=not as_json)
    except KeyboardInterrupt as error:
        detail = going_on(context.id)
        said = {"code": "interrupted", "detail": detail, "context_id": context.id}
        say(json.dumps(said) if as_json else detail)
        raise typer.Exit(EXIT_INTERRUPTED) from error


@contextmanager
def _connected(url: str | None, api_key: str | None, *, as_json: bool) -> Iterator[KVKeep]:
    """Yield a client; turn every failure inside into a message and an exit code."""
    try:
        with KVKeep(url, api_key=api_key) as kv:
            yield kv
    except KVKeepError as error:
        say(json.dumps(problem(error), ensure_ascii=False) if as_json else told(error))
        unreachable = isinstance(error, ServerUnreachable)
        raise typer.Exit(EXIT_UNREACHABLE if unreachable else EXIT_FAILED) from error
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        raise
    except (ValueError, OSError) as error:
        # A bad URL, or a file that is not text: found before anything was sent.
        say(json.dumps({"code": "usage", "detail": str(error)}) if as_json else f"kvkeep: {error}")
        raise typer.Exit(EXIT_USAGE) from error
