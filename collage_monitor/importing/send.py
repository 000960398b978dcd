"""Sending a source to a server as a new, closed run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from collage_monitor import wire
from collage_monitor.errors import ServerRefusal
from collage_monitor.importing.source import ImportRefusal, Source
from collage_monitor.transfer import TransferClient

__all__ = ["send_source"]

_LAUNCH: Final = "import"
_BATCH_BYTES: Final = 4 * 2**20
_BATCH_REPORTS: Final = 500
_REPORT_BYTES: Final = 64


def send_source(
    client: TransferClient,
    source: Source,
    project: str,
    run_id: str,
    progress: Callable[[int], None] = lambda _: None,
) -> wire.Run:
    """Create the run, send its reports and close it; `progress` hears how many were sent.

    The stream's id follows from the run's and a report's number from its place in the file, so the same import
    with the same `run_id` goes on where another one broke off and stores nothing twice. The run is "failed" until
    it is whole, never "running": no alert is about it, and one that breaks off is not taken for whole.

    Raises:
        ImportRefusal: the run is there and no import, the server refused a report, or the file goes wrong.
    """
    run = _create(client, source, project, run_id)
    client.update_run(run.run_id, wire.RunUpdate(state="failed"))
    _send(client, source, run_id, progress)
    return client.update_run(run.run_id, wire.RunUpdate(state="finished"))


def _create(client: TransferClient, source: Source, project: str, run_id: str) -> wire.Run:
    """A new run, or the one that an earlier import began: another's points would be hidden by this one's."""
    create = wire.RunCreate(
        run_id=run_id,
        resume="never",
        name=source.name,
        group=source.group,
        tags=source.tags,
        notes=source.notes,
        seed=source.seed,
        config=source.config,
    )
    try:
        return client.create_run(project, create)
    except ServerRefusal as error:
        if error.field != "resume":
            raise
    known = client.update_run(run_id, wire.RunUpdate())
    if any(attempt.launch_id != _LAUNCH for attempt in known.attempts):
        raise ImportRefusal(f"run {run_id!r} is there and no import; leave --run-id out to make a new one")
    return client.create_run(project, msgspec.structs.replace(create, resume="allow"))


def _send(client: TransferClient, source: Source, run_id: str, progress: Callable[[int], None]) -> None:
    # Times and steps are the file's: the attempt begins at 0, before all of them.
    client.create_attempt(run_id, wire.AttemptCreate(launch_id=_LAUNCH, first_step=0))
    stream_id = _stream_of(run_id)
    client.create_stream(
        run_id,
        wire.StreamCreate(
            stream_id=stream_id,
            launch_id=_LAUNCH,
            layers=source.layers,
            statistics=source.statistics,
            watch=source.watch,
        ),
    )
    for reports in _batches(_narrow(source.reports)):
        answer = client.send_reports(stream_id, wire.ReportBatch(reports=reports))
        if answer.rejected:
            first = answer.rejected[0]
            raise ImportRefusal(
                f"the server refused step {reports[first.index].step}: {first.message}; mend the file and "
                "import it under another run id"
            )
        progress(len(reports))


def _stream_of(run_id: str) -> str:
    """The id of an imported run's only stream."""
    return f"{run_id[-57:]}:import".lstrip("_.:-")


def _narrow(reports: Iterable[wire.Report]) -> Iterator[wire.Report]:
    """The reports, those that log under more names than one may in several, numbered anew."""
    limit = wire.LIMITS["scalars_per_report"]
    seq = 0
    for report in reports:
        names = list(report.scalars)
        for start in range(0, max(len(names), 1), limit):
            scalars = {name: report.scalars[name] for name in names[start : start + limit]}
            if start:
                yield wire.Report(seq=seq, step=report.step, time=report.time, scalars=scalars)
            else:
                yield msgspec.structs.replace(report, seq=seq, scalars=scalars)
            seq += 1


def _batches(reports: Iterator[wire.Report]) -> Iterator[list[wire.Report]]:
    batch: list[wire.Report] = []
    size = 0
    for report in reports:
        batch.append(report)
        size += _REPORT_BYTES * (1 + len(report.scalars)) + len(report.statistics or b"") + len(report.model or b"")
        if size >= _BATCH_BYTES or len(batch) == _BATCH_REPORTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
