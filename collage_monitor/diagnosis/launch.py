"""Sentences about what a launch begins without, or with what does not fit, as found around its first step.

Each function makes the `ResumeLoss` of one fault: the agent knows the facts, here they become words. `residuals.py`
judges faults, `doubts.py` what may be meant. Sentences are free (`tests/agent/watching/test_resume_check.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from collage_monitor.diagnosis.words import Health, percent
from collage_monitor.wire import LossKind, ResumeLoss

__all__ = [
    "averages_empty",
    "begins_beside_others",
    "count_begins_again",
    "counter_is_narrow",
    "counter_stands",
    "counts_again",
    "empty_step_counted",
    "health_of",
    "layers_empty",
    "masters_are_others",
    "masters_made_anew",
    "nothing_beside_weights",
    "short_of",
    "states_forgotten",
    "states_missing",
    "weights_are_narrow",
    "weights_rounded",
]

_KINDS: Final[dict[LossKind, str]] = {
    "masters": "master weights",
    "residuals": "residuals",
    "averages": "averages",
    "count": "the step count",
    "counter": "the step count",
}


def health_of(loss: ResumeLoss) -> Health:
    """The word for a run with this fault."""
    return "residuals are off" if loss.kind in ("masters", "residuals") else "steps are off"


def short_of(loss: ResumeLoss) -> str:
    """The fault in a few words, for a headline; agents before them sent none."""
    return loss.short or f"a resume lost {_KINDS[loss.kind]}"


def nothing_beside_weights(kind: LossKind, names: Collection[str], taken: int | None, step: int) -> ResumeLoss:
    """Every master weight equals its weight, or every residual is 0, after `taken` steps."""
    what = "every master weight equalled its 16-bit weight" if kind == "masters" else "every residual was 0"
    steps = "" if taken is None else f", {taken:,} steps into the training"
    text = f"{what} ({_and(names)}) before the first step of this launch{steps}: what they held is gone"
    return ResumeLoss(kind=kind, text=text, step=step)


def masters_made_anew(names: Collection[str], step: int) -> ResumeLoss:
    """What an optimizer lacked beside 16-bit weights was made in the step."""
    text = (
        f"what stands beside the 16-bit weights ({_and(names)}) was made anew in the first step of this launch, "
        "beside averages of earlier steps: what it had held is gone"
    )
    return ResumeLoss(kind="masters", text=text, step=step)


def masters_are_others(layers: Collection[str], moved: float, step: int) -> ResumeLoss:
    """The step wrote master weights of other weights over those that were there; moved: ‖change‖ / ‖weights‖."""
    text = (
        f"the master weights of {_some(layers)} were not those of the weights, and the first step wrote them over "
        f"the weights, which moved by {moved:.3g} of their norm: load weights before the optimizer is built"
    )
    short = f"old master weights replaced the weights of {_some(layers)}"
    return ResumeLoss(kind="masters", text=text, short=short, step=step, lasting=True)


def averages_empty(names: Collection[str], taken: int | None, step: int) -> ResumeLoss:
    """Averages are 0 in every layer, though steps are counted."""
    text = (
        f"{_and(names)} {'was' if len(names) == 1 else 'were'} 0 everywhere before the first step of this launch, "
        f"though {taken or 0:,} steps are counted"
    )
    return ResumeLoss(kind="averages", text=text, step=step)


def layers_empty(average: str, beside: str, layers: Collection[str], step: int) -> ResumeLoss:
    """An average is 0 in some layers, in which another one holds something."""
    text = (
        f"{average} of {_some(layers)} was 0 before the first step of this launch, though {beside} was not: it did "
        "not come through the resume, and the first steps there have another size"
    )
    return ResumeLoss(kind="averages", text=text, short=f"a resume lost {average} of {_some(layers)}", step=step)


def count_begins_again(names: Collection[str], step: int) -> ResumeLoss:
    """Steps are counted from 0 beside averages of earlier steps."""
    text = (
        f"steps are counted from 0 again, though {_and(names)} came along: bias is corrected for as if it had not"
    )
    return ResumeLoss(kind="count", text=text, step=step)


def counter_stands(taken: int, step: int) -> ResumeLoss:
    """The step was not counted."""
    text = f"the step counter stands at {taken:,} before a step and after it"
    return ResumeLoss(kind="counter", text=text, short="the step counter stands still", step=step, lasting=True)


def counter_is_narrow(dtype: str, most: int, value: float, step: int) -> ResumeLoss:
    """The counter's dtype does not hold every count."""
    text = f"the step counter is kept in {dtype}, which counts to {most:,} and no further: it stood at {value:,.0f}"
    short = f"the step counter ends at {most:,}"
    return ResumeLoss(kind="counter", text=text, short=short, step=step, lasting=True)


