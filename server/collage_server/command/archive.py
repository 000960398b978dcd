"""`collage-monitor archive`: manual work on archived files."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import click

from collage_monitor.command import VerbGroup
from collage_monitor.command.progress import progress
from collage_monitor.command.terminal import printable
from collage_server.app import make_store
from collage_server.errors import ServerError
from collage_server.publishing import publish as publish_project
from collage_server.settings import settings_beside_server
from collage_server.store import Verification, Verified

__all__ = ["archive"]

_DAY_SECONDS: Final = 86_400.0
_FILES_AT_ONCE: Final = 16


@click.group("archive", cls=VerbGroup)
def archive() -> None:
    """Archived files: the older points of runs."""


@archive.command("publish")
@click.option("--project", "projects", multiple=True, help="Project; repeat it. Default: all.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder of the server.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def publish(projects: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    """Bring each project's Delta table up to date with its finished runs; Spark, DuckDB and others read it.

    It copies no files except those that a newer attempt hides in part. Run it again whenever runs have ended or
    were deleted, while the server serves. If the log was deleted, it is made again.
    """
    settings = settings_beside_server(folder)
    try:
        store = make_store(settings)
        store.open()
        with closing(store):
            for project in projects or store.finished.projects():
                with progress(f"publish {project}"):
                    done = publish_project(store, project)
                click.echo(
                    json.dumps(dataclasses.asdict(done))
                    if as_json
                    else f"{done.table}  {done.runs} runs, {done.files} files: {done.added} added, "
                    f"{done.removed} removed"
                )
    except ServerError as error:
        raise click.ClickException(error.message) from error


@archive.command("verify")
@click.option("--run", "runs", multiple=True, help="Run; repeat it. Default: all.")
@click.option("--again", is_flag=True, help="Also verify files that were verified within the last day.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder of the server.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def verify(runs: tuple[str, ...], again: bool, folder: Path | None, as_json: bool) -> None:
    """Compare archived files, read as a whole, with what was written; damaged ones are healed from a back-up.

    Without --run, rows and indexes of an SQLite database, too. Status 1 if something stays damaged; it is named.
    An interrupted call goes on where it stopped. The server verifies files by itself, too, each of them once a
    month, and the database once a day.
    """
    settings = settings_beside_server(folder)
    try:
        store = make_store(settings)
        store.open()
        with closing(store):
            if store.archiving is None:
                raise click.ClickException("nothing is archived here: set COLLAGE_SERVER_ARCHIVE as for the server")
            done = _verified(store.archiving.verification, runs, time.time() - (0 if again else _DAY_SECONDS))
            with progress("check the database"):
                checked = None if runs else store.check_database()
    except ServerError as error:
        raise click.ClickException(error.message) from error
    damaged = [file for file in done if file.problem is not None]
    healed, size = sum(file.healed for file in done), sum(file.size for file in done)
    if as_json:
        told = {"files": len(done), "bytes": size, "healed": healed, "damaged": [*map(_row, damaged)]}
        click.echo(json.dumps(told | {"database": None if checked is None else checked._asdict()}))
    else:
        click.echo(f"{len(done)} files, {size:,} bytes verified, {healed} healed, {len(damaged)} damaged")
        for file in damaged:
            click.echo(f"{printable(file.path)} of run {printable(file.run_id)} {printable(file.problem or '')}")
        if checked is not None:
            click.echo(
                f"{checked.rows} rows of the database checked, {checked.healed} healed, "
                f"{len(checked.damaged)} damaged"
            )
            for problem in checked.damaged:
                click.echo(printable(problem))
    raise SystemExit(1 if damaged or (checked is not None and checked.damaged) else 0)


def _verified(verification: Verification, runs: Sequence[str], before: float) -> list[Verified]:
    """Each file once; in batches, since their rows hold footers."""
    done: list[Verified] = []
    with progress("verify archived files") as shown:
        while some := verification.due(before, _FILES_AT_ONCE, runs):
            known = {file.path for file in done}
            new = [row for row in some if row.path not in known]
            if not new:
                break  # Their rows are damaged, so that it cannot be noted that they were verified.
            done += [verification.verify(row, time.time()) for row in new]
            shown(len(new))
    return done


def _row(file: Verified) -> dict[str, str | None]:
    return {"path": file.path, "run_id": file.run_id, "problem": file.problem}
