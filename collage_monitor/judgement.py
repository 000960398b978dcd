"""What may be said of a run in words, the same in terminal, notebook and dashboard.

A good word needs evidence from every side: the updates arrive, no layer stands still, and a second witness (the
states' decrements or the oracle) agrees, because EDQ alone cannot see an error that already sits in the optimizer's
state. One number out of its bounds is enough for a bad word. Where the evidence does not reach, the word is
"unknown". The rules stand in `docs/metrics.md`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from collage_monitor.metrics import split_key
from collage_monitor.strategies import STRATEGIES
from collage_monitor.wire import Number, WatchInfo

__all__ = [
    "EDQ_TOLERANCE",
    "Evidence",
    "Finding",
    "Health",
    "Judgement",
    "LIMITS",
    "RECENT_SHARE",
    "RECENT_STEPS",
    "STATE_TOLERANCE",
    "Values",
    "finite",
    "judge",
    "longest_window",
    "percent",
    "recent_points",
    "state_decrements",
]

Health = Literal[
    "healthy",
    "not finite",
    "losing updates",
    "states are stuck",
    "decay is lost",
    "residuals are off",
    "steps are off",
    "unknown",
]
Values = Mapping[str, Number | None]

RECENT_STEPS: Final = 32
"""Measured steps that the recent past has at least."""
RECENT_SHARE: Final = 0.05
"""Share of the run's Σ u² that it has at least."""
EDQ_TOLERANCE: Final = 0.05
LOST_TOLERANCE: Final = 0.05
ERROR_TOLERANCE: Final = 0.05
LAYER_LOST: Final = 0.5
LAYER_TOLERANCE: Final = 1e-5
STATE_TOLERANCE: Final = 0.1
DECAY_TOLERANCE: Final = 0.5
ORACLE_TOLERANCE: Final = 0.05
FILL_TOLERANCE: Final = 2.0
DROPPED_TOLERANCE: Final = 0.5
MEASURED_TOLERANCE: Final = 0.1
COPY_TOLERANCE: Final = 0.5
LIMITS: Final = (
    "What is lost before the optimizer (gradients accumulated or reduced in low precision) is invisible here. "
    "float64 parameters cannot be measured. Sampling can miss a rare row of a large embedding."
)
"""Stated wherever the numbers are shown."""


@dataclass(frozen=True)
class Evidence:
    """What a judgement rests on: metrics of the recent past, merged, and what is known of the watch.

    model: the whole model's metrics by key; layers: those of each layer, empty where they were not looked at.
    first_step to last_step: the steps that they merge.
    """

    model: Values
    layers: Mapping[str, Values] = field(default_factory=dict)
    watch: WatchInfo | None = None
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True)
class Finding:
    """One number that speaks for or against a run: `key` in `layer` (None: the model) is `value`, beside the
    `threshold` that it is held against."""

    health: Health
    text: str
    key: str
    value: float | None
    threshold: float | None = None
    layer: str | None = None


@dataclass(frozen=True)
class Judgement:
    """A run's health, the sentence that gives the reasons, and the findings behind it, the deciding one first.

    measured: share of the elements of stepped layers whose intended update is known; None: nothing was measured.
    """

    health: Health
    text: str
    findings: tuple[Finding, ...] = ()
    measured: float | None = None
    first_step: int | None = None
    last_step: int | None = None

    @property
    def deciding(self) -> Finding | None:
        """The finding that decided; None where nothing was measured."""
        return self.findings[0] if self.findings else None


def judge(evidence: Evidence) -> Judgement:
    """The judgement of what was measured; the same evidence gives the same words everywhere.

    One finding against the run is enough for a bad word, the gravest first. Without one, a doubt makes it
    "unknown"; only a run with neither is "healthy". Weights kept in a way that is not understood make it "unknown",
    whatever the numbers.
    """
    case = _Case(evidence)
    unexplained = case.fingerprint.unexplained if case.fingerprint else None
    if unexplained:
        return case.judgement([Finding("unknown", unexplained, "unexplained", None)])
    against = sorted(_against(case), key=lambda finding: _GRAVITY.index(finding.health))
    if against:
        return case.judgement(against)
    if not case.active:
        return case.judgement([_nothing_intended(case)])
    doubts = list(_doubts(case))
    return case.judgement(doubts or list(_witnesses(case)))


