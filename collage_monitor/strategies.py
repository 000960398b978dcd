"""Storage strategies: how an optimizer keeps weights and states between steps, under their usual names.

How weights are kept that way stands under the same name in the agent (`collage_agent.optim`, entry-point group
`collage_agent.strategies`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from collage_monitor.definitions import Strategy
from collage_monitor.errors import CatalogueError
from collage_monitor.extensions import extensions

__all__ = ["STRATEGIES", "advice", "catalogue_of", "recommend", "strategy", "strategy_title"]


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
    Strategy(
        "split-master",
        "Split fp32 master",
        "fp32 weights as bfloat16 and 16 bits below; both moments in 24 bits; all rounded stochastically",
        12,
        True,
    ),
    Strategy(
        "split-master-16bit",
        "Split master, 16-bit states",
        "fp32 weights as bfloat16 and 16 bits below; m and √v in 16 bits; all rounded stochastically",
        10,
        True,
    ),
    Strategy(
        "split-master-8bit",
        "Split master, 8-bit states",
        "fp32 weights as bfloat16 and 16 bits below; m and √v in 8-bit blocks of 128; all rounded stochastically",
        8,
        True,
    ),
    Strategy(
        "split-24bit-8bit",
        "24-bit weights, 8-bit states",
        "weights as bfloat16 and 8 bits below; m and √v in 8-bit blocks of 128; all rounded stochastically",
        7,
        True,
    ),
    Strategy(
        "integer-remainder",
        "Integer remainder",
        "weights with the bits below as integers, rounded to nearest or truncated: other libraries' optimizers",
        None,
    ),
    Strategy("master-weights", "fp32 master weights", "weights with an fp32 copy, both moments in fp32", 16),
    Strategy("unknown", "Unknown", "not recognised", None),
)


def catalogue_of(own: Sequence[Strategy], added: Mapping[str, Any]) -> dict[str, Strategy]:
    """Strategies by name, those that other packages add (entry-point group `collage_monitor.strategies`) last.

    Raises:
        CatalogueError: what was added is no `Strategy` of its entry's name, or the name is taken.
    """
    found = {entry.name: entry for entry in own}
    for name, entry in added.items():
        if not isinstance(entry, Strategy) or entry.name != name or name in found:
            raise CatalogueError(
                f"collage_monitor.strategies {name!r} must be a Strategy of that name, and not one of ours"
            )
        found[name] = entry
    return found


STRATEGIES: Final = catalogue_of(_STRATEGIES, extensions("collage_monitor.strategies"))


_RECOMMENDED: Final = ("split-master", "split-master-16bit", "split-master-8bit", "split-24bit-8bit")
"""One for each number of bytes, the most exact first: `python -m benchmarks.accumulation`, docs/numerics.md."""
_NOTHING_BETTER: Final = ("split-master", "integer-remainder", "master-weights")


def recommend(bytes_per_parameter: float = 12) -> Strategy | None:
    """The strategy to train bfloat16 weights with in so many bytes a parameter, states and gradient included.

    The most exact of those that need no more, by the largest error of the displacement after 10,000 steps on the
    courses of `benchmarks.accumulation`; None where nothing here fits. The scales of 8-bit blocks, a sixteenth of
    a byte a parameter, are not counted.
    """
    for name in _RECOMMENDED:
        entry = STRATEGIES[name]
        if entry.bytes_per_parameter is not None and entry.bytes_per_parameter <= bytes_per_parameter:
            return entry
    return None


def advice(present: str | None, dtypes: Collection[str] = ()) -> str | None:
    """What to try where weights are kept as `present` and lose updates; None where nothing here keeps more.

    dtypes: those of the weights, by name. Named are the most exact strategy, and the most exact that needs no more
    bytes than the present one. float16 is no leading part of fp32: only fp32 weights keep more beside it.
    """
    if present in _NOTHING_BETTER:
        return None
    if "float16" in dtypes:
        named = [STRATEGIES["master-weights"]]
    else:
        known = STRATEGIES.get(present or "unknown")
        held = None if known is None else known.bytes_per_parameter
        named = [found for found in (recommend(), recommend(held or 0)) if found is not None and found is not known]
    first, *others = dict.fromkeys(named)
    words = (
        f'collage_agent.optim.CollageAdamW(strategy="{first.name}") ({first.bytes_per_parameter} bytes a parameter)'
    )
    return "try " + " or ".join([words, *(f'"{other.name}" ({other.bytes_per_parameter})' for other in others)])


def strategy(name: str) -> Strategy:
    """The catalogue entry called `name`.

    Raises:
        CatalogueError: no such strategy.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise CatalogueError(f"no strategy is called {name!r}; choose one of {', '.join(STRATEGIES)}") from None


def strategy_title(name: str | None, dtype: str | None = None) -> str:
    """'Collage plus · bfloat16'; a name that no catalogue has stands for itself."""
    entry = STRATEGIES.get(name or "unknown")
    title = entry.title if entry else str(name)
    return f"{title} · {dtype}" if dtype and dtype != "unknown" else title
