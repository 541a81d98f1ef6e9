"""The command ``kvkeep-server``: serve, and the few things an operator does by hand."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from kvkeep_service.admin import admin
from kvkeep_service.command_line import Data, RedisUrl, Store, refused, run, settings_from
from kvkeep_service.errors import ServiceError
from kvkeep_service.model_reference import check_model_reference, is_hub_id
from kvkeep_service.start_errors import StartRefused

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.add_typer(admin, name="admin")


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    try:
        app()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: a thread of obstore whose request was given up panics, at length, when it comes
        # back to an interpreter that is being taken down.
        os._exit(end.code if isinstance(end.code, int) else 0)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvkeep-server {version('kvkeep')}")
        raise typer.Exit


@app.callback()
def kvkeep_server(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Serve questions about documents from their compressed caches."""


Model = Annotated[str | None, typer.Option(help="Hub id, directory, GGUF or bundled.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="Jinja file used instead of the model's template.")
]


@app.command()
def serve(
    model: Model = None,
    data: Data = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    redis_url: RedisUrl = None,
    store: Store = None,
    device: Device = None,
    dtype: Dtype = None,
    chat_template: ChatTemplate = None,
    head_scores: Annotated[
        Path | None, typer.Option(help="What calibrate wrote; its file in --data otherwise.")
    ] = None,
) -> None:
    """Serve one model. Every flag has an environment twin, such as KVKEEP_MODEL."""
    flags: dict[str, object] = {
        "model": model,
        "data": data,
        "host": host,
        "port": port,
        "redis_url": redis_url,
        "store": store,
        "device": device,
        "dtype": dtype,
        "chat_template": chat_template,
        "head_scores": head_scores,
    }
    settings = settings_from(flags)
    # Imported here: a wrong flag should be told at once.
    from kvkeep_service.listener import listening
    from kvkeep_service.serving import Announcements
    from kvkeep_service.serving import serve as serve_application

    whence = " by its hub id" if is_hub_id(settings.model) else ""
    announce = Announcements(
        loading=lambda: typer.echo(f"loading model {settings.model}{whence} …", err=True),
        ready=lambda url: typer.echo(f"kvkeep is ready at {url}"),
    )
    try:
        with listening(settings) as listeners:
            run(serve_application(settings, listeners, announce))
    except StartRefused as error:
        raise refused(error) from error


@app.command()
def calibrate(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="UTF-8 texts like your documents."),
    ],
    model: Model = None,
    data: Data = None,
    device: Device = None,
    dtype: Dtype = None,
    chat_template: ChatTemplate = None,
    head_scores: Annotated[
        Path | None, typer.Option(help="File to write; one in the data directory otherwise.")
    ] = None,
) -> None:
    """Measure what each head of a model is worth, for policy "kvzip_head".

    Takes about three times as long as reading the texts. A server reads the file when it starts.
    """
    flags: dict[str, object] = {
        "model": model,
        "data": data,
        "device": device,
        "dtype": dtype,
        "chat_template": chat_template,
        "head_scores": head_scores,
    }
    settings = settings_from(flags)
    try:
        texts = [path.read_text(encoding="utf-8") for path in files]
        check_model_reference(settings.model)
    except (OSError, UnicodeDecodeError, StartRefused) as error:
        raise refused(error) from error
    # Imported here: torch takes seconds, and what is wrong should be told at once.
    from kvkeep_service.app import load_configured_model
    from kvkeep_service.calibrate import calibrate as measure
    from kvkeep_service.head_score_files import head_scores_path, write_head_scores

    def report(fraction: float) -> None:
        typer.echo(f"\r{fraction:4.0%}", err=True, nl=fraction == 1.0)

    try:
        loaded = load_configured_model(settings)
        path = head_scores_path(settings, loaded.info)
        write_head_scores(path, measure(loaded, texts, report))
    except (StartRefused, ServiceError) as error:
        raise refused(error) from error
    typer.echo(str(path))
