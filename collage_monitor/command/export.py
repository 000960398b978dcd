"""`export`: a run as a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast, get_args

import click
import msgspec

from collage_monitor.command.show import server_options
from collage_monitor.errors import CollageError
from collage_monitor.local import data_folder, read_token
from collage_monitor.transfer import ExportFormat, TransferClient

__all__ = ["export"]

_FORMATS = get_args(ExportFormat)


@click.command("export")
@server_options
@click.argument("run_id")
@click.option("--format", "export_format", type=click.Choice(_FORMATS), help="Default: by the file's ending.")
@click.option("--output", type=click.Path(path_type=Path), help="File to write, - for standard output.")
@click.option("--layers/--no-layers", default=True, show_default=True, help="Also what is known by layer.")
@click.option("--ranks/--no-ranks", default=False, show_default=True, help="Also each rank's totals of its model.")
def export(
    server_url: str,
    token: str | None,
    as_json: bool,
    run_id: str,
    export_format: str | None,
    output: Path | None,
    layers: bool,
    ranks: bool,
) -> None:
    """Write all that is stored of a run: totals, metrics and logged scalars, ranks merged.

    JSON lines (jsonl) hold everything and can be imported again; csv and parquet are one wide table. The file
    stands under its name only when it is whole.
    """
    chosen = _format(export_format, output)
    path = output or Path(f"{run_id}.{chosen}")
    if as_json and str(path) == "-":
        raise click.UsageError("--json describes the file; it cannot stand beside --output -")
    with (
        TransferClient(server_url, token or read_token(data_folder())) as client,
        client.export(run_id, chosen, layers=layers, ranks=ranks) as stream,
        _target(path) as file,
        click.progressbar(length=stream.lines or 0, label=f"export {run_id}", file=sys.stderr) as bar,
    ):
        size = 0
        for part in stream.parts:
            file.write(part)
            size += len(part)
            if stream.lines:
                bar.update(part.count(b"\n"))
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
    """The file under a passing name, which is given up when something fails."""
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
