"""`collage-monitor archive`: manual work on archived files."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import click

from collage_monitor.command.progress import progress
from collage_server.app import make_store
from collage_server.errors import ServerError
from collage_server.publishing import publish as publish_project
from collage_server.settings import settings_beside_server

__all__ = ["archive"]


@click.group("archive")
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
