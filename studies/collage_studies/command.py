"""`python -m collage_studies`: run a study's missing trials, then write its page from the records.

Trials run in `worker.py`, pages are written by `pages.py`; a study itself only says what to run and how to read it
(`tests/studies/`).
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click
import msgspec
from collage_demo.pool import WorkerPool
from collage_demo.worker import ProgressLine

from collage_monitor.client import Client
from collage_monitor.command import require
from collage_monitor.command.up import Services
from collage_monitor.local import DASHBOARD_PORT, SERVER_PORT
from collage_studies.catalogue import STUDY_NAMES, study_named
from collage_studies.repeats import record_file, repeat_section, repeats_of, reseeded
from collage_studies.study import Curve, Record, RecordLine, ReportTarget, Study, Trial
from collage_studies.trial_records import RecordFile, compact
from collage_studies.worker import TrialTask

__all__ = ["study"]

_CURVE_POINTS = 120
_ALERT_SECONDS = 2
"""How often the server evaluates its alerts: trials end within minutes."""


@click.command("study")
@click.argument("name", type=click.Choice([*STUDY_NAMES, "all"]))
@click.option(
    "--first-seed",
    type=click.IntRange(1),
    help="Repeat it with seeds from this one on; the page says whether that says the same.",
)
@click.option("--pages-only", is_flag=True, help="Run nothing: write the pages of what has been run.")
@click.option("--quick", is_flag=True, help="A small part of it, in a minute; kept apart from the whole.")
@click.option(
    "--output",
    default="study-output",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of pages, pictures and records.",
)
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder of the server. [OUTPUT/server]")
@click.option("--processes", default=2, show_default=True, type=click.IntRange(1), help="Trials at once.")
@click.option("--port", default=SERVER_PORT, show_default=True, help="Port of the server.")
@click.option("--dashboard-port", default=DASHBOARD_PORT, show_default=True, help="Port of the dashboard.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def study(
    name: str,
    first_seed: int | None,
    pages_only: bool,
    quick: bool,
    output: Path,
    folder: Path | None,
    processes: int,
    port: int,
    dashboard_port: int,
    as_json: bool,
) -> None:
    """Answer a question about low precision by training, watched like any training, and write a page about it.

    A trial that has its record under OUTPUT/data is not run again: an interrupted study goes on where it was.
    """
    require("study", "server", "studies")
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = [study_named(entry) for entry in (STUDY_NAMES if name == "all" else [name])]
    output = output / "quick" if quick else output
    output.mkdir(parents=True, exist_ok=True)
    batches = [_batch(entry, quick, output, first_seed) for entry in chosen]
    if not pages_only and any(file.missing(trials) for _, trials, file in batches):
        data = (folder or output / "server").resolve()
        defaults = {"COLLAGE_SERVER_ALERT_INTERVAL_SECONDS": str(_ALERT_SECONDS)}
        with Services(data, port, dashboard_port, alone=True, defaults=defaults) as services:
            services.start_dashboard()
            click.echo(f"dashboard  {services.dashboard_url}", err=True)
            for entry, trials, file in batches:
                _run(entry, trials, file, services, processes)
    written = [path for entry in chosen if (path := _write(entry, quick, output)) is not None]
    from collage_studies.summary import write_summary

    write_summary(output, quick=quick)
    names = [str(path) for path in written]
    click.echo(json.dumps({"pages": names}) if as_json else "\n".join(f"written    {path}" for path in names))


def _batch(
    entry: Study, quick: bool, output: Path, first_seed: int | None
) -> tuple[Study, Sequence[Trial], RecordFile]:
    """The trials of a study or of its repeat, and where their records are kept."""
    trials = entry.trials(quick)
    if first_seed is not None:
        try:
            trials = reseeded(trials, first_seed)
        except ValueError as error:
            told = f"{entry.name} cannot be repeated with --first-seed {first_seed}: {error}"
            raise click.UsageError(told) from error
    return entry, trials, record_file(entry.name, output, first_seed)


def _write(entry: Study, quick: bool, output: Path) -> Path | None:
    """Write the page of a study from all records that are there; None, and a line, where its own are not whole."""
    from collage_studies.pages import write_page
    from collage_studies.summary import records_of

    trials, file = entry.trials(quick), record_file(entry.name, output)
    if file.missing(trials):
        click.echo(f"no page of {entry.name}: it has not been run whole under {output}", err=True)
        return None
    records = file.of(trials)
    others = {name: records_of(name, output, quick=quick) for name in entry.reads}
    found = entry.page([*records, *(record for own in others.values() for record in own)])
    repeated = [
        part for repeat in repeats_of(entry, trials, output) for part in repeat_section(entry, records, repeat)
    ]
    read = {name: len(own) for name, own in others.items()}
    return write_page(entry, found, records, output, read=read, repeated=repeated)


def _run(entry: Study, trials: Sequence[Trial], file: RecordFile, services: Services, processes: int) -> None:
    """Run the trials that have no record, and keep each record as its trial ends."""
    missing = file.missing(trials)
    click.echo(f"{entry.name}: {len(trials)} trials, {len(trials) - len(missing)} of them done before", err=True)
    reporting = ReportTarget(services.server_url, services.folder, f"{entry.name} {time.strftime('%Y-%m-%d')}")
    lock = threading.Lock()

    def keep(task: TrialTask, line: ProgressLine | RecordLine) -> None:
        if not isinstance(line, RecordLine):
            return
        with Client(services.server_url, services.token) as client:
            record = compact(_with_curves(line.record, client))
        with lock:
            file.add(record)
        click.echo(f"{entry.name:<17}{task.name:<46}{record.cpu_seconds:7.1f} s", err=True)

    with WorkerPool(RecordLine, keep, processes, quiet=True) as pool:
        pool.run([TrialTask(entry.name, trial, reporting) for trial in missing])


def _with_curves(record: Record, client: Client) -> Record:
    """The record with what the server has of its run: merged metrics, last scalars, and the curves asked for."""
    (run,) = client.compare([record.run_id], "edq_ratio", points=_CURVE_POINTS).runs
    merged = {name: value for name, value in run.merged.items() if value is None or isinstance(value, float)}
    last = {name: logged.value for name, logged in run.scalars.items() if isinstance(logged.value, float)}
    values = {**last, **record.values}
    curves = {name: _curve(client, record.run_id, name) for name in record.trial.curves}
    return msgspec.structs.replace(record, values=values, merged=merged, curves={**record.curves, **curves})


def _curve(client: Client, run_id: str, name: str) -> Curve:
    """A metric or scalar over steps; of one type of module alone as METRIC@TYPE."""
    metric, _, module_type = name.partition("@")
    found = client.series(run_id, metric, module_type=module_type or None, points=_CURVE_POINTS)
    return Curve(list(found.steps), [value if isinstance(value, float) else None for value in found.values])


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
