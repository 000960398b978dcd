"""Tokens per second for runs that log only how many tokens they have seen: the slope over the run's own clock."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collage_dashboard.formatting import finite
from collage_monitor import wire

__all__ = ["lacks_throughput", "rate", "with_throughput"]

_NAME = "tokens_per_second"


def lacks_throughput(runs: Sequence[wire.ComparedRun]) -> bool:
    """Whether some run logs `tokens` but no `tokens_per_second`."""
    return any(_NAME not in run.mean_scalars and "tokens" in run.scalars for run in runs)


def with_throughput(runs: Sequence[wire.ComparedRun], tokens: wire.Comparison) -> list[wire.ComparedRun]:
    """The runs with their throughput filled in where it was not logged; `tokens` compares `tokens` over time."""
    rates = {run.run_id: rate(run.series) for run in tokens.runs}
    return [
        run
        if _NAME in run.mean_scalars or (known := rates.get(run.run_id)) is None
        else msgspec.structs.replace(run, mean_scalars={**run.mean_scalars, _NAME: known})
        for run in runs
    ]


def rate(series: wire.Series) -> float | None:
    """Tokens per second of wall clock between the first and the last point; None with fewer than two."""
    points = [
        (seconds, tokens)
        for position, value in zip(series.positions, series.values, strict=True)
        if (seconds := finite(position)) is not None and (tokens := finite(value)) is not None
    ]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
