"""The judgement of a run and its overview: the outcome of one evaluation of its recent past.

`collage_monitor.diagnosis` makes judgements, in a training and on a server; the server's `queries/overview.py`
makes overviews of them. Terminal, notebook, pages, report, incidents and `/metrics` show these, in these words."""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from collage_monitor.wire.number_encoding import Number

__all__ = ["Advice", "Choice", "EdqChange", "Finding", "Judgement", "LayerLoss", "NO_PROBLEM", "Overview"]

NO_PROBLEM: Final[frozenset[str]] = frozenset({"healthy", "unknown"})
"""Words that speak against no run."""


class Finding(Struct, frozen=True):
    """One number that speaks for or against a run: `key` in `layer` (null: the model) is `value`, beside the
    `threshold` that it is held against.

    text: a clause with the reason; short: at most six words. now: the value over the newest steps, null unless it
    moves. alert: the alert that it is, "" if it need wake nobody. since: the first step from which the number has
    stayed beyond the threshold, null if it was so from the first measured one on, or that is not known;
    since_words: ", since step 1,020", ", from the start".
    """

    health: str
    text: str
    key: str
    value: float | None
    threshold: float | None = None
    layer: str | None = None
    short: str = ""
    now: float | None = None
    alert: str = ""
    since: int | None = None
    since_words: str = ""


class Choice(Struct, frozen=True):
    """One thing to try.

    strategy: null where the weights become fp32. code: lines to paste, with the names `model` and `optimizer`. If a
    strategy is named, they come after the optimizer is built, and before a scheduler, a checkpoint and the watch.
    Otherwise they come before the optimizer is built, or beside other optimizers before its first step.
    bytes_per_parameter: of weights, states and gradients then; null: not known.
    """

    code: str
    bytes_per_parameter: float | None
    strategy: str | None = None


class Advice(Struct, frozen=True):
    """A sentence about one optimizer, or an average of the weights, without a full stop, and what it names, the
    most exact first."""

    optimizer: str
    text: str
    choices: list[Choice] = field(default_factory=list)


class Judgement(Struct, kw_only=True, frozen=True):
    """A run's health in one word, and the findings behind it, the deciding one first.

    short: at most six words; headline: one sentence on what is wrong, where and since when; text: the reasons, with
    all numbers. advice: an entry for each optimizer that can do better. measured: share of the elements of stepped
    layers whose intended update is known; null: nothing was measured. first_step … last_step: the recent past.
    """

    health: str = "unknown"
    short: str = ""
    headline: str = ""
    text: str = ""
    findings: list[Finding] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    measured: float | None = None
    first_step: int | None = None
    last_step: int | None = None

    @property
    def deciding(self) -> Finding | None:
        """The finding that decided; None where nothing was measured."""
        return self.findings[0] if self.findings else None

    @property
    def against(self) -> list[Finding]:
        """The findings that speak against the run."""
        return [finding for finding in self.findings if finding.health not in NO_PROBLEM]

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


class LayerLoss(Struct, kw_only=True, frozen=True):
    """A layer and its losses. `share`: its part of the model's lost energy, the sum of the layers' positive Σu² −
    Σue."""

    layer: str
    share: float
    edq_ratio: Number | None
    lost_update_ratio: Number | None


class EdqChange(Struct, kw_only=True, frozen=True):
    """A step at which the model's EDQ changed abruptly, with its medians just before and after."""

    step: int
    before: float
    after: float


class Overview(Judgement, kw_only=True, frozen=True):
    """The overview of a run: its judgement, so that every quoted number is also shown.

    `numbers`: the model's metrics over the recent past, `measured_steps` in it, with their intervals; `now`: those
    that moved, over the newest steps. `changes`: all abrupt changes of EDQ, in order. `worst`: up to five layers.
    `trend`: EDQ over the whole run. `intended_share`: the norm of the newest intended update over the usual one of
    the run's last fifth; null where there is none.
    """

    run_id: str
    measured_steps: int = 0
    numbers: dict[str, Number | None] = field(default_factory=dict)
    now: dict[str, float] = field(default_factory=dict)
    intended_share: float | None = None
    changes: list[EdqChange] = field(default_factory=list)
    worst: list[LayerLoss] = field(default_factory=list)
    trend: list[Number | None] = field(default_factory=list)

    @property
    def since(self) -> int | None:
        """The first step with what is wrong; None if nothing is, or that is not known."""
        return self.deciding.since if self.deciding is not None else None
