"""The overview of a run: the outcome of one evaluation of its recent past, as the server stores and answers it.

`queries/overview.py` of the server makes it; the table of runs, the run's page and `compare` show it. A field may
be added with a default, but none renamed: dashboards and servers of two versions meet.
"""

from __future__ import annotations

from msgspec import Struct, field

from collage_monitor.wire.number_encoding import Number

__all__ = ["EdqChange", "LayerLoss", "Overview"]


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


class Overview(Struct, kw_only=True, frozen=True):
    """The overview of a run: one evaluation of its recent past, so that every quoted number is also shown.

    first_step … last_step: the recent past, `measured_steps` in it; `numbers` are the model's metrics over it, with
    their intervals. `headline` says in one sentence what is wrong, where and since when; `verdict` gives the
    reasons, `advice` what to try, "" where there is nothing, and `findings` the metrics that are held against the
    run, with their values. `since`: the first step with the present EDQ, null if it never changed; `changes`: all
    abrupt changes, in order. `worst`: up to five layers. `trend`: EDQ over the whole run. `intended_share`: the
    norm of the newest intended update over the usual one of the run's last fifth; null where there is none.
    """

    run_id: str
    first_step: int | None = None
    last_step: int | None = None
    measured_steps: int = 0
    numbers: dict[str, Number | None] = field(default_factory=dict)
    health: str = "unknown"
    headline: str = ""
    verdict: str = ""
    advice: str = ""
    findings: dict[str, float] = field(default_factory=dict)
    intended_share: float | None = None
    since: int | None = None
    changes: list[EdqChange] = field(default_factory=list)
    worst: list[LayerLoss] = field(default_factory=list)
    trend: list[Number | None] = field(default_factory=list)