_GRAVITY: Final[tuple[Health, ...]] = (
    "not finite",
    "losing updates",
    "states are stuck",
    "decay is lost",
    "residuals are off",
    "steps are off",
)
_NAMED_BY_GROUP: Final = re.compile(r"(optimizer\d+\.)?group\d+\.\d+")
"""Names of tensors that the model does not know."""


class _Case:
    """The evidence with what the rules ask of it more than once."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.model = evidence.model
        self.watch = evidence.watch
        self.fingerprint = evidence.watch.fingerprint if evidence.watch else None
        self.active = sum(self.number(name) or 0.0 for name in ("lost", "distorted", "faithful")) > 0
        self.active = self.active or self.number("edq_ratio") is not None
        names = {self.watch.strategy, self.watch.observed_strategy} if self.watch else set()
        seen = self.fingerprint.stochastic_rounding if self.fingerprint else None
        self.stochastic = bool(seen) or any(name in STRATEGIES and STRATEGIES[name].stochastic for name in names)
        self.rounding_known = self.watch is None or seen is not None or names != {None, "unknown"}
        self.keeps_more = bool(self.fingerprint and (self.fingerprint.master or self.fingerprint.residual))

    def number(self, key: str, layer: str | None = None) -> float | None:
        """The metric of the model or a layer; None where it is undefined."""
        return finite((self.model if layer is None else self.evidence.layers[layer]).get(key))

    @property
    def one_step(self) -> bool:
        """Whether the evidence is that of a single measured step."""
        return self.evidence.first_step is not None and self.evidence.first_step == self.evidence.last_step

    @property
    def measured(self) -> float | None:
        """Share of the elements of stepped layers whose u is known."""
        sizes = {name: self.number("elements", name) or 0.0 for name in self.evidence.layers}
        if not any(sizes.values()):
            return self.number("measured_ratio")
        known = (size for name, size in sizes.items() if self.number("measured_ratio", name) is not None)
        return sum(known) / sum(sizes.values())

    @property
    def idle(self) -> float:
        """Share of the finite elements with u = 0."""
        idle, elements, bad = (self.number(name) for name in ("idle", "elements", "nonfinite"))
        finite_elements = (elements or 0.0) - (bad or 0.0)
        return idle / finite_elements if idle and finite_elements else 0.0

    @property
    def without_interval(self) -> bool:
        """Whether EDQ rests on a sample that could not give an interval, and may be far from 1 in what it missed:
        |1 − edq_ratio| never exceeds update_error_ratio."""
        sampled, elements, error = (self.number(name) for name in ("sampled", "elements", "update_error_ratio"))
        given = self.number("edq_ratio_low") is not None
        return not (given or sampled is None or elements is None or sampled >= elements) and (
            error is not None and error > 2 * EDQ_TOLERANCE
        )

    @property
    def chance(self) -> float:
        """How far stochastic rounding may bring edq_ratio off 1 by chance: three standard errors, ‖e − u‖ / ‖u‖
        over the root of the sampled elements with u ≠ 0."""
        error, sampled = self.number("update_error_ratio"), self.number("sampled")
        if not self.stochastic or error is None or not sampled:
            return 0.0
        return 3 * error / math.sqrt(max(sampled * (1 - self.idle), 1.0))

    def judgement(self, findings: Sequence[Finding]) -> Judgement:
        """The first finding's word, and a sentence made of all of them."""
        evidence, measured = self.evidence, self.measured
        text = "; ".join(finding.text for finding in findings).rstrip(".")
        basis = _basis(evidence, measured)
        sentences = " ".join([f"{text[0].upper()}{text[1:]}.", *_about_copies(self), *([basis] if basis else [])])
        return Judgement(
            findings[0].health, sentences, tuple(findings), measured, evidence.first_step, evidence.last_step
        )


def _about_copies(case: _Case) -> Iterator[str]:
    """What of a step reached copies in a lower precision: it decides nothing about the training itself."""
    changed = labelled(case.model, "cast_changed_ratio")
    for name, share in changed.items():
        if case.active and share < COPY_TOLERANCE:
            yield (
                f"A step changes {percent(share)} of a {name} copy of the weights: no loss to the training, but "
                "all that a sampler that is sent such copies sees."
            )


def _basis(evidence: Evidence, measured: float | None) -> str:
    """Which steps and how much of the model the words rest on."""
    parts = []
    if evidence.first_step is not None and evidence.last_step is not None:
        one = evidence.first_step == evidence.last_step
        parts.append(
            f"step {evidence.last_step}" if one else f"steps {evidence.first_step} to {evidence.last_step}"
        )
    if measured is not None:
        parts.append(f"{percent(measured)} of the elements")
    if parts and not evidence.layers:
        parts.append("the model as a whole, not its layers")
    return f"Measured: {', '.join(parts)}." if parts else ""


