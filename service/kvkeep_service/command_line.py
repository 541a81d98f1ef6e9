"""What every command shares: its options, its settings, and how it says that it cannot go on."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep_service.config import Settings, load_settings
from kvkeep_service.start_errors import StartRefused
from kvkeep_service.telemetry import set_up_logging
from kvkeep_storage.errors import StorageError

Data = Annotated[Path | None, typer.Option(help="Data directory of the embedded store.")]
RedisUrl = Annotated[str | None, typer.Option(help="A Redis of yours.")]
Store = Annotated[str | None, typer.Option(help="URL of the object store: file:// or s3://.")]


def settings_from(flags: Mapping[str, object]) -> Settings:
    """Read the settings; a flag that is None was not given. Raises: Exit with code 2."""
    set_up_logging()
    logging.basicConfig(level=logging.WARNING)
    try:
        return load_settings({name: flag for name, flag in flags.items() if flag is not None})
    except StartRefused as error:
        raise refused(error) from error


def run(work: Coroutine[Any, Any, object]) -> None:
    """Run a command to its end. Raises: Exit with code 2 when it cannot do its work."""
    try:
        asyncio.run(work)
    except (StartRefused, StorageError) as error:
        raise refused(error) from error


def refused(error: Exception) -> typer.Exit:
    """Say why on standard error; the exit to raise."""
    typer.echo(f"kvkeep-server: {error}", err=True)
    return typer.Exit(2)
