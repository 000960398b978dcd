"""Storage strategies: how an optimizer keeps weights and states between steps, under their usual names.

The code of a strategy has the same name in the optimizers (entry-point group `collage_agent.strategies`).

Names are fixed: reports, checkpoints, filters and pages use them. Each strategy of `collage_optim/strategies.py`
needs an entry here (`tests/audit/test_findings.py`); an entry alone is only recognised. An entry needs a colour
(`tests/dashboard/test_run_styles.py`) and a row in `docs/metrics.md` (`tests/docs/test_metrics.py`). The
order of `_recommended` was measured; `tests/optim/test_accumulation.py` holds it.
`advice.py` calls `recommend` and `more_exact`; the optimizers, installed without it, advise the same
(`tests/optim/test_range_guards.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final, Literal

from collage_monitor.definitions import Strategy
from collage_monitor.errors import CatalogueError
from collage_monitor.extensions import extensions

__all__ = ["STRATEGIES", "catalogue_of", "more_exact", "recommend", "strategy", "strategy_title"]


_STRATEGIES = (
    Strategy("plain", "Plain", "weights and states, rounded to nearest", 8, moment_bytes=(2, 2)),
    Strategy(
        "stochastic",
        "Stochastic rounding",
        "weights and states, rounded stochastically",
        8,
        True,
        moment_bytes=(2, 2),
    ),
    Strategy(
        "kahan", "Kahan", "weights with a running compensation, states", 10, moment_bytes=(2, 2), weights="pair"
    ),
    Strategy("light", "Collage light", "weights as (θ, δθ), states", 10, moment_bytes=(2, 2), weights="pair"),
    Strategy(
        "light-stochastic",
        "Collage light, stochastic",
        "as light; δθ and v rounded stochastically",
        10,
        True,
        moment_bytes=(2, 2),
        weights="pair",
    ),
    Strategy(
        "plus",
        "Collage plus",
        "weights as (θ, δθ), second moment as (v, δv), β₂ as (β₂, δβ₂)",
        12,
        moment_bytes=(2, 4),
        weights="pair",
    ),
    Strategy("full", "Collage full", "weights and both moments as pairs", 14, moment_bytes=(4, 4), weights="pair"),
    Strategy("fp32-states", "fp32 states", "weights, both moments in fp32", 12, moment_bytes=(4, 4)),
    Strategy(
        "split-master",
        "Split fp32 master",
        "fp32 weights as bfloat16 and 16 bits below; both moments in 24 bits; all rounded stochastically",
        12,
        True,
        moment_bytes=(3, 3),
        weights="fp32",
    ),
    Strategy(
        "split-master-16bit",
        "Split master, 16-bit states",
        "fp32 weights as bfloat16 and 16 bits below; m and √v in 16 bits; all rounded stochastically",
        10,
        True,
        moment_bytes=(2, 2),
        weights="fp32",
    ),
    Strategy(
        "split-master-8bit",
        "Split master, 8-bit states",
        "fp32 weights as bfloat16 and 16 bits below; m and √v in 8-bit blocks of 128; coupled rounding",
        8,
        True,
        moment_bytes=(1, 1),
        weights="fp32",
    ),
    Strategy(
        "split-24bit-8bit",
        "24-bit weights, 8-bit states",
        "weights as bfloat16 and 8 bits below; m and √v in 8-bit blocks of 128; coupled rounding",
        7,
        True,
        moment_bytes=(1, 1),
    ),
    Strategy(
        "coupled-9",
        "Coupled, 9 bytes",
        "fp32 weights as bfloat16 and 16 bits below; m in 8-bit and √v in 16-bit blocks of 128; coupled rounding",
        9,
        True,
        moment_bytes=(1, 2),
        weights="fp32",
    ),
    Strategy(
        "coupled-8",
        "Coupled, 8 bytes",
        "weights as bfloat16 and 8 bits below; m in 8-bit and √v in 16-bit blocks of 128; coupled rounding",
        8,
        True,
        moment_bytes=(1, 2),
    ),
    Strategy(
        "coupled-7",
        "Coupled, 7 bytes",
        "weights as bfloat16 and 8 bits below; m in 6-bit and √v in 10-bit blocks of 128; coupled rounding",
        7,
        True,
        moment_bytes=(0, 2),
    ),
    Strategy(
        "integer-remainder",
        "Integer remainder",
        "weights with the bits below as integers, rounded to nearest or truncated: other libraries' optimizers",
        None,
        weights="fp32",
    ),
    Strategy(
        "master-weights",
        "fp32 master weights",
        "weights with an fp32 copy, both moments in fp32",
        16,
        moment_bytes=(4, 4),
        weights="fp32",
    ),
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


_FAST: Final = 0.98


def recommend(
    bytes_per_parameter: float = inf,
    betas: Sequence[float] = (),
    *,
    first_moments: int = 1,
    second_moments: int = 1,
    sharded: bool = False,
) -> Strategy | None:
    """The strategy to train bfloat16 weights with in so many bytes a parameter, states and gradient included.

    The most exact of those that need no more under a rule of so many moments (AdamW's are one and one), by the
    largest error of the displacement after 10,000 steps on the courses of `benchmarks.accumulation`; None where
    nothing here fits. betas: the decays of first and second moment, of which the last decides: up to 0.98, or above
    it, as where they are not known. sharded: weights are distributed tensors, whose blocks cannot be cut. The
    scales of blocks, 1/32 of a byte a moment, are not counted.
    """
    for name in _recommended(betas, second_moments):
        entry = STRATEGIES[name]
        size, in_blocks = entry.bytes_of(first_moments, second_moments), min(entry.moment_bytes or (2,)) < 2
        if size is not None and size <= bytes_per_parameter and not (sharded and in_blocks):
            return entry
    return None


def _recommended(betas: Sequence[float], second_moments: int) -> tuple[str, ...]:
    """The most exact first: docs/numerics.md has the figures.

    A second moment that moves slowly walks at random in 8 bits; bits of its own are worth more there than the
    weight's. Without second moments those that differ in them alone are one.
    """
    if not second_moments:
        return "split-master", "split-master-16bit", "split-master-8bit", "split-24bit-8bit"
    slow = not betas or betas[-1] > _FAST
    in_eight, in_seven = ("coupled-8", "coupled-7") if slow else ("split-master-8bit", "split-24bit-8bit")
    return "split-master", "coupled-9", "split-master-16bit", in_eight, in_seven


def more_exact(
    present: str | None,
    lacking: Literal["weights", "states"],
    *,
    betas: Sequence[float] = (),
    float16: bool = False,
    first_moments: int = 1,
    second_moments: int = 1,
    sharded: bool = False,
) -> tuple[Strategy, ...]:
    """Strategies that keep more of the lacking parts than `present` does, and no less of the rest.

    The most exact strategy, and the most exact that needs no more bytes than the present one under a rule of so
    many moments and these decays (`recommend`). float16: for float16 weights, which are not the leading bits of
    fp32, only fp32 weights keep more.
    """
    known = STRATEGIES.get(present or "unknown")
    whole = known is not None and known.weights == "fp32"
    if present == "split-master" or (lacking == "weights" and whole):
        return ()
    if float16:
        return () if present == "master-weights" else (STRATEGIES["master-weights"],)
    held = None if known is None else known.bytes_of(first_moments, second_moments)
    in_no_more = recommend(
        held or 0, betas, first_moments=first_moments, second_moments=second_moments, sharded=sharded
    )
    if present == "fp32-states" or (present == "master-weights" and lacking == "states"):
        in_no_more = None
    found = dict.fromkeys((recommend(), in_no_more))
    return tuple(entry for entry in found if entry is not None and entry is not known)


def strategy(name: str) -> Strategy:
    """The catalogue entry called `name`, for scripts and tests.

    Raises:
        CatalogueError: no such strategy.
    """
    try:
        return STRATEGIES[name]
    except KeyError:
        raise CatalogueError(f"no strategy is called {name!r}; choose one of {', '.join(STRATEGIES)}") from None


def strategy_title(name: str | None, dtype: str | None = None) -> str:
    """'Collage plus · bfloat16'; a name in no catalogue is returned as it is."""
    entry = STRATEGIES.get(name or "unknown")
    title = entry.title if entry else str(name)
    return f"{title} · {dtype}" if dtype and dtype != "unknown" else title