def _against(case: _Case) -> Iterator[Finding]:
    """Every finding that alone makes a bad word."""
    yield from _not_finite(case)
    if not case.active:
        return
    yield from _descent(case)
    yield from _loss(case)
    yield from _layers(case)
    yield from _states(case)
    yield from _decay(case)
    yield from _residuals(case)
    yield from _oracle(case)


def _not_finite(case: _Case) -> Iterator[Finding]:
    for key, what in (("nonfinite_params", "weights"), ("residual_nonfinite", "residuals")):
        count = case.number(key)
        if count:
            yield Finding("not finite", f"{count:,.0f} {what} are NaN or infinite", key, count, 0.0)


def _descent(case: _Case) -> Iterator[Finding]:
    """EDQ over the recent past; the longest window where more than the visible weight is kept, or by chance."""
    key, over = "edq_ratio", ""
    window = longest_window(case.model, "edq_window_ratio")
    edq = case.number(key)
    if window is not None and (case.keeps_more or case.stochastic or edq is None):
        key, over, edq = f"edq_window_ratio/{window[0]}", f" over {window[0]} steps", window[1]
    low, high = case.number(f"{key}_low"), case.number(f"{key}_high")
    if edq is None or (case.stochastic and case.without_interval and key == "edq_ratio"):
        return
    slack = EDQ_TOLERANCE + case.chance
    if edq < 1 - slack and (high is None or high < 1 - EDQ_TOLERANCE):
        yield Finding("losing updates", f"EDQ{over} is {edq:.3f}: updates are lost", key, edq, 1 - EDQ_TOLERANCE)
    elif edq > 1 + slack and (low is None or low > 1 + EDQ_TOLERANCE):
        yield Finding("steps are off", f"EDQ{over} is {edq:.3f}: updates overshoot", key, edq, 1 + EDQ_TOLERANCE)


def _loss(case: _Case) -> Iterator[Finding]:
    """The share lost, where rounding is to nearest: what one step loses then no other brings back."""
    lost, error = case.number("lost_update_ratio"), case.number("update_error_ratio")
    if case.stochastic or not case.rounding_known or lost is None or lost <= LOST_TOLERANCE:
        return
    if error is None or error > ERROR_TOLERANCE:
        text = f"{percent(lost)} of the updates are rounded away"
        yield Finding("losing updates", text, "lost_update_ratio", lost, LOST_TOLERANCE)


def _layers(case: _Case) -> Iterator[Finding]:
    """Layers that lose most of their updates, if their share of Σ u² is not next to nothing."""
    if case.stochastic or not case.rounding_known:
        return
    squares = {name: (case.number("intended_norm", name) or 0.0) ** 2 for name in case.evidence.layers}
    sizes = {name: case.number("elements", name) or 0.0 for name, square in squares.items() if square}
    losing = [name for name in sizes if _loses_most(case, name)]
    if not losing:
        return
    share = sum(squares[name] for name in losing) / sum(squares.values())
    if share <= LAYER_TOLERANCE:
        return
    losing.sort(key=lambda name: -squares[name])
    worst = losing[0]
    lost = case.number("lost_update_ratio", worst)
    still = all((case.number("lost_update_ratio", name) or 0.0) >= 0.9995 for name in losing)
    many = "1 layer" if len(losing) == 1 else f"{len(losing)} layers"
    verb = (
        ("stands still" if still else "loses most of its updates")
        if len(losing) == 1
        else ("stand still" if still else "lose most of their updates")
    )
    size = sum(sizes[name] for name in losing) / sum(sizes.values())
    more = ", …" if len(losing) > 1 else ""
    text = f"{many} {verb} ({worst}{more}: {percent(size)} of the measured elements, {percent(share)} of Σ u²)"
    yield Finding("losing updates", text, "lost_update_ratio", lost, LAYER_LOST, worst)


def _loses_most(case: _Case, layer: str) -> bool:
    lost, error = case.number("lost_update_ratio", layer), case.number("update_error_ratio", layer)
    return lost is not None and lost > LAYER_LOST and error is not None and error > LAYER_LOST


