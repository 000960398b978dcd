"""`import`: a file as a new run, closed from the start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from collage_monitor import wire
from collage_monitor.command.show import server_options
from collage_monitor.importing import Source, new_run_id, read_curves, read_events, read_lines, send_source
from collage_monitor.local import data_folder, read_token
from collage_monitor.transfer import TransferClient

__all__ = ["import_run"]

_STEP: Final = "step"


@click.command("import")
@server_options
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--project", required=True, help="Project that the run will belong to.")
@click.option("--name", help="Name of the run; default: its old name, or the file's.")
@click.option("--run-id", help="Id of the run, to go on with an import that broke off; default: a new one.")
@click.option(
    "--format", "file_format", type=click.Choice(["jsonl", "csv", "tensorboard"]), help="Default: by the name."
)
@click.option("--step-column", default=_STEP, show_default=True, help="Column of the steps in a CSV file.")
@click.option("--rename", multiple=True, metavar="COLUMN=NAME", help="Another name for a curve; repeat it.")
def import_run(
    server_url: str,
    token: str | None,
    as_json: bool,
    path: Path,
    project: str,
    name: str | None,
    run_id: str | None,
    file_format: str | None,
    step_column: str,
    rename: tuple[str, ...],
) -> None:
    """Make a finished run of an export in JSON lines, or of loss curves in CSV or TensorBoard event files."""
    source = _source(path, file_format, step_column, _pairs(rename))
    if name is not None:
        source = source.named(name)
    where = run_id or new_run_id()
    with (
        TransferClient(server_url, token or read_token(data_folder())) as client,
        click.progressbar(length=source.reports_expected or 0, label=f"import {path.name}", file=sys.stderr) as bar,
    ):
        run = send_source(client, source, project, where, bar.update)
    click.echo(wire.encode_json(run).decode() if as_json else run.run_id)


def _source(path: Path, stated: str | None, step_column: str, rename: dict[str, str]) -> Source:
    chosen = stated or path.suffix.removeprefix(".").lower()
    if chosen != "csv" and (rename or step_column != _STEP):
        raise click.UsageError(f"--rename and --step-column are for columns of CSV files, {path} is none")
    if chosen == "jsonl":
        return read_lines(path)
    if chosen == "csv":
        return read_curves(path, step_column=step_column, rename=rename)
    if chosen == "tensorboard" or path.is_dir() or "tfevents" in path.name:
        return read_events(path)
    raise click.UsageError(
        f"{path} ends in neither jsonl nor csv and holds no tfevents; say what it is with --format"
    )


def _pairs(rename: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for entry in rename:
        old, equals, new = entry.partition("=")
        if not (old and equals and new):
            raise click.UsageError(f"--rename {entry!r} is not COLUMN=NAME")
        pairs[old] = new
    return pairs
