"""`collage-monitor archive query`: SQL over the finished runs of an archive, by DuckDB in this process.

It reads the tables that `archive publish` keeps. `runs`: one row a run. `layers`: totals by run, layer (its name)
and step, one column a statistic. Every metric by name, over whole runs `run_metrics` and `layer_metrics`, at each
step `step_metrics` and `layer_step_metrics`: totals merge over layers within a step, then over steps, each by its
own rules, and are finished as the catalogue does. Metrics that are not ratios of totals (intervals, histograms) are
left out.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import duckdb
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from collage_monitor import wire
from collage_monitor.command.progress import progress
from collage_monitor.command.terminal import table
from collage_monitor.errors import CatalogueError, CollageError
from collage_monitor.local import data_folder
from collage_monitor.metrics import statistic
from collage_monitor.statistics import metric_keys, metric_sql, quoted_name

__all__ = ["open_fleet", "query"]

_OPTIONS: Final = {"allow_http": "true", "timeout": "60s", "connect_timeout": "5s"}
_CLIENT: Final[Any] = {"allow_http": True, "timeout": "60s", "connect_timeout": "5s"}
_PLACES: Final = ("run", "attempt", "level", "layer", "name", "first_step", "step", "time", "ranks", "points")
_RUN: Final = ("project", "run")
_OVER_STEPS: Final[Mapping[str, str]] = {
    "sum": "sum({0})",
    "max": "max({0})",
    "min": "min({0})",
    "last": "arg_max({0}, step)",
}


@click.command("query")
@click.argument("sql")
@click.option(
    "--archive",
    envvar="COLLAGE_SERVER_ARCHIVE",
    default=lambda: str(data_folder() / "archive"),
    show_default="the local server's",
    help="Folder or bucket (s3://…) of archived files.",
)
@click.option("--project", "projects", multiple=True, help="Only this project; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print rows as CSV.")
def query(sql: str, archive: str, projects: tuple[str, ...], as_json: bool, as_csv: bool) -> None:
    """Run a SQL query (DuckDB) over all finished runs that `archive publish` has put into tables. No server is
    needed.

    Views: runs, layers, run_metrics, layer_metrics, step_metrics, layer_step_metrics; `describe VIEW` lists its
    columns.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv are two formats; give one of them")
    with progress("query the archive"), open_fleet(archive, projects) as connection:
        try:
            found = connection.sql(sql)
            names, rows = (found.columns, found.fetchall()) if found is not None else ([], [])
        except duckdb.Error as error:
            raise CollageError(f"the query failed: {error}") from error
    if as_json:
        click.echo(wire.encode_json([dict(zip(names, map(_plain, row), strict=True)) for row in rows]).decode())
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([names, *rows])
    else:
        click.echo(table(names, rows))


def _plain(value: Any) -> Any:
    return wire.to_number(value) if isinstance(value, float) else value


def open_fleet(archive: str, projects: Sequence[str] = ()) -> duckdb.DuckDBPyConnection:
    """A connection with the views over an archive's projects (default: all). `archive`: a folder or a bucket's URL.

    Files are read on demand; settings of a bucket come from the environment (AWS_…, GOOGLE_…).

    Raises:
        CollageError: there is no such archive, or it has no published table of these projects.
    """
    is_bucket = "://" in archive
    address = archive.rstrip("/") if is_bucket else str(Path(archive).expanduser().absolute())
    try:
        store = from_url(address, client_options=_CLIENT) if is_bucket else LocalStore(address)
        runs, tables = _published(store, address, _OPTIONS if is_bucket else {})
    except (BaseError, DeltaError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]  # What follows is for the library's programmers.
        raise CollageError(f"the archive {archive} cannot be read ({reason}); name one by --archive") from error
    wanted = [place for place, held in enumerate(runs) if not projects or held in projects]
    absent = sorted(set(projects) - set(runs))
    if absent or not wanted:
        what = f"no published table of {', '.join(absent)}" if absent else "no published table"
        raise CollageError(
            f"the archive {archive} has {what}; run `collage-monitor archive publish` where the server's data is"
        )
    connection = duckdb.connect()
    # Steps and times as the archive has them, wherever this is read.
    connection.execute("set timezone = 'UTC'")
    names = list(runs)
    _create_views(connection, [(names[place], runs[names[place]], tables[names[place]]) for place in wanted])
    return connection


