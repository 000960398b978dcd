"""The possible verdicts on a run, and the sentences around them.

Names of verdicts are fixed (alerts, filters and scripts use them), sentences are free: raise `WORDS_VERSION` with
them, and servers make their overviews again (`tests/contract/test_judgement.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from collage_monitor.judgement.evidence import SilentRanks, labelled
from collage_monitor.judgement.judged_run import LAYER_TOLERANCE, Case

__all__ = [
    "Advice",
    "CAVEATS",
    "Choice",
    "Finding",
    "GRAVITY",
    "Health",
    "Judgement",
    "NO_PROBLEM",
    "STILL",
    "WORDS_VERSION",
    "judgement_of",
    "percent",
    "silence",
]

WORDS_VERSION: Final = 8
"""Raise it when a run may be judged or headlined otherwise than before while the package's version stays: what
servers keep is then made again."""
Health = Literal[
    "healthy",
    "not finite",
    "losing updates",
    "states are stuck",
    "decay is lost",
    "residuals are off",
    "steps are off",
    "average is off",
    "unknown",
]
GRAVITY: Final[tuple[Health, ...]] = (
    "not finite",
    "losing updates",
    "states are stuck",
    "decay is lost",
    "residuals are off",
    "steps are off",
    "average is off",
)
"""Bad words, the gravest first."""
NO_PROBLEM: Final[frozenset[str]] = frozenset({"healthy", "unknown"})
"""The other words: nothing speaks against a run."""
_COPY_TOLERANCE: Final = 0.5
STILL: Final = 0.9995
"""Share of its updates that a layer loses which does not move at all."""
_NAMED: Final = 3
CAVEATS: Final = (
    "What is lost before the optimizer (gradients accumulated or reduced in low precision) is invisible here. "
    "float64 parameters cannot be measured. Sampling can miss a rare row of a large embedding."
)
"""Stated wherever the numbers are shown."""


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
class Choice:
    """One thing to try.

    strategy: None where the weights become fp32. code: lines to paste, with the names `model` and `optimizer`. If a
    strategy is named, they come after the optimizer is built, and before a scheduler, a checkpoint and the watch.
    Otherwise they come before the optimizer is built, or beside other optimizers before its first step.
    bytes_per_parameter: of weights, states and gradients then; None: not known.
    """

    code: str
    bytes_per_parameter: float | None
    strategy: str | None = None


@dataclass(frozen=True)
class Advice:
    """A sentence about one optimizer, or an average of the weights, without a full stop, and what it names, the
    most exact first."""

    optimizer: str
    text: str
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """A run's health, the sentence that gives the reasons, and the findings behind it, the deciding one first.

    advice: advice, an entry for each optimizer that can do better.
    measured: share of the elements of stepped layers whose intended update is known; None: nothing was measured.
    """

    health: Health
    text: str
    findings: tuple[Finding, ...] = ()
    measured: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    advice: tuple[Advice, ...] = ()

    @property
    def advice_lines(self) -> list[str]:
        """What to try, a clause for each optimizer that can do better."""
        several = len(self.advice) > 1
        return [f"{entry.optimizer}: {entry.text}" if several else entry.text for entry in self.advice]

    @property
    def advised(self) -> str:
        """What to try, in one sentence; "" where there is nothing."""
        text = "; ".join(self.advice_lines)
        return f"{text[0].upper()}{text[1:]}." if text else ""

    @property
    def deciding(self) -> Finding | None:
        """The finding that decided; None where nothing was measured."""
        return self.findings[0] if self.findings else None


def judgement_of(case: Case, findings: Sequence[Finding]) -> Judgement:
    """The first finding's word, and a sentence made of all of them."""
    evidence, measured = case.evidence, _measured(case)
    text = "; ".join(finding.text for finding in findings).rstrip(".")
    said = [f"{text[0].upper()}{text[1:]}.", *_about_layers(case), *_about_copies(case), _basis(case)]
    sentences = " ".join(sentence for sentence in said if sentence)
    return Judgement(
        findings[0].health, sentences, tuple(findings), measured, evidence.first_step, evidence.last_step
    )


def _about_layers(case: Case) -> Iterator[str]:
    """Layers worth a look that do not count against the run."""
    without = [name for name in case.evidence.layers if case.number("elements", name) is None]
    if without and len(without) < len(case.evidence.layers) and not case.one_step:
        verb = "layer had" if len(without) == 1 else "layers had"
        yield f"{len(without)} {verb} no gradient in these steps ({_some(without)})."
    losing = [] if case.arrives_later else case.losing_layers()
    still = [name for name in losing if (case.number("lost_update_ratio", name) or 0.0) >= STILL]
    share = case.share_of(still)
    if still and share <= LAYER_TOLERANCE:
        verb = "layer stands" if len(still) == 1 else "layers stand"
        yield f"{len(still)} {verb} still ({_some(still)}): {percent(share)} of Σ u², too little to decide."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def _about_copies(case: Case) -> Iterator[str]:
    """How much of a step reached copies in a lower precision; it does not change the verdict on the training
    itself."""
    changed = labelled(case.model, "cast_changed_ratio")
    recoded = labelled(case.model, "cast_recoded_ratio")
    # Where scales follow the largest weight, each step moves every number a little: only codes tell what arrives.
    hardly = {name: share for name, share in (changed | recoded).items() if share < _COPY_TOLERANCE}
    if case.active and hardly:
        parts = [
            f"{percent(share)} of a {name} copy{' of the weights' if place == 0 else ''}"
            for place, (name, share) in enumerate(hardly.items())
        ]
        yield (
            f"A step changes {', '.join(parts)}. Training is unaffected; an inference server that gets such copies "
            "misses the rest."
        )
    for pair, share in labelled(case.model, "cast_route_ratio").items():
        one, _, other = pair.partition("/")
        step = recoded.get(one, changed.get(one))
        if share > 0:
            against = f", {share / step:.1f} times what a step changes" if step else ""
            yield f"Copies by the routes {one} and {other} differ in {percent(share)} of their codes{against}."


def _basis(case: Case) -> str:
    """Which steps, and how much of the model, the verdict covers."""
    evidence, parts = case.evidence, []
    if evidence.first_step is not None and evidence.last_step is not None:
        one = evidence.first_step == evidence.last_step
        parts.append(
            f"step {evidence.last_step}" if one else f"steps {evidence.first_step} to {evidence.last_step}"
        )
    if (measured := _measured(case)) is not None:
        parts.append(f"{percent(measured)} of the elements")
    if parts and not evidence.layers:
        parts.append("the model as a whole, not its layers")
    return f"Measured: {', '.join(parts)}." if parts else ""


def _measured(case: Case) -> float | None:
    """Share of the elements whose intended update is known, those of silent ranks among them."""
    silent = case.evidence.silent
    if silent is None or case.measured is None:
        return case.measured
    return None if silent.held is None else silent.held * case.measured


def silence(silent: SilentRanks) -> str:
    """'2 of 4 ranks report since step 500'."""
    return f"{silent.reporting} of {silent.expected} ranks report since step {silent.since:,}"


def percent(share: float) -> str:
    """A share as it reads everywhere: one decimal, two where one would say 0 or all of it; 0 and 1 are exact."""
    if share in (0.0, 1.0):
        return f"{100 * abs(share):.0f} %"
    for digits in (1, 2):
        text = f"{100 * share:,.{digits}f}"
        if float(text.replace(",", "")) not in (0.0, 100.0):
            return f"{text} %"
    return "< 0.01 %" if share < 0.5 else "> 99.99 %"
