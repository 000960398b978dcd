"""What may be said of a run in words, the same in terminal, notebook and dashboard.

`edq_ratio` alone never makes a run healthy: an error that already sits in the optimizer's state is invisible to it.
A good word needs a second witness, the states' decrements or the oracle; one witness that contradicts is enough for
a bad one; the rest is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from collage_monitor.metrics import split_key
from collage_monitor.wire import Number

__all__ = [
    "EDQ_TOLERANCE",
    "Health",
    "Judgement",
    "LIMITS",
    "ORACLE_TOLERANCE",
    "STATE_TOLERANCE",
    "judge",
    "longest_window",
    "state_decrements",
]

Health = Literal["healthy", "losing updates", "states are stuck", "steps are off", "unknown"]
EDQ_TOLERANCE: Final = 0.05
STATE_TOLERANCE: Final = 0.1
ORACLE_TOLERANCE: Final = 0.05
LIMITS: Final = (
    "What is lost before the optimizer (gradients accumulated or reduced in low precision) is invisible here. "
    "float64 parameters cannot be measured. Sampling can miss a rare row of a large embedding."
)
"""Stated wherever the numbers are shown."""


@dataclass(frozen=True)
class Judgement:
    """A run's health in one word, and the sentence that gives the reasons."""

    health: Health
    text: str


def judge(metrics: Mapping[str, Number | None]) -> Judgement:
    """The judgement of the whole model's metrics, merged over its measured steps or of a single one.

    Healthy: `edq_ratio` within EDQ_TOLERANCE of 1, and so, within theirs, every defined `state_decrement_ratio` and
    `edq_oracle_ratio`, of which there must be one. "losing updates" comes before "states are stuck" before
    "steps are off" (an overshoot, a state that decays too fast, an oracle that disagrees). Where windows were
    measured, the longest one's `edq_window_ratio` stands in for `edq_ratio`: errors that even out over many steps
    have done so, and the others are left.
    """
    edq, oracle = _finite(metrics.get("edq_ratio")), _finite(metrics.get("edq_oracle_ratio"))
    window = longest_window(metrics, "edq_window_ratio")
    over = ""
    if window is not None:
        over, edq = f" over {window[0]} steps", window[1]
    states = state_decrements(metrics)
    complaints = _complaints(edq, states, oracle, over)
    if complaints:
        gravest = min((health for health, _ in complaints), key=_GRAVITY.index)
        text = "; ".join(sentence for _, sentence in complaints)
        return Judgement(gravest, f"{text[0].upper()}{text[1:]}.")
    if edq is None:
        return Judgement("unknown", "No intended update was measured yet.")
    named = " and ".join(states)
    witnesses = [f"{named} {'decays as it' if len(states) == 1 else 'decay as they'} should"] if states else []
    witnesses += ["the oracle agrees"] if oracle is not None else []
    if not witnesses:
        text = f"EDQ{over} reads {edq:.3f}, but no state decrement and no oracle confirms it: not known."
        return Judgement("unknown", text)
    return Judgement("healthy", f"Updates arrive (EDQ{over} {edq:.3f}), and {' and '.join(witnesses)}.")


def longest_window(metrics: Mapping[str, Number | None], name: str) -> tuple[int, float] | None:
    """(steps, value) of the longest window in which the metric `name` is defined; None: nowhere."""
    found = []
    for key, value in metrics.items():
        own, label = split_key(key)
        number = _finite(value)
        if own == name and label and label.isdigit() and number is not None:
            found.append((int(label), number))
    return max(found, default=None)


def state_decrements(metrics: Mapping[str, Number | None]) -> dict[str, float]:
    """The defined state decrements by the name of their state."""
    found = {}
    for key, value in metrics.items():
        name, label = split_key(key)
        number = _finite(value)
        if name == "state_decrement_ratio" and label and number is not None:
            found[label] = number
    return found


_GRAVITY: Final[tuple[Health, ...]] = ("losing updates", "states are stuck", "steps are off")


def _complaints(
    edq: float | None, states: Mapping[str, float], oracle: float | None, over: str
) -> list[tuple[Health, str]]:
    complaints: list[tuple[Health, str]] = []
    if edq is not None and edq < 1 - EDQ_TOLERANCE:
        complaints.append(("losing updates", f"EDQ{over} is {edq:.3f}: updates are lost"))
    elif edq is not None and edq > 1 + EDQ_TOLERANCE:
        complaints.append(("steps are off", f"EDQ{over} is {edq:.3f}: updates overshoot"))
    for name, value in states.items():
        if value < 1 - STATE_TOLERANCE:
            complaints.append(("states are stuck", f"the state {name} does not decay"))
        elif value > 1 + STATE_TOLERANCE:
            complaints.append(("steps are off", f"the state {name} decays too fast"))
    if oracle is not None and abs(1 - oracle) > ORACLE_TOLERANCE:
        complaints.append(("steps are off", f"the oracle disagrees ({oracle:.3f})"))
    return complaints


def _finite(value: Number | None) -> float | None:
    number = float("nan") if value is None else float(value)
    return number if abs(number) < float("inf") else None
