"""Storage strategies: how an optimizer keeps weights and states between steps, under their usual names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from collage_monitor.errors import CatalogueError

__all__ = ["STRATEGIES", "Strategy", "strategy"]


@dataclass(frozen=True)
class Strategy:
    """A way to keep weights and states.

    `bytes_per_parameter` counts weights, AdamW's states and the gradient, for 16-bit storage; None if it depends.
    `stochastic` means that updates arrive only on average, so the lost share of one step misjudges it.
    """

    name: str
    title: str
    keeps: str
    bytes_per_parameter: int | None
    stochastic: bool = False


_STRATEGIES = (
    Strategy("plain", "Plain", "weights and states, rounded to nearest", 8),
    Strategy("stochastic", "Stochastic rounding", "weights and states, rounded stochastically", 8, True),
    Strategy("kahan", "Kahan", "weights with a running compensation, states", 10),
    Strategy("light", "Collage light", "weights as (θ, δθ), states", 10),
    Strategy(
        "light-stochastic", "Collage light, stochastic", "as light; δθ and v rounded stochastically", 10, True
    ),
    Strategy("plus", "Collage plus", "weights as (θ, δθ), second moment as (v, δv), β₂ as (β₂, δβ₂)", 12),
    Strategy("full", "Collage full", "weights and both moments as pairs", 14),
    Strategy("fp32-states", "fp32 states", "weights, both moments in fp32", 12),
    Strategy("master-weights", "fp32 master weights", "weights with an fp32 copy, both moments in fp32", 16),
    Strategy("unknown", "Unknown", "not recognised", None),
)
STRATEGIES: Final = {entry.name: entry for entry in _STRATEGIES}


def strategy(name: str) -> Strategy:
    """The catalogue entry called `name`.

    Raises:
        CatalogueError: no such strategy.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise CatalogueError(f"no strategy is called {name!r}; choose one of {', '.join(STRATEGIES)}") from None
