"""What may be said about a run in words, and what may not: `edq_ratio` alone never makes a run healthy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from collage_dashboard.descriptions import STATE
from collage_dashboard.formatting import finite, number
from collage_monitor.metrics import split_key
from collage_monitor.wire import Number

__all__ = ["LIMITS", "Verdict", "judge"]

EDQ_TOLERANCE: Final = 0.05
STATE_TOLERANCE: Final = 0.1
ORACLE_TOLERANCE: Final = 0.05
LIMITS: Final = (
    "What is lost before the optimizer (gradients accumulated or reduced in low precision) is invisible here. "
    "float64 parameters cannot be measured. Sampling can miss a rare row of a large embedding."
)


@dataclass(frozen=True)
class Verdict:
    """One sentence about a run. `level`: "agrees" (EDQ and a second witness), "disagrees", or "unknown"."""

    level: Literal["agrees", "disagrees", "unknown"]
    text: str


def judge(metrics: Mapping[str, Number | None]) -> Verdict:
    """The verdict on a run's metrics (merged over its measured steps, or of its newest one).

    A good word needs `edq_ratio` near 1 and a second witness near 1: every `state_decrement_ratio` that is
    defined, or the oracle where it ran. One witness that contradicts is enough for a bad one. The rest is unknown.
    """
    edq = finite(metrics.get("edq_ratio"))
    oracle = finite(metrics.get("edq_oracle_ratio"))
    states = _states(metrics)
    complaints = _complaints(edq, states, oracle)
    if complaints:
        return Verdict("disagrees", f"{'; '.join(complaints)}.")
    if edq is None:
        return Verdict("unknown", "No intended update was measured yet.")
    named = " and ".join(states)
    witnesses = [f"{named} {'decays as it' if len(states) == 1 else 'decay as they'} should"] if states else []
    witnesses += ["the oracle agrees"] if oracle is not None else []
    if not witnesses:
        return Verdict(
            "unknown",
            f"EDQ reads {number(edq)}, but no state decrement and no oracle confirms it: not known.",
        )
    return Verdict("agrees", f"Updates arrive (EDQ {number(edq)}), and {' and '.join(witnesses)}.")


def _states(metrics: Mapping[str, Number | None]) -> dict[str, float]:
    found = {}
    for key, value in metrics.items():
        name, label = split_key(key)
        plain = finite(value)
        if name == STATE and label and plain is not None:
            found[label] = plain
    return found


def _complaints(edq: float | None, states: Mapping[str, float], oracle: float | None) -> list[str]:
    complaints = []
    if edq is not None and abs(1 - edq) > EDQ_TOLERANCE:
        complaints.append(f"EDQ is {number(edq)}: {'updates are lost' if edq < 1 else 'updates overshoot'}")
    for name, value in states.items():
        if abs(1 - value) > STATE_TOLERANCE:
            complaints.append(f"the state {name} {'does not decay' if value < 1 else 'decays too fast'}")
    if oracle is not None and abs(1 - oracle) > ORACLE_TOLERANCE:
        complaints.append(f"the oracle disagrees ({number(oracle)})")
    return [complaints[0][0].upper() + complaints[0][1:], *complaints[1:]] if complaints else []
