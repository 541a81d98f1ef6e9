"""The command ``kvkeep-server``: serve, and the few things an operator does by hand."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvkeep_service.admin import admin
from kvkeep_service.command_line import Data, RedisUrl, Store, run, settings_from
from kvkeep_service.stores import open_objects

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


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="Hub id, directory, GGUF or bundled.")] = None,
    data: Data = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    redis_url: RedisUrl = None,
    store: Store = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file used instead of the model's template.")
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
    }
    settings = settings_from(flags)
    if settings.store is not None:
        run(open_objects(settings.store, settings.faults))
    # Imported here: torch takes seconds, and what is wrong should be told at once.
    from kvkeep_service.app import serve as serve_application

    typer.echo(f"loading model {settings.model} …", err=True)
    run(serve_application(settings, lambda url: typer.echo(f"kvkeep is ready at {url}")))
