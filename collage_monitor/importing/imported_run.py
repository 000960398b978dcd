"""A run read from a file of any kind, and how it is sent to a server: as a new, closed run.

`curve_files.py` and `json_lines.py` make a `Source`, `import` sends it. What is refused is in `ImportRefusal`s
(`tests/server/life/test_import.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import CollageError, ServerRefusal

__all__ = ["ImportRefusal", "Source", "new_run_id", "send_source"]

_LAUNCH: Final = "import"
_BATCH_BYTES: Final = 4 * 2**20
_BATCH_REPORTS: Final = 500
_REPORT_BYTES: Final = 64
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class ImportRefusal(CollageError):
    """A file that cannot be imported: where it goes wrong, and what to do about it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A run to come. `reports` is read once, while it is sent; `reports_expected` is None if unknown."""

    name: str
    reports: Iterator[wire.Report]
    reports_expected: int | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    watch: wire.WatchInfo | None = None
    layers: list[wire.Layer] = field(default_factory=list)
    statistics: list[str] = field(default_factory=list)

    def named(self, name: str) -> Source:
        """The same run under another name."""
        return replace(self, name=name)


def new_run_id() -> str:
    """A random run id that sorts by time: 48 bits of milliseconds and 80 random ones in Crockford's base 32."""
    number = (time.time_ns() // 1_000_000 << 80) | secrets.randbits(80)
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def send_source(
    client: Client,
    source: Source,
    project: str,
    run_id: str,
    progress: Callable[[int], None] = lambda _: None,
) -> wire.Run:
    """Create the run, send its reports and close it; `progress` gets the number sent so far.

    The stream's id follows from the run's and a report's number from its place in the file, so repeating an import
    with the same `run_id` continues it where it stopped, and stores nothing twice. The run is "failed" until it is
    whole, never "running", so no alert covers it, and a partial import never looks whole.

    Raises:
        ImportRefusal: the run is there and no import, the server refused a report, or the file goes wrong.
    """
    run = _create(client, source, project, run_id)
    # The file brings its own steps and times; the attempt begins at 0, before all of them.
    client.create_attempt(run_id, wire.AttemptCreate(launch_id=_LAUNCH, first_step=0))
    client.update_run(run.run_id, wire.RunUpdate(state="failed"))
    _send(client, source, run_id, progress)
    return client.update_run(run.run_id, wire.RunUpdate(state="finished"))


def _create(client: Client, source: Source, project: str, run_id: str) -> wire.Run:
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


def _send(client: Client, source: Source, run_id: str, progress: Callable[[int], None]) -> None:
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
    """Splits reports with too many scalars into several, and renumbers all."""
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
