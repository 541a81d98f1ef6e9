"""How a build is shown on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvkeep_client.models import ContextInfo

Show = Callable[[ContextInfo], None]


@contextmanager
def build_bar(title: str, *, shown: bool) -> Iterator[Show]:
    """Yield a function that draws one state of a build on standard error.

    A bar with rich on a terminal; one line per stage otherwise; nothing when not ``shown``.
    """
    if not shown:
        yield _nothing
        return
    try:
        # An optional extra, so looked for only when a bar is wanted.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield _lines(title)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[stage]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0, stage="")
        yield lambda info: bar.update(task, completed=_fraction(info), stage=_stage(info))


def _nothing(info: ContextInfo) -> None:
    """Show nothing."""


def _lines(title: str) -> Show:
    last = ""

    def show(info: ContextInfo) -> None:
        nonlocal last
        stage = _stage(info)
        if stage != last:
            last = stage
            sys.stderr.write(f"{title}: {stage}\n")

    return show


def _stage(info: ContextInfo) -> str:
    if info.progress is None or info.is_settled:
        return info.status
    return info.progress.stage


def _fraction(info: ContextInfo) -> float:
    if info.is_ready:
        return 1.0
    return info.progress.fraction if info.progress else 0.0
