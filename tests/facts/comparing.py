"""Strategies of a comparison, from what was sent of their runs: costs, losses at one step, gaps with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collage_monitor.strategies import strategy_title
from tests.facts.raw import RawRun
from tests.reference.seeds import mean


@dataclass
class StrategyGroup:
    """Runs of one strategy and dtype; `others` are all of the comparison."""

    title: str
    short: str
    runs: list[RawRun]
    everything: list[RawRun]
    sick: set[str]

    @property
    def counted(self) -> list[RawRun]:
        """Those that nothing befell, unless it befell most."""
        even = [run for run in self.runs if run.created.name not in self.sick and len(run.begins) == 1]
        return even if 2 * len(even) >= len(self.runs) else self.runs

    @property
    def is_healthy(self) -> bool:
        return not any(run.created.name in self.sick for run in self.runs)

    def mean_of(self, name: str) -> float:
        """A scalar's newest value, over the counted runs."""
        found = [run.newest(name)[1] for run in self.counted]
        return sum(found) / len(found)

    @property
    def loss_step(self) -> int:
        """The newest step at which all runs of the comparison logged their validation loss."""
        return max(set.intersection(*(set(run.scalars["validation_loss"]) for run in self.everything)))

    def losses(self) -> dict[int, float]:
        """The validation loss of each seed at that step."""
        return {run.created.seed or 0: run.scalars["validation_loss"][self.loss_step] for run in self.counted}

    def loss_of(self) -> float:
        """Their mean."""
        found = [run.scalars["validation_loss"][self.loss_step] for run in self.counted]
        return sum(found) / len(found)

    def gap(self, reference: StrategyGroup) -> tuple[float, float | None, int]:
        """(mean difference of losses, half of its 95 % interval, pairs), paired by seed."""
        seeds = [run.created.seed for run in self.counted]
        theirs = [run.created.seed for run in reference.counted]
        if len(set(seeds)) < len(seeds) or len(set(theirs)) < len(theirs):
            return self.loss_of() - reference.loss_of(), None, 1
        ours, others = self.losses(), reference.losses()
        pairs = [ours[seed] - others[seed] for seed in ours if seed in others]
        if len(pairs) < 2:
            return pairs[0], None, 1
        middle, half, _ = mean(pairs)
        return middle, half, len(pairs)


def strategies_of(runs: Sequence[RawRun], sick: set[str]) -> dict[str, StrategyGroup]:
    """By title and by short title."""
    kinds: dict[tuple[Any, str], list[RawRun]] = {}
    for run in runs:
        kinds.setdefault((run.watch.strategy or run.watch.observed_strategy, run.watch.dtype), []).append(run)
    several = [strategy for strategy, _ in kinds]
    found: dict[str, StrategyGroup] = {}
    for (strategy, dtype), own in kinds.items():
        title = strategy_title(strategy, dtype)
        short = title if several.count(strategy) > 1 else strategy_title(strategy)
        group = StrategyGroup(title, short, own, list(runs), sick)
        found |= {title: group, short: group}
    return found