def _states(case: _Case) -> Iterator[Finding]:
    # Rounded at random, decrements are right in the mean only: off by 0.1 in small models.
    tolerance = STATE_TOLERANCE * (3 if case.stochastic else 1)
    for name, value in state_decrements(case.model).items():
        key = f"state_decrement_ratio/{name}"
        if value < 1 - tolerance:
            text = f"the state {name} does not decay as it should ({value:.3f})"
            yield Finding("states are stuck", text, key, value, 1 - tolerance)
        elif value > 1 + tolerance:
            text = f"the state {name} decays too fast ({value:.3f})"
            yield Finding("steps are off", text, key, value, 1 + tolerance)


def _decay(case: _Case) -> Iterator[Finding]:
    """Decay that the optimizer makes as a rounded operation of its own on the very weights, as torch's do."""
    kept, seen = case.number("decay_ratio"), case.fingerprint
    if kept is None or kept >= DECAY_TOLERANCE or seen is None or case.watch is None:
        return
    apart = seen.implementation in ("foreach", "for-loop") and case.watch.intent != "rule"
    if apart and not case.keeps_more and not case.stochastic:
        text = f"weight decay moves next to nothing ({percent(kept)} of it is kept)"
        yield Finding("decay is lost", text, "decay_ratio", kept, DECAY_TOLERANCE)


def _residuals(case: _Case) -> Iterator[Finding]:
    fill, zero = case.number("residual_fill_ratio"), case.number("residual_zero_ratio")
    if fill is not None and fill > FILL_TOLERANCE:
        text = f"the residuals hold {fill:.3g} half gaps each, where what rounding leaves is at most one"
        yield Finding("residuals are off", text, "residual_fill_ratio", fill, FILL_TOLERANCE)
    if (dropped := case.number("residual_dropped_ratio") or 0.0) > DROPPED_TOLERANCE * (1 - case.idle):
        text = f"{percent(dropped)} of the residuals were 0 again before a step: what they kept was dropped"
        yield Finding("residuals are off", text, "residual_dropped_ratio", dropped, DROPPED_TOLERANCE)
    # Elements that are never stepped have a residual of 0.
    threshold = case.idle + 0.5 * (1 - case.idle)
    if zero is None or zero <= threshold or case.one_step:
        return
    lost = case.number("lost_visible_ratio")
    if lost is not None and lost > LOST_TOLERANCE:
        text = (
            f"{percent(zero)} of the residuals are 0 before a step: what they kept is dropped, and {percent(lost)} "
            "of the updates do not move the weights"
        )
        yield Finding("losing updates", text, "residual_zero_ratio", zero, threshold)


def _oracle(case: _Case) -> Iterator[Finding]:
    key = "edq_oracle_ratio"
    value, low, high = (case.number(name) for name in (key, f"{key}_low", f"{key}_high"))
    if value is None:
        return
    slack = ORACLE_TOLERANCE + case.chance
    if value < 1 - slack and (high is None or high < 1 - ORACLE_TOLERANCE):
        yield Finding("steps are off", f"the oracle disagrees ({value:.3f})", key, value, 1 - ORACLE_TOLERANCE)
    elif value > 1 + slack and (low is None or low > 1 + ORACLE_TOLERANCE):
        yield Finding("steps are off", f"the oracle disagrees ({value:.3f})", key, value, 1 + ORACLE_TOLERANCE)


def _nothing_intended(case: _Case) -> Finding:
    """Why there is no u: each reason has its own sentence."""
    elements, layers = case.number("elements"), case.evidence.layers
    if not case.model:
        return Finding("unknown", "no step was measured yet", "measured_steps", None)
    if not elements and layers and all(_NAMED_BY_GROUP.fullmatch(name) for name in layers):
        text = "none of the optimizer's tensors belongs to the model, and none had a gradient: watch the optimizer "
        return Finding("unknown", text + "that trains this model", "elements", elements)
    if not elements:
        return Finding("unknown", "no watched layer had a gradient in the measured steps", "elements", elements)
    if case.number("measured_ratio") is None:
        text = "only what changed is known, not what was intended: what was lost is unknown"
        return Finding("unknown", text, "measured_ratio", None)
    text = "every intended update was 0: gradients and decay are 0, or the learning rate is"
    return Finding("unknown", text, "idle", case.number("idle"))


