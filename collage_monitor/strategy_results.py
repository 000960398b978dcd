"""Precision strategies side by side: the runs' numbers, and each strategy over its runs against a reference.

Losses are compared at a step that all runs have reached. Runs count as seeds of one strategy if project and
configuration agree. Otherwise each configuration has its own row, and none is compared with another's reference.

The comparison's page, the report and MCP answers call `run_results`, then `results_by_strategy`;
`recommendation.py` judges by it. It reads overviews and curves and asks no server
(`tests/dashboard/test_recommendation.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from collage_monitor import wire
from collage_monitor.diagnosis import NO_PROBLEM, finite
from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_monitor.strategies import STRATEGIES, strategy_title

__all__ = ["RunResult", "StrategyResult", "differences", "loss_name", "results_by_strategy", "run_results"]

_LAST_SHARE: Final = 0.1
"""Of the steps: a training loss, noisy from step to step, is its mean over this last part."""
_WIDE: Final = frozenset({"float32", "float64"})
_NO_STRATEGY: Final = frozenset({None, "plain", "unknown"})
_OF_STRATEGY: Final = re.compile(
    r".*(strategy|precision|dtype|autocast|master_weights?|kahan|stochastic_rounding|arithmetic).*|bf16|fp16|amp",
    re.IGNORECASE,
)
"""Entries of a configuration that name the strategy: in them strategies differ, and stay comparable."""
_CLASS: Final = re.compile(r".*\.|collage", re.IGNORECASE)
"""What an optimizer's class has before the name of its rule."""
_SHOWN: Final = 3


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run in the numbers by which strategies are compared. None: not known.

    `loss` is the one that `loss_name` says, read at `loss_step`. `health`, `short` and `advice` are the
    verdict's, and `numbers` those behind it, over the steps from the first to the last of `over`. `trained`: what
    its optimizers train. `configuration` is the same for seeds of one strategy, `entries` are those of its
    configuration, and its project, in which the runs differ.
    """

    run_id: str
    name: str
    strategy: str | None
    dtype: str | None
    group: str | None
    seed: int | None
    health: str
    short: str
    loss: float | None
    loss_step: int | None
    loss_name: str
    bytes_per_parameter: float | None
    tokens_per_second: float | None
    numbers: Mapping[str, float]
    advice: str
    trained: Sequence[wire.Trained]
    configuration: str = ""
    is_treated: bool = False
    entries: Mapping[str, Any] = field(default_factory=dict)
    resumed_at: Sequence[int] = ()
    over: tuple[int, int] | None = None

    @property
    def is_odd(self) -> bool:
        """Whether something befell this run: it was resumed, or is not well."""
        return bool(self.resumed_at) or self.health not in NO_PROBLEM

    @property
    def why_odd(self) -> str:
        """'NAME: resumed at step 170, losing updates'."""
        said = [f"resumed at step {step:,}" for step in self.resumed_at[-1:]]
        said += [self.health] if self.health not in NO_PROBLEM else []
        return f"{self.name}: {', '.join(said)}"


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """A strategy over its runs. `gap`: its loss minus the reference's; None of the reference itself.

    set_apart: those of the runs that do not count here, because something happened to them that did not happen to
    most.
    apart: how it differs from other rows of the strategy, "" if there are none. entries: as those of its runs.
    """

    strategy: str | None
    dtype: str | None
    runs: tuple[RunResult, ...]
    is_reference: bool
    loss: Estimate | None
    gap: Estimate | None
    bytes_per_parameter: Estimate | None
    tokens_per_second: Estimate | None
    set_apart: tuple[RunResult, ...] = ()
    apart: str = ""
    configuration: str = ""
    entries: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """'Collage plus · bfloat16', and how it differs from other rows of the strategy."""
        return " · ".join(filter(None, (strategy_title(self.strategy, self.dtype), self.apart)))

    @property
    def counted(self) -> tuple[RunResult, ...]:
        """The runs whose numbers count."""
        return tuple(run for run in self.runs if run not in self.set_apart)

    @property
    def health(self) -> str:
        """That of its runs: the first that speaks against one, else "unknown" if one is, else "healthy"."""
        against = [run.health for run in self.runs if run.health not in NO_PROBLEM]
        return against[0] if against else "unknown" if any(r.health == "unknown" for r in self.runs) else "healthy"

    def over_runs(self, metric: str) -> Estimate | None:
        """A metric's mean over those runs that have it."""
        return mean_over_seeds([run.numbers[metric] for run in self.counted if metric in run.numbers])


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
    common = _common_step(list(curves.values()), name)
    ends = {row.scalars[name].step for row in rows if name in row.scalars}
    several_projects = len({row.project for row in rows}) > 1
    results = []
    for row in rows:
        loss: float | None = None
        step: int | None = None
        if row.run_id in curves and common is not None:
            loss, step = _loss_at(curves[row.run_id], common, name)
        elif name == "validation_loss" and len(ends) == 1:
            loss, step = finite(row.scalars[name].value), row.scalars[name].step
        entries = {**({"project": row.project} if several_projects else {}), **row.config}
        results.append(_result(row, found.get(row.run_id), loss, step, entries, name))
    return results


