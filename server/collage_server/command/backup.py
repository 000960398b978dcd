"""`collage-monitor backup`: a file that holds everything the database holds, and archived files."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import click

from collage_monitor.command import VerbGroup
from collage_monitor.command.progress import progress
from collage_monitor.command.terminal import printable
from collage_server.app import make_store
from collage_server.export.drill import Drill, drill
from collage_server.settings import Settings, settings_beside_server
from collage_server.store.backup import Backup, back_up, verify_backup
from collage_server.store.backup import restore as restore_store

__all__ = ["backup"]

_DUMP = (
    "the database is PostgreSQL, which has its own way: `pg_dump --format=custom --file=FILE DATABASE` while the "
    "server serves, `pg_restore --dbname=DATABASE FILE` into an empty database"
)


@click.group("backup", cls=VerbGroup)
def backup() -> None:
    """Back-ups of an SQLite database and of archived files."""


@backup.command("make")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder of the server.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.option("--drill", "drilled", is_flag=True, help="Also restore FILE aside, and compare the answers of runs.")
@click.option("--runs", default=10, show_default=True, type=click.IntRange(1), help="With --drill: how many runs.")
def make(file: Path, folder: Path | None, as_json: bool, drilled: bool, runs: int) -> None:
    """Copy the database into FILE while the server serves, and archived files into the folder `archive` beside it.

    Archived files never change: one that is there already is read as a whole, and copied again if it differs from
    what was written. Those in a bucket stay there.

    It holds everything acknowledged before the command began, and perhaps some of what came later. It does
    not hold the server's own token, the file `token` of the data folder.

    --drill restores it into a temporary folder beside FILE, compares runs chosen at random by a digest of all their
    numbers, and says what a loss would cost now. Status 1 if one differs.
    """
    settings = _settings(folder)
    with progress("copy the database and archived files"):
        made = back_up(settings.folder / "collage.sqlite", file, archive=_archive(settings))
    if drilled:
        with progress("restore aside, and compare runs"):
            outcome = _drilled(settings, file, runs)
        _say(made, as_json, drill=outcome)
        raise SystemExit(1 if outcome.problems else 0)
    _say(made, as_json)


@backup.command("verify")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder of the server.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def verify(file: Path, folder: Path | None, as_json: bool) -> None:
    """Read the back-up FILE and its archived files as a whole; status 1 if something is damaged."""
    with progress("read the back-up and its archived files"):
        found = verify_backup(file, with_archive=_archive(_settings(folder)) is not None)
    _say(found, as_json, "all of them good")


def _drilled(settings: Settings, file: Path, runs: int) -> Drill:
    """Restore the back-up into a folder that is removed afterwards, and compare it with what the server has."""
    with tempfile.TemporaryDirectory(prefix="drill-", dir=file.absolute().parent) as name:
        folder, has_files = Path(name), _archive(settings) is not None
        aside = dataclasses.replace(
            settings, folder=folder, archive=str(folder / "archive") if has_files else settings.archive
        )
        restore_store(file, folder / "collage.sqlite", archive=_archive(aside))
        server, copy = make_store(settings), make_store(aside)
        try:
            for store in (server, copy):
                store.open(only_reads=True)
            return drill(server, copy, runs)
        finally:
            copy.close()
            server.close()


@backup.command("restore")
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


def _say(found: Backup, as_json: bool, files: str | None = None, drill: Drill | None = None) -> None:
    if as_json:
        more = {} if drill is None else {"drill": dataclasses.asdict(drill)}
        click.echo(json.dumps(dataclasses.asdict(found) | more))
    else:
        click.echo(
            f"{found.file}  {found.bytes:,} bytes, {found.runs} runs, schema {found.schema_revision}, checked; "
            f"{found.archived_files} archived files, {files or f'{found.copied_files} of them copied'}"
        )
        if drill is not None:
            _say_drill(drill)
    if found.damaged_files:
        click.echo(
            f"the server has lost or damaged {len(found.damaged_files)} archived files, such as "
            f"{found.damaged_files[0]}: `collage-monitor archive verify` puts them back from "
            f"{Path(found.file).parent / 'archive'}",
            err=True,
        )


def _say_drill(found: Drill) -> None:
    click.echo(f"restored aside: {found.compared} runs compared by digest, {len(found.problems)} of them differ")
    for problem in found.problems:
        click.echo(printable(problem))
    click.echo(
        f"a loss now would cost {found.lost_reports} reports of {found.lost_in_runs} runs and of {found.lost_runs} "
        "whole runs, unless their senders still have them"
    )
