"""How runs are told apart on a page: a label unique among those shown, a colour by strategy, a dash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from collage_dashboard.descriptions import short_name
from collage_dashboard.figures.style import DASHES, strategy_colour
from collage_monitor.strategies import STRATEGIES, strategy_title

__all__ = [
    "LineStyle",
    "NamedRun",
    "is_stochastic",
    "strategy_title",
    "styles_of",
    "told_apart",
]


class NamedRun(Protocol):
    """Anything with the four fields that name a run (`wire.ComparedRun` has them)."""

    @property
    def run_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def strategy(self) -> str | None: ...
    @property
    def dtype(self) -> str | None: ...


@dataclass(frozen=True)
class LineStyle:
    """A run or a strategy on a page: the same label and line in every chart, card and table."""

    label: str
    colour: str
    dash: str


def styles_of(runs: Sequence[NamedRun]) -> list[LineStyle]:
    """A style for each run, in the order given.

    The label is the run's name, cut in its middle beyond 48 characters; where two runs share it, strategy and
    dtype are added, then the end of the id.
    Runs of one strategy and dtype share a colour and differ in their dash.
    """
    labels = [short_name(run.name) for run in runs]
    for extend in (_with_strategy, _with_id):
        seen = Counter(labels)
        labels = [extend(label, run) if seen[label] > 1 else label for label, run in zip(labels, runs, strict=True)]
    return told_apart([(label, run.strategy, run.dtype) for label, run in zip(labels, runs, strict=True)])


def told_apart(lines: Iterable[tuple[str, str | None, str | None]]) -> list[LineStyle]:
    """A style for each (label, strategy, dtype): lines of one colour differ in their dash."""
    used: Counter[str] = Counter()
    styles = []
    for label, strategy, dtype in lines:
        colour = strategy_colour(strategy, dtype)
        styles.append(LineStyle(label, colour, DASHES[used[colour] % len(DASHES)]))
        used[colour] += 1
    return styles


def is_stochastic(name: str | None) -> bool:
    """Whether the strategy's updates arrive only on average, so that one step's lost share misjudges it; not where
    fp32 weights are kept, of which rounding at random loses next to nothing."""
    entry = STRATEGIES.get(name or "unknown")
    return entry is not None and entry.stochastic and entry.weights != "fp32"


def _with_strategy(label: str, run: NamedRun) -> str:
    return f"{label} · {strategy_title(run.strategy, run.dtype)}"


def _with_id(label: str, run: NamedRun) -> str:
    return f"{label} · {run.run_id[-6:]}"