def _doubts(case: _Case) -> Iterator[Finding]:
    """What keeps a run without a finding against it from a good word."""
    measured, edq = case.measured, case.number("edq_ratio")
    if measured is not None and measured < 1 - MEASURED_TOLERANCE:
        text = f"what was intended is known of {percent(measured)} of the elements only"
        yield Finding("unknown", text, "measured_ratio", measured, 1 - MEASURED_TOLERANCE)
    low, high = case.number("edq_ratio_low"), case.number("edq_ratio_high")
    if (edq is not None and abs(1 - edq) > EDQ_TOLERANCE) or (
        low is not None and high is not None and (low < 1 - 2 * EDQ_TOLERANCE or high > 1 + 2 * EDQ_TOLERANCE)
    ):
        text = f"EDQ {edq:.3f} is not known well enough" + ("" if low is None else f" ({low:.3f} to {high:.3f})")
        yield Finding("unknown", text, "edq_ratio", edq, EDQ_TOLERANCE)
    if edq is not None and case.without_interval:
        text = f"EDQ {edq:.3f} rests on a sample that cannot say how exact it is: watch with a larger sample="
        yield Finding("unknown", text, "edq_ratio", edq)
    lost = case.number("lost_update_ratio")
    if not case.rounding_known and lost is not None and lost > LOST_TOLERANCE:
        text = (
            f"{percent(lost)} of the updates are rounded away in a step, and whether by stochastic rounding, whose "
            "updates arrive in the mean, is not known: declare strategy="
        )
        yield Finding("unknown", text, "lost_update_ratio", lost, LOST_TOLERANCE)
    if edq is not None and not list(_witnesses(case))[1:]:
        text = f"EDQ reads {edq:.3f}, but no state decrement and no oracle confirms it: not known"
        yield Finding("unknown", text, "edq_ratio", edq)


def _witnesses(case: _Case) -> Iterator[Finding]:
    """What speaks for the run: EDQ, then each second witness."""
    edq = case.number("edq_ratio")
    yield Finding("healthy", f"updates arrive (EDQ {edq:.3f})", "edq_ratio", edq, EDQ_TOLERANCE)
    for name, value in state_decrements(case.model).items():
        key = f"state_decrement_ratio/{name}"
        yield Finding("healthy", f"{name} decays as it should ({value:.3f})", key, value, STATE_TOLERANCE)
    oracle = case.number("edq_oracle_ratio")
    if oracle is not None:
        text = f"the oracle agrees ({oracle:.3f})"
        yield Finding("healthy", text, "edq_oracle_ratio", oracle, ORACLE_TOLERANCE)
    seen = case.fingerprint
    if seen is not None and seen.parameters and not seen.states:
        yield Finding("healthy", "the optimizer keeps no state that could go wrong", "states", None)


def percent(share: float) -> str:
    """A share in words, with as many digits as it needs to be told from 0 and from 1."""
    for digits in (0, 1, 2, 3):
        text = f"{100 * share:.{digits}f}"
        if share in (0.0, 1.0) or (digits and float(text) not in (0.0, 100.0)):
            return f"{text} %"
    return "under 0.001 %" if share < 0.5 else "over 99.999 %"


def recent_points(measured: Sequence[float], squares: Sequence[float]) -> int:
    """How many points at the end are the recent past: they hold RECENT_STEPS measured steps and RECENT_SHARE of the
    run's Σ u², or are all there are.

    measured, squares: measured steps and Σ u² of each point, oldest first. At the end of a learning rate's schedule
    the last steps are next to nothing beside the rest, and do not speak for it.
    """
    whole = sum(squares)
    steps = carried = 0.0
    for taken, (count, square) in enumerate(zip(reversed(measured), reversed(squares), strict=True), start=1):
        steps, carried = steps + count, carried + square
        if steps >= RECENT_STEPS and carried >= RECENT_SHARE * whole:
            return taken
    return len(measured)


def longest_window(metrics: Values, name: str) -> tuple[int, float] | None:
    """(steps, value) of the longest window in which the metric `name` is defined; None: nowhere."""
    found = [(int(label), value) for label, value in labelled(metrics, name).items() if label.isdigit()]
    return max(found, default=None)


def state_decrements(metrics: Values) -> dict[str, float]:
    """The defined state decrements by the name of their state."""
    return labelled(metrics, "state_decrement_ratio")


def labelled(metrics: Values, name: str) -> dict[str, float]:
    """The defined values of a labelled metric, by label."""
    found = {}
    for key, value in metrics.items():
        own, label = split_key(key)
        number = finite(value)
        if own == name and label and number is not None:
            found[label] = number
    return found


def finite(value: Number | None) -> float | None:
    """The number; None where it is undefined or not finite."""
    number = float("nan") if value is None else float(value)
    return number if abs(number) < float("inf") else None