def _published(
    store: ObjectStore, address: str, options: dict[str, str]
) -> tuple[dict[str, pa.Table], dict[str, DeltaTable]]:
    """The runs and the table of each published project."""
    runs, tables = {}, {}
    for folder in map(str, obstore.list_with_delimiter(store)["common_prefixes"]):
        table = f"{address}/{folder}"
        if DeltaTable.is_deltatable(table, options):
            content = obstore.get(store, f"{folder}/runs.parquet").bytes()
            held = pq.read_table(pa.BufferReader(content.to_bytes()), page_checksum_verification=True)
            if held.num_rows:
                project = held.column("project")[0].as_py()
                runs[project], tables[project] = held, DeltaTable(table, storage_options=options)
    return runs, tables


def _create_views(
    connection: duckdb.DuckDBPyConnection, published: Sequence[tuple[str, pa.Table, DeltaTable]]
) -> None:
    statistics: dict[str, None] = {}
    parts = []
    for place, (project, _, published_table) in enumerate(published):
        held = published_table.to_pyarrow_dataset()
        own = [name for name in held.schema.names if name not in _PLACES]
        statistics |= dict.fromkeys(own)
        connection.register(f"published_{place}", held)
        columns = ", ".join(
            ["run", "attempt", "level", "name as layer", "layer as number", *_PLACES[5:], *map(quoted_name, own)]
        )
        title = project.replace("'", "''")
        parts.append(f"select '{title}' as project, {columns} from published_{place}")
    connection.register("published_runs", pa.concat_tables([runs for _, runs, _ in published]))
    connection.execute("create view runs as select * from published_runs")
    connection.execute(f"create view layers as {' union all by name '.join(parts)}")
    keys = list(statistics)
    for name, by, steps in (
        ("run_metrics", _RUN, False),
        ("layer_metrics", (*_RUN, "layer"), False),
        ("step_metrics", _RUN, True),
        ("layer_step_metrics", (*_RUN, "layer"), True),
    ):
        connection.execute(_metrics_view(name, by, keys, steps=steps))


def _metrics_view(name: str, by: Sequence[str], statistics: Sequence[str], *, steps: bool) -> str:
    """A view over `layers`: a row for each value of `by` (with `steps` at each step), every metric a column."""
    known = [key for key in statistics if _merges(key)]
    finished = [(key, sql) for key in metric_keys(known) if (sql := metric_sql(key, known)) is not None]
    places = ", ".join(map(quoted_name, by))
    within = _columns(known, lambda key: f"{statistic(key).over_shards}({quoted_name(key)})")
    over = _columns(known, lambda key: _OVER_STEPS[statistic(key).over_steps].format(quoted_name(key)))
    metrics = ", ".join(f"{sql} as {quoted_name(key)}" for key, sql in finished)
    where = "min(first_step) as first_step, max(time) as time"
    merged = f"select {places}, step, {where}, {within} from layers group by {places}, step"
    if not steps:
        span = "min(first_step) as first_step, max(step) as last_step, max(time) as time"
        merged = f"select {places}, {span}, {over} from ({merged}) group by {places}"
    span = "step, first_step, time" if steps else "first_step, last_step, time"
    return f"create view {name} as select {places}, {span}, {metrics} from ({merged})"


def _columns(keys: Sequence[str], merged: Callable[[str], str]) -> str:
    return ", ".join(f"{merged(key)} as {quoted_name(key)}" for key in keys)


def _merges(key: str) -> bool:
    try:
        return statistic(key).over_steps in _OVER_STEPS
    except CatalogueError:
        return False
