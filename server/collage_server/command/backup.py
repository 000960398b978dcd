"""`collage-monitor backup` and `restore`: a file that holds everything the database holds, and archived files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from collage_monitor.command.progress import progress
from collage_server.settings import Settings, settings_beside_server
from collage_server.store.backup import Backup, back_up, verify_backup
from collage_server.store.backup import restore as restore_store

__all__ = ["backup", "restore"]

_DUMP = (
    "the database is PostgreSQL, which has its own way: `pg_dump --format=custom --file=FILE DATABASE` while the "
    "server serves, `pg_restore --dbname=DATABASE FILE` into an empty database"
)


@click.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder of the server.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.option("--verify", is_flag=True, help="Only read FILE and its archived files; status 1 if damaged.")
def backup(file: Path, folder: Path | None, as_json: bool, verify: bool) -> None:
    """Copy the database into FILE while the server serves, and archived files into the folder `archive` beside it.

    Archived files never change: one that is there already is read as a whole, and copied again if it differs from
    what was written. Those in a bucket stay there.

    It holds everything acknowledged before the command began, and perhaps some of what came later. It does
    not hold the server's own token, the file `token` of the data folder.
    """
    settings = _settings(folder)
    if verify:
        with progress("read the back-up and its archived files"):
            found = verify_backup(file, with_archive=_archive(settings) is not None)
        _say(found, as_json, "all of them good")
        return
    with progress("copy the database and archived files"):
        made = back_up(settings.folder / "collage.sqlite", file, archive=_archive(settings))
    _say(made, as_json)


@click.command("restore")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Data folder to restore into; it must hold no database.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.option("--dry-run", is_flag=True, help="Check everything and write nothing.")
def restore(file: Path, folder: Path | None, as_json: bool, dry_run: bool) -> None:
    """Restore the back-up FILE while the server is stopped; never overwrites a database."""
    settings = _settings(folder)
    with progress("check the back-up" if dry_run else "put the back-up in place"):
        made = restore_store(file, settings.folder / "collage.sqlite", archive=_archive(settings), dry_run=dry_run)
    _say(made, as_json, f"{made.copied_files} of them would be copied" if dry_run else None)


def _settings(folder: Path | None) -> Settings:
    settings = settings_beside_server(folder)
    if settings.database is not None:
        raise click.ClickException(_DUMP)
    return settings


def _archive(settings: Settings) -> Path | None:
    """The folder of archived files; None for a bucket, or without an archive."""
    address = settings.archive_address
    return None if address is None or "://" in address else Path(address)


def _say(found: Backup, as_json: bool, files: str | None = None) -> None:
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
    else:
        click.echo(
            f"{found.file}  {found.bytes:,} bytes, {found.runs} runs, schema {found.schema_revision}, checked; "
            f"{found.archived_files} archived files, {files or f'{found.copied_files} of them copied'}"
        )
    if found.damaged_files:
        click.echo(
            f"the server has lost or damaged {len(found.damaged_files)} archived files, such as "
            f"{found.damaged_files[0]}: `collage-monitor archive verify` puts them back from "
            f"{Path(found.file).parent / 'archive'}",
            err=True,
        )