def _result(
    row: wire.RunRow,
    run: wire.ComparedRun | None,
    loss: float | None,
    step: int | None,
    entries: Mapping[str, Any],
    loss_name: str,
) -> RunResult:
    logged = {name: entry.value for name, entry in row.scalars.items()}
    # The rate of tokens over time, for a run that logs no throughput.
    counted = run.mean_scalars.get("tokens_per_second") if run else None
    strategy = row.shown_strategy
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
        short=overview.short if overview else "not evaluated yet",
        loss=loss,
        loss_step=None if loss is None else step,
        loss_name=loss_name,
        # The catalogue counts bytes of 16-bit weights.
        bytes_per_parameter=size if size is not None or wide or known is None else known.bytes_per_parameter,
        tokens_per_second=finite(logged.get("tokens_per_second", counted)),
        numbers={key: value for key, value in numbers.items() if value is not None},
        advice=overview.advised if overview else "",
        trained=row.trained,
        configuration=row.configuration or row.project,
        is_treated=row.is_treated,
        entries=entries,
        resumed_at=row.resumed_at,
        over=_over(overview),
    )


def _over(overview: wire.Overview | None) -> tuple[int, int] | None:
    if overview is None or overview.first_step is None or overview.last_step is None:
        return None
    return overview.first_step, overview.last_step


def results_by_strategy(runs: Sequence[RunResult]) -> list[StrategyResult]:
    """The runs by strategy, dtype and configuration, cheapest in bytes first, each against its reference.

    The reference is plain storage in fp32 or wider, else fp32 master weights, among runs that differ only in the
    entries that name the strategy; with neither there is no gap.
    """
    by_kind: dict[_Kind, dict[str, list[RunResult]]] = {}
    for run in runs:
        by_kind.setdefault((run.strategy, run.dtype), {}).setdefault(run.configuration, []).append(run)
    entries = _entries_of(runs)
    reference_kind = _reference(list(by_kind))
    references = by_kind[reference_kind] if reference_kind else {}
    results = []
    for kind, by_configuration in by_kind.items():
        is_reference = kind == reference_kind
        apart = _told_apart({own: entries[own] for own in by_configuration})
        for own, seeds in by_configuration.items():
            reference = next((other for other in references if _agree(entries[own], entries[other])), None)
            theirs = () if reference is None or is_reference else _counted(references[reference])
            results.append(_strategy_result(kind, seeds, theirs, is_reference, apart[own], entries[own]))
    return sorted(results, key=_cost)


def differences(results: Sequence[StrategyResult]) -> dict[str, list[Any]]:
    """Entries in which these rows differ, with their values: {"lr": [0.001, 0.01]}; names of strategies left out.

    An entry that a configuration does not state does not count as a difference.
    """
    stated: dict[str, list[Any]] = {}
    for result in results:
        for name, value in result.entries.items():
            known = stated.setdefault(name, [])
            if not _names_strategy(name) and not any(_same(name, value, other) for other in known):
                known.append(value)
    return {name: values for name, values in stated.items() if len(values) > 1}


_Kind = tuple[str | None, str | None]


