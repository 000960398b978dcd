"""Progress of long work and remarks, on standard error; none with `collage-monitor --quiet`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

__all__ = ["progress", "remark"]


def _is_quiet() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("quiet"))


def remark(text: str) -> None:
    """Print what nobody needs to know for the next step; errors, warnings and questions are no remarks."""
    if not _is_quiet():
        click.echo(text, err=True)


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """If standard error is a terminal, show label and time while the context is open; call what it yields with the
    units done.

    total: units in all; None or 0: not known, and a spinner is shown.
    """
    # Imported here, because it takes a tenth of a second that other verbs need not wait for.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal or _is_quiet(),
    ) as bar:
        task = bar.add_task(label, total=total or None)
        yield lambda units: bar.advance(task, units)
