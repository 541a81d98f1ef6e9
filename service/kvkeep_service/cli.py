"""The command ``kvkeep-server``: serve, and the few things an operator does by hand."""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep_service.config import Settings, load_settings
from kvkeep_service.errors import StartRefused
from kvkeep_service.telemetry import set_up_logging
from kvkeep_storage.errors import StorageError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
admin = typer.Typer(no_args_is_help=True, help="Repair what a server keeps.")
app.add_typer(admin, name="admin")

_Data = Annotated[Path | None, typer.Option(help="Data directory of the embedded store.")]
_RedisUrl = Annotated[str | None, typer.Option(help="A Redis of yours.")]
_Store = Annotated[str | None, typer.Option(help="file:// URL of the object store.")]


def main() -> None:
    """Run the command line."""
    app()


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="Hub id, directory, GGUF or bundled.")] = None,
    data: _Data = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    redis_url: _RedisUrl = None,
    store: _Store = None,
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
    settings = _settings(flags)
    # Imported here: torch takes seconds, and a wrong flag should be told at once.
    from kvkeep_service.app import serve as serve_application

    typer.echo(f"loading model {settings.model} …", err=True)
    _run(serve_application(settings, lambda url: typer.echo(f"kvkeep is ready at {url}")))


@admin.command()
def reindex(data: _Data = None, redis_url: _RedisUrl = None, store: _Store = None) -> None:
    """Restore all records from the object store, after Redis was lost or flushed.

    With the embedded store the server must be stopped first.
    """
    settings = _settings({"data": data, "redis_url": redis_url, "store": store})
    from kvkeep_service.stores import open_stores
    from kvkeep_storage.reindex import reindex as restore

    async def work() -> None:
        async with open_stores(settings) as stores:
            report = await restore(stores.objects, stores.metadata)
        typer.echo(f"missing and restored: {report.contexts} contexts, {report.caches} caches")
        for line in report.damaged:
            typer.echo(f"damaged: {line}", err=True)
        if report.damaged:
            raise typer.Exit(1)

    _run(work())


def _settings(flags: dict[str, object]) -> Settings:
    set_up_logging()
    logging.basicConfig(level=logging.WARNING)
    try:
        return load_settings({name: flag for name, flag in flags.items() if flag is not None})
    except StartRefused as error:
        raise _refused(error) from error


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(work)
    except (StartRefused, StorageError) as error:
        raise _refused(error) from error


def _refused(error: Exception) -> typer.Exit:
    typer.echo(f"kvkeep-server: {error}", err=True)
    return typer.Exit(2)
