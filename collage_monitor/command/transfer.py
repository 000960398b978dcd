"""`export` and `import`: a run as a file, and a file as a new run, closed from the start.

Formats are the server's `export/` and `collage_monitor.importing`'s; an import of an export gives the same totals
(`tests/contract/test_export.py`, `tests/server/life/test_import.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast, get_args

import click
import msgspec

from collage_monitor import wire
from collage_monitor.client import ExportFormat
from collage_monitor.command.progress import progress
from collage_monitor.command.server import find_run, open_client, server_options
from collage_monitor.command.terminal import printable
from collage_monitor.errors import CollageError
from collage_monitor.importing import Source, new_run_id, read_curves, read_events, read_lines, send_source

__all__ = ["export", "import_run"]

_FORMATS: Final = get_args(ExportFormat)
_STEP: Final = "step"


@click.command("export")
@server_options
@click.argument("run")
@click.option(
    "--format", "export_format", type=click.Choice(_FORMATS), help="Format of the file; default: by its ending."
)
@click.option("--output", type=click.Path(path_type=Path), help="File to write, - for standard output.")
@click.option("--layers/--no-layers", default=True, show_default=True, help="Also write the numbers of each layer.")
@click.option(
    "--ranks/--no-ranks",
    default=False,
    show_default=True,
    help="Also write each rank's totals for the whole model.",
)
def export(
    server_url: str,
    token: str | None,
    as_json: bool,
    run: str,
    export_format: str | None,
    output: Path | None,
    layers: bool,
    ranks: bool,
) -> None:
    """Write all data of RUN to a file: totals, metrics, logged scalars. RUN is an id, the beginning of one, or a
    name.

    JSON lines (jsonl) hold everything and can be imported again; csv and parquet are one wide table. The file
    stands under its name only when it is whole.
    """
    chosen = _format(export_format, output)
    if as_json and str(output) == "-":
        raise click.UsageError("--json describes the file; it cannot stand beside --output -")
    size = 0
    with open_client(server_url, token) as client:
        run_id = find_run(client, run).run_id
        path = output or Path(f"{run_id}.{chosen}")
        with (
            client.export(run_id, chosen, layers=layers, ranks=ranks) as stream,
            _target(path) as file,
            progress(f"export {run_id}", stream.lines) as advance,
        ):
            for part in stream.parts:
                file.write(part)
                size += len(part)
                advance(part.count(b"\n"))
    if as_json:
        written = {"run_id": run_id, "format": chosen, "file": str(path), "bytes": size}
        click.echo(msgspec.json.encode(written).decode())
    elif str(path) != "-":
        click.echo(f"{path}  {size:,} bytes")


def _format(stated: str | None, output: Path | None) -> ExportFormat:
    if stated is not None:
        return cast(ExportFormat, stated)
    ending = "" if output is None else output.suffix.removeprefix(".")
    if output is None or ending in _FORMATS or str(output) == "-":
        return cast(ExportFormat, ending or "jsonl")
    raise click.UsageError(f"--output {output} ends in none of {', '.join(_FORMATS)}; say which with --format")


@contextmanager
def _target(path: Path) -> Iterator[BinaryIO]:
    """The file under a temporary name until it is whole; it is removed if something fails."""
    if str(path) == "-":
        yield sys.stdout.buffer
        return
    part = path.with_name(path.name + ".part")
    try:
        file = part.open("wb")
    except OSError as error:
        raise CollageError(f"{path} cannot be written ({error.strerror}); choose another --output") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@click.command("import")
@server_options
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--project", required=True, help="Project that the run will belong to.")
@click.option("--name", help="Name of the run; default: its old name, or the file's.")
@click.option("--run-id", help="Id of the run, to continue an interrupted import; default: a new one.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["jsonl", "csv", "tensorboard"]),
    help="Format of the file; default: by its name.",
)
@click.option("--step-column", default=_STEP, show_default=True, help="Column of a CSV file that holds the steps.")
@click.option("--rename", multiple=True, metavar="COLUMN=NAME", help="Rename a column; may be repeated.")
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
        open_client(server_url, token) as client,
        progress(printable(f"import {path.name}"), source.reports_expected) as advance,
    ):
        run = send_source(client, source, project, where, advance)
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