def states_forgotten(lost: int, states: int, layers: Collection[str], saved: int, step: int) -> ResumeLoss:
    """States that were saved beside these weights are missing, and the step makes them."""
    what = (
        f"the optimizer's {states:,} states" if lost == states else f"{lost:,} of the optimizer's {states:,} states"
    )
    where = "" if lost == states else f", of {_some(layers)},"
    text = f"{what}{where} did not come through, though the weights are those saved at step {saved:,}: "
    text += "load the optimizer's state_dict() beside the model's"
    short = "forgot the optimizer's states" if lost == states else f"lost states of {_some(layers)}"
    return ResumeLoss(kind="averages", text=text, short=f"the resume {short}", step=step)


def begins_beside_others(layers: Collection[str], taken: int, step: int) -> ResumeLoss:
    """A doubt: layers take their first step where others have taken `taken`."""
    text = (
        f"{_some(layers)} took a first step beside layers that had taken {taken:,}: new or set free here, "
        "or states that did not come through"
    )
    return ResumeLoss(kind="averages", text=text, short=f"{_some(layers)} began anew", step=step)


def weights_are_narrow(dtype: str, taken: int | None, step: int) -> ResumeLoss:
    """A doubt: wide weights that steps have moved are 16-bit numbers, beside averages that are none."""
    steps = "" if taken is None else f" after {taken:,} steps"
    text = (
        f"every weight began this launch as a {dtype} number{steps}, beside averages that are none: if it was "
        "wider before, what it held beyond that is gone; save weights in the dtype that they are trained in"
    )
    return ResumeLoss(kind="masters", text=text, short="weights may have been rounded", step=step)


def empty_step_counted() -> str:
    """A note: the count stands at 1, and every average was 0."""
    return (
        "a step that moved nothing was counted before this one, as get_optimizer_state_dict() takes where there "
        "are no states: bias is corrected for as after it, and the first steps have another size"
    )


def states_missing(first_step: int, names: Collection[str], step: int) -> ResumeLoss:
    """The training says that it goes on, and the optimizer begins without states."""
    text = (
        f"first_step={first_step} says that {first_step - 1:,} steps were taken, and the optimizer begins without "
        f"its states ({_and(names)}): load its state_dict(), or pass first_step=1 if it is meant to begin anew"
    )
    return ResumeLoss(kind="averages", text=text, short="the optimizer's states were not loaded", step=step)


def counts_again(layers: Collection[str], saved: float, now: float, step: int) -> ResumeLoss:
    """Steps are counted from fewer than were saved."""
    text = (
        f"the step count of {_some(layers)} is {now:,.0f}, and {saved:,.0f} was saved: bias is corrected for as if "
        "fewer steps had been taken"
    )
    return ResumeLoss(kind="count", text=text, step=step)


def weights_rounded(layers: Collection[str], weights: int, dtype: str, gone: float | None, step: int) -> ResumeLoss:
    """Weights in float32 were rounded between the save and this launch; gone: of what the launch before moved."""
    lost = (
        "they were rounded on the way" if gone is None else f"{percent(gone)} of what the last launch moved is gone"
    )
    text = (
        f"{len(layers):,} of {weights:,} weights begin as {dtype} numbers, which those saved at step {step - 1:,} "
    )
    text += f"were not: {lost}"
    short = "the resume rounded the weights" + ("" if gone is None else f": {lost}")
    return ResumeLoss(kind="masters", text=text, short=short, step=step)


def _and(names: Collection[str]) -> str:
    return " and ".join(names)


def _some(layers: Collection[str]) -> str:
    """'a', 'a and b', 'a and 7 other layers'."""
    first, *others = layers
    if len(others) < 2:
        return _and(layers)
    return f"{first} and {len(others)} other layers"