def _strategy_result(
    kind: _Kind,
    runs: Sequence[RunResult],
    reference: Sequence[RunResult],
    is_reference: bool,
    apart: str,
    entries: Mapping[str, Any],
) -> StrategyResult:
    counted = _counted(runs)

    def mean(name: str) -> Estimate | None:
        return mean_over_seeds([value for run in counted if (value := getattr(run, name)) is not None])

    return StrategyResult(
        strategy=kind[0],
        dtype=kind[1],
        runs=tuple(runs),
        is_reference=is_reference,
        loss=mean("loss"),
        gap=difference(_seed_values(counted), _seed_values(reference)),
        bytes_per_parameter=mean("bytes_per_parameter"),
        tokens_per_second=mean("tokens_per_second"),
        set_apart=tuple(run for run in runs if run not in counted),
        apart=apart,
        configuration=runs[0].configuration,
        entries=entries,
    )


def _counted(runs: Sequence[RunResult]) -> list[RunResult]:
    """The runs whose numbers count: resumed or unhealthy runs do not, unless most runs are like that."""
    even = [run for run in runs if not run.is_odd]
    return even if 2 * len(even) >= len(runs) else list(runs)


def _entries_of(runs: Sequence[RunResult]) -> dict[str, Mapping[str, Any]]:
    """The entries of each configuration, from a run that has it by itself rather than by a person's choice."""
    found: dict[str, Mapping[str, Any]] = {}
    for run in sorted(runs, key=lambda run: run.is_treated):
        found.setdefault(run.configuration, run.entries)
    return found


def _told_apart(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The difference of each configuration from the others, as "lr 0.001"; "" if there is only one."""
    if len(rows) < 2:
        return dict.fromkeys(rows, "")
    names = dict.fromkeys(name for entries in rows.values() for name in entries)
    telling = [name for name in names if len({repr(entries.get(name)) for entries in rows.values()}) > 1]
    shown, more = telling[:_SHOWN], len(telling) - _SHOWN
    said = {}
    for place, (own, entries) in enumerate(rows.items(), 1):
        words = [f"{name} {entries.get(name, 'not stated')}" for name in shown]
        words += [f"{more} more"] if more > 0 else []
        if not any(name in entries for name in shown):
            words = ["not stated" if shown else f"configuration {place}"]
        said[own] = ", ".join(words)
    return said


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations agree in every entry that both state, except those that name the strategy."""
    shared = [name for name in one if name in other and not _names_strategy(name)]
    return all(_same(name, one[name], other[name]) for name in shared)


def _same(name: str, one: Any, other: Any) -> bool:
    if "optim" in name.rpartition(".")[2].lower():
        one, other = (_CLASS.sub("", str(value)).lower() for value in (one, other))
    return bool(one == other)


def _names_strategy(name: str) -> bool:
    return _OF_STRATEGY.fullmatch(name.rpartition(".")[2]) is not None


def _reference(kinds: Sequence[_Kind]) -> _Kind | None:
    wide = [kind for kind in kinds if kind[1] in _WIDE and kind[0] in _NO_STRATEGY]
    return next(iter([*wide, *(kind for kind in kinds if kind[0] == "master-weights")]), None)


def _cost(result: StrategyResult) -> tuple[float, bool, float]:
    """The order of costs: fewest bytes first, the reference last among equals, then by loss."""
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


def _common_step(curves: Sequence[wire.Series], name: str) -> int | None:
    """The last step that all of them have reached; of validation losses, which are logged now and then, the last at
    which all of them were, if there is one: a loss of some steps before is a higher one."""
    if name == "validation_loss" and curves:
        alike = set.intersection(*(set(curve.steps) for curve in curves))
        if alike:
            return max(alike)
    return min((curve.steps[-1] for curve in curves), default=None)


def _loss_at(curve: wire.Series, step: int, name: str) -> tuple[float | None, int | None]:
    """A validation loss as it was last logged up to `step`, and where; a training loss as its mean over the last
    steps."""
    first = 0.0 if name == "validation_loss" else step * (1 - _LAST_SHARE)
    found = [(value, at) for at, value in zip(curve.steps, curve.values, strict=True) if first <= at <= step]
    if name == "validation_loss":
        return (finite(found[-1][0]), found[-1][1]) if found else (None, None)
    known = [number for value, _ in found if (number := finite(value)) is not None]
    return (math.fsum(known) / len(known) if known and len(known) == len(found) else None), step
