"""A store that keeps every report and answers by the definitions: slow, and short enough to be read."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from collage_monitor import wire
from collage_monitor.statistics import finish, merge_shards, reduce_steps
from tests.server.samples import STATISTICS


@dataclass
class NaiveStream:
    """One process's stream, in the order of registration, and the first report of each seq."""

    stream_id: str
    number: int
    attempt: int
    rank: int
    replica: int
    reports: dict[int, wire.Report] = field(default_factory=dict)
    next_seq: int = -1


@dataclass(frozen=True)
class _Row:
    stream: NaiveStream
    report: wire.Report

    def totals(self, *, by_layer):
        """By statistic, of the model or [layer]; a layer that the report leaves out is NaN."""
        data, shape = (self.report.statistics, (len(STATISTICS), -1)) if by_layer else (self.report.model, -1)
        assert data is not None
        return dict(zip(STATISTICS, np.frombuffer(data).reshape(shape), strict=True))


class NaiveRun:
    """What was reported of one run."""

    def __init__(self, run_id):
        self.run_id = run_id
        self.first_steps: list[int] = []
        self.streams: list[NaiveStream] = []
        self._merged = {}

    def steps(self, rank=None):
        """Visible measured rows by step, of all ranks or of one."""
        rows = self._visible(lambda report: report.statistics is not None)
        if rank is not None:
            rows = {step: [row for row in held if row.stream.rank == rank] for step, held in rows.items()}
        return {step: held for step, held in sorted(rows.items()) if held}

    def ranks_at(self, rows):
        """How many ranks have reported all of a step."""
        by_rank = defaultdict(list)
        for row in rows:
            by_rank[row.stream.rank].append(row.report.reports_of_step)
        return sum(len(parts) >= max(parts) for parts in by_rank.values())

    def totals(self, rows, *, by_layer):
        """Of one step: shards merged, of replicas the lowest alone."""
        key = (by_layer, *((row.stream.number, row.report.seq) for row in rows))
        if key not in self._merged:
            lowest = min(row.stream.replica for row in rows)
            parts = [row.totals(by_layer=by_layer) for row in rows if row.stream.replica == lowest]
            self._merged[key] = merge_shards(parts)
        return self._merged[key]

    def over_steps(self, steps, *, by_layer):
        """Totals of several steps, oldest first, each with its shards merged before."""
        parts = [self.totals(rows, by_layer=by_layer) for rows in steps]
        return reduce_steps({key: np.stack([part[key] for part in parts]) for key in parts[0]})

    def extremes(self, steps, metric):
        """The least and greatest of a metric over single steps of the model."""
        values = [float(finish(metric, self.totals(rows, by_layer=False))) for rows in steps]
        return min(values), max(values)

    def scalars(self):
        """Name → (steps, values): the mean over the ranks."""
        names = {name for stream in self.streams for report in stream.reports.values() for name in report.scalars}
        found = {}
        for name in sorted(names):
            rows = self._visible(lambda report, name=name: name in report.scalars)
            steps = sorted(rows)
            values = []
            for step in steps:
                last = {row.stream.rank: row for row in sorted(rows[step], key=lambda row: row.report.seq)}
                values.append(float(np.mean([row.report.scalars[name] for row in last.values()])))
            found[name] = (steps, values)
        return found

    def _visible(self, counts):
        """An attempt hides older ones at and after its first step; of two processes of a rank the older is seen."""
        rows = defaultdict(list)
        for stream in self.streams:
            hidden_from = min(self.first_steps[stream.attempt :], default=np.inf)
            for report in stream.reports.values():
                if report.step < hidden_from and counts(report):
                    rows[report.step].append(_Row(stream, report))
        return {step: _rightful(held) for step, held in rows.items()}


def _rightful(rows):
    newest = max(row.stream.attempt for row in rows)
    rows = sorted((row for row in rows if row.stream.attempt == newest), key=lambda row: row.stream.number)
    oldest = {row.stream.rank: row.stream.number for row in reversed(rows)}
    return [row for row in rows if oldest[row.stream.rank] == row.stream.number]
