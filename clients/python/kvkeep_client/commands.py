"""The commands of ``kvkeep``: put, ask, chat, prefetch, ls, rm, show.

Standard output has the result and nothing else, so that it can be piped; everything about the
way there goes to standard error. With ``--json`` both are JSON.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep_client.calls import CreateOptions, QueryOptions
from kvkeep_client.choices import Policy, Quantization, Scoring
from kvkeep_client.client import KVKeep
from kvkeep_client.errors import APIError, ContextNotFound, KVKeepError, ServerUnreachable
from kvkeep_client.shown import details, row, summary
from kvkeep_client.terminal import typed_lines, write_answer

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

app = typer.Typer(
    help="Register long documents once, and ask questions about them.",
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
    system: Annotated[
        str | None, typer.Option(help="A system text, kept before the document.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Return when questions can be asked.")] = True,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Register a document and print its context id."""
    options: CreateOptions = {
        "name": file.name if name is None else name,
        "system": system,
        "ratio": _ratio_or_auto(ratio),
        "max_loss": max_loss,
        "tokens": tokens,
        "allow_lossy": allow_lossy,
        "policy": policy.value,
        "scoring": scoring.value,
        "neighbours": neighbours,
        "quantization": quantization.value,
    }
    with _connected(url, api_key, as_json=as_json) as kv:
        context = kv.contexts.create(path=file, **options)
        if wait:
            context.wait(progress=not as_json)
        if as_json:
            _print_json(context.info.received)
            return
        _say(summary(context.info))
        _print(context.id)


def _ratio_or_auto(text: str | None) -> float | Literal["auto"] | None:
    """Read what was given as --ratio. Raises: BadParameter."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError as error:
        reason = f"{text!r} is neither a number nor auto"
        raise typer.BadParameter(reason, param_hint="--ratio") from error


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
            context.wait(progress=not as_json)
        if len(questions) > 1:
            answers = context.query_many(questions, **options)
            if as_json:
                _print_json([answer.received for answer in answers])
                return
            for question, answer in zip(questions, answers, strict=True):
                _print(f"{question}\n{answer.answer}\n")
            return
        if as_json:
            _print_json(context.query(questions[0], **options).received)
            return
        with context.stream(questions[0], **options) as stream:
            write_answer(stream)
        if stream.answer.finish_reason == "length":
            _say(f"(cut at {max_tokens} tokens: --max-tokens sets the limit)")


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
            context.wait(progress=True)
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
        _print_json(info.received)


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
        _print_json([info.received for info in infos])
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
        _print_json({"deleted": context_ids})


@app.command()
def show(
    context_id: ContextId, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None
) -> None:
    """Show one context."""
    with _connected(url, api_key, as_json=as_json) as kv:
        info = kv.contexts.get(context_id).info
    if as_json:
        _print_json(info.received)
        return
    for title, value in details(info):
        _print(f"{title:<10}{value}")


@contextmanager
def _connected(url: str | None, api_key: str | None, *, as_json: bool) -> Iterator[KVKeep]:
    """Yield a client; turn every failure inside into a message and an exit code."""
    try:
        with KVKeep(url, api_key=api_key) as kv:
            yield kv
    except KVKeepError as error:
        if as_json:
            _say(json.dumps(_problem(error), ensure_ascii=False))
        else:
            _say(f"kvkeep: {error.detail}{_advice(error)}")
        unreachable = isinstance(error, ServerUnreachable)
        raise typer.Exit(EXIT_UNREACHABLE if unreachable else EXIT_FAILED) from error
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        raise
    except (ValueError, OSError) as error:
        # A bad URL, or a file that is not text: found before anything was sent.
        _say(json.dumps({"code": "usage", "detail": str(error)}) if as_json else f"kvkeep: {error}")
        raise typer.Exit(EXIT_USAGE) from error


def _problem(error: KVKeepError) -> dict[str, object]:
    problem = {
        "code": error.code,
        "detail": error.detail,
        "status": error.status,
        "request_id": error.request_id,
    }
    return {**(error.facts if isinstance(error, APIError) else {}), **problem}


def _advice(error: KVKeepError) -> str:
    match error:
        case ServerUnreachable():
            return (
                "\nStart one with: kvkeep-server serve (or name another with --url or KVKEEP_URL)"
            )
        case ContextNotFound():
            return "\nkvkeep ls shows what there is."
        case APIError(status=401):
            return "\nGive the key with --api-key or KVKEEP_API_KEY."
        case APIError(request_id=str() as request_id) if (error.status or 0) >= 500:
            return f"\nThe server's log has it under request {request_id}."
        case _:
            return ""


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _print_json(value: object) -> None:
    _print(json.dumps(value, ensure_ascii=False, indent=2))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
