"""Precision strategies side by side: the runs' numbers, and each strategy over its runs against a reference.

Losses are compared at a step that all runs have reached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from collage_monitor import wire
from collage_monitor.judgement import finite
from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_monitor.strategies import STRATEGIES, strategy_title

__all__ = ["RunResult", "StrategyResult", "loss_name", "results_of", "run_results"]

_LAST_SHARE: Final = 0.1
"""Of the steps: a training loss, noisy from step to step, is its mean over this last part."""
_WIDE: Final = frozenset({"float32", "float64"})
_NO_STRATEGY: Final = frozenset({None, "plain", "unknown"})


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run in the numbers by which strategies are compared. None: not known.

    `loss` is read at `loss_step`; `health` and `headline` are its verdict's, `numbers` those that it rests on,
    `advice` what it says to try. `trained`: what its optimizers train.
    """

    run_id: str
    name: str
    strategy: str | None
    dtype: str | None
    group: str | None
    seed: int | None
    health: str
    headline: str
    loss: float | None
    loss_step: int | None
    bytes_per_parameter: float | None
    tokens_per_second: float | None
    numbers: Mapping[str, float]
    advice: str
    trained: Sequence[wire.Trained]


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """A strategy over its runs. `gap`: its loss minus the reference's; None of the reference itself."""

    strategy: str | None
    dtype: str | None
    runs: tuple[RunResult, ...]
    is_reference: bool
    loss: Estimate | None
    gap: Estimate | None
    bytes_per_parameter: Estimate | None
    tokens_per_second: Estimate | None

    @property
    def title(self) -> str:
        """'Collage plus · bfloat16'."""
        return strategy_title(self.strategy, self.dtype)

    @property
    def health(self) -> str:
        """That of its runs: the first that speaks against one, else "unknown" if one is, else "healthy"."""
        against = [run.health for run in self.runs if run.health not in {"healthy", "unknown"}]
        return against[0] if against else "unknown" if any(r.health == "unknown" for r in self.runs) else "healthy"

    def over_runs(self, metric: str) -> Estimate | None:
        """A metric's mean over those runs that have it."""
        return mean_over_seeds([run.numbers[metric] for run in self.runs if metric in run.numbers])


def loss_name(rows: Sequence[wire.RunRow]) -> str:
    """The loss to compare by: the validation loss if every run logs it, else the training loss."""
    return "validation_loss" if rows and all("validation_loss" in row.scalars for row in rows) else "loss"


def run_results(rows: Sequence[wire.RunRow], compared: Sequence[wire.ComparedRun] = ()) -> list[RunResult]:
    """The runs' numbers, in the order of `rows`.

    compared: the same runs with the curve of `loss_name(rows)`: losses are then read at the last step that all of
    them have reached. Without it a validation loss is known only where all runs logged their last at one step.
    """
    name, found = loss_name(rows), {run.run_id: run for run in compared}
    curves = {run_id: curve for run_id, run in found.items() if (curve := _curve(run, name)) and curve.steps}
    common = min((curve.steps[-1] for curve in curves.values()), default=None)
    ends = {row.scalars[name].step for row in rows if name in row.scalars}
    results = []
    for row in rows:
        loss: float | None = None
        step = common
        if row.run_id in curves and common is not None:
            loss = _loss_at(curves[row.run_id], common, name)
        elif name == "validation_loss" and len(ends) == 1:
            loss, step = finite(row.scalars[name].value), row.scalars[name].step
        results.append(_result(row, found.get(row.run_id), loss, step))
    return results


def _result(row: wire.RunRow, run: wire.ComparedRun | None, loss: float | None, step: int | None) -> RunResult:
    speed = run.mean_scalars.get("tokens_per_second") if run else None
    logged = {name: entry.value for name, entry in row.scalars.items()}
    strategy = row.strategy or row.observed_strategy
    known = STRATEGIES.get(strategy or "unknown")
    size = finite(logged.get("bytes_per_parameter"))
    wide = row.dtype in _WIDE and strategy in _NO_STRATEGY
    overview = row.overview
    numbers = {key: finite(value) for key, value in overview.numbers.items()} if overview else {}
    return RunResult(
        run_id=row.run_id,
        name=row.name,
        strategy=strategy,
        dtype=row.dtype,
        group=row.group,
        seed=row.seed,
        health=overview.health if overview else "unknown",
        headline=overview.headline if overview else "Not evaluated yet.",
        loss=loss,
        loss_step=None if loss is None else step,
        # The catalogue counts bytes of 16-bit weights.
        bytes_per_parameter=size if size is not None or wide or known is None else known.bytes_per_parameter,
        tokens_per_second=finite(speed if speed is not None else logged.get("tokens_per_second")),
        numbers={key: value for key, value in numbers.items() if value is not None},
        advice=overview.advice if overview else "",
        trained=row.trained,
    )


def results_of(runs: Sequence[RunResult]) -> list[StrategyResult]:
    """The runs by strategy and dtype, cheapest in bytes first, each against the reference.

    The reference is plain storage in fp32 or wider, else fp32 master weights; with neither there is no gap.
    """
    by_kind: dict[tuple[str | None, str | None], list[RunResult]] = {}
    for run in runs:
        by_kind.setdefault((run.strategy, run.dtype), []).append(run)
    reference = _reference(list(by_kind))
    theirs = _seed_values(by_kind[reference]) if reference else []
    results = [
        StrategyResult(
            strategy=kind[0],
            dtype=kind[1],
            runs=tuple(own),
            is_reference=kind == reference,
            loss=mean_over_seeds([run.loss for run in own if run.loss is not None]),
            gap=None if kind == reference else difference(_seed_values(own), theirs),
            bytes_per_parameter=mean_over_seeds(
                [run.bytes_per_parameter for run in own if run.bytes_per_parameter is not None]
            ),
            tokens_per_second=mean_over_seeds(
                [run.tokens_per_second for run in own if run.tokens_per_second is not None]
            ),
        )
        for kind, own in by_kind.items()
    ]
    return sorted(results, key=_cost)


def _reference(kinds: Sequence[tuple[str | None, str | None]]) -> tuple[str | None, str | None] | None:
    wide = [kind for kind in kinds if kind[1] in _WIDE and kind[0] in _NO_STRATEGY]
    return next(iter([*wide, *(kind for kind in kinds if kind[0] == "master-weights")]), None)


def _cost(result: StrategyResult) -> tuple[float, bool, float]:
    """Bytes, a gap of which fp32 against itself has none, then what is left of the loss."""
    size = result.bytes_per_parameter
    loss = result.loss
    return (
        math.inf if size is None else round(size.value, 1),
        result.is_reference,
        math.inf if loss is None else loss.value,
    )


def _seed_values(runs: Sequence[RunResult]) -> list[SeedValue]:
    return [SeedValue(run.loss, run.group, run.seed) for run in runs if run.loss is not None]


def _curve(run: wire.ComparedRun, name: str) -> wire.Series | None:
    if run.series.metric == name:
        return run.series
    more = run.series.more
    return more.get(name) if isinstance(more, dict) else None


def _loss_at(curve: wire.Series, step: int, name: str) -> float | None:
    """A validation loss as it was last logged up to `step`; a training loss as its mean over the last steps."""
    first = 0.0 if name == "validation_loss" else step * (1 - _LAST_SHARE)
    values = [value for at, value in zip(curve.steps, curve.values, strict=True) if first <= at <= step]
    if name == "validation_loss":
        return finite(values[-1]) if values else None
    known = [number for value in values if (number := finite(value)) is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None
