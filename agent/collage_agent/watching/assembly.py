"""From the tables of a watch's optimizers to one measurement of each iteration, kept and handed over.

`handle.py` makes one for each watch. It owns the layout: rows and columns are only appended, so that a curve keeps
its place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from collage_optim import CollageOptimizer
from msgspec.structs import replace as replace_fields
from torch import Tensor
from torch.optim import Optimizer

from collage_agent.error_guard import Guard
from collage_agent.expectations import Expectations
from collage_agent.measurement import Layout, Measurement, Reporter
from collage_agent.stats import MEASURES, OWN, failures
from collage_agent.step.totals import TableUnion
from collage_agent.training.skipped_steps import most_skipped
from collage_agent.training.watched_parameters import WatchedParameter, coverage_of
from collage_agent.watch_options import WatchOptions
from collage_agent.watching.average_watch import AverageWatch
from collage_agent.watching.expectation_check import Contract
from collage_agent.watching.governor import Governor
from collage_agent.watching.hooks import OptimizerHooks, is_watched
from collage_agent.watching.resume_check import largest_step_count
from collage_agent.watching.step_history import StepHistory
from collage_agent.watching.trained_parameters import bytes_per_parameter
from collage_agent.watching.unseen_steps import SeenBy
from collage_agent.watching.watch_description import joined
from collage_monitor import wire
from collage_monitor.statistics.averages import KEYS
from collage_monitor.totals_table import Table

__all__ = ["Assembly"]

_LOG = logging.getLogger("collage_agent")
_MANY_LAYERS: Final = 2_000
"""With more, the first report is without bytes per parameter: counting them takes a quarter of such a step."""
_SKIPPED_BETWEEN_REPORTS: Final = 32
"""A scale settles within as many steps; whoever skips more without having taken one is reported."""


class Assembly:
    """Joins what the hooks of one watch measured in an iteration, and hands it to the reporter.

    `last` is the newest measurement; `last_occasional` the newest for keys that not every step reports; `history`
    holds all of them, merged; `layout` gives the meaning of their rows and columns. Errors end in the guard.
    """

    def __init__(
        self,
        hooks: Sequence[OptimizerHooks],
        options: WatchOptions,
        governor: Governor,
        guard: Guard,
        reporter: Reporter | None,
        last_step_shown: Callable[[], int | None] | None,
    ) -> None:
        self.watch: object = None
        self.door: wire.Door = "torch"
        self.last: Measurement | None = None
        self.last_occasional: dict[tuple[str, ...], Measurement] = {}
        self.history = StepHistory()
        self.averages: list[AverageWatch] = []
        self.layout: Layout | None = None
        self._hooks = hooks
        self._options = options
        self._governor = governor
        self._guard = guard
        self._reporter = reporter
        self._last_step_shown = last_step_shown
        self._union = TableUnion()
        self._bytes_per_parameter: float | None = None
        self._laid_out: list[Sequence[WatchedParameter]] = []
        self._described: tuple[object, ...] = ()
        self._looked_at: Layout | None = None
        self._kept_since: int | None = None
        self._steps_before: int | None = None
        self._coverage: wire.Coverage | None = None
        self._beginnings: list[int] = []
        self._contract: Contract | None = None
        for own in hooks:
            own.skipped.tell = self._step_was_skipped
        if isinstance(options.expect, Expectations):
            self._contract = Contract(options.expect, options.on_breach, options.windows)

    @property
    def info(self) -> wire.WatchInfo:
        """The description of the watch in wire form."""
        notes = [*([self._guard.reason] if self._guard.reason else []), *failures()]
        info = joined([hooks.info(notes) for hooks in self._hooks])
        info = replace_fields(
            info,
            kept_since=self._kept_since,
            steps_before=self._steps_before,
            coverage=self._coverage,
            door=self.door,
        )
        if self._contract is None:
            return info
        return replace_fields(info, expected=str(self._options.expect), broken=self._contract.broken)

    @property
    def watched(self) -> dict[str, WatchedParameter]:
        """All watched parameters by the names of their layers."""
        return {entry.name: entry for hooks in self._hooks for entry in hooks.measurer.watched}

    @property
    def external_writes(self) -> int:
        """How often our optimizers found an externally changed weight; other libraries' do not check."""
        found = 0
        for stepping in self._steppings:
            if isinstance(stepping, CollageOptimizer):
                found += stepping.external_writes
        return found

    @property
    def _steppings(self) -> list[Optimizer]:
        """The optimizers, each once: one whose parameters are stepped one by one has hooks for each of them."""
        return list({id(hooks.stepping): hooks.stepping for hooks in self._hooks}.values())

    @property
    def skipped_steps(self) -> float | Tensor | None:
        """Steps that a loss scaler skipped; None where none was seen."""
        return most_skipped([hooks.skipped for hooks in self._hooks])

    @property
    def skipped_so_far(self) -> float:
        """Steps that a loss scaler skipped, known without waiting, if none was measured yet."""
        skipped = self.skipped_steps if self.last is None else None
        return skipped if isinstance(skipped, float) else 0.0

    def _step_was_skipped(self) -> None:
        """Report skipped steps now and then while no step is taken: no measured one would ever tell of them."""
        skipped = self.skipped_so_far
        due = skipped > _SKIPPED_BETWEEN_REPORTS and skipped % _SKIPPED_BETWEEN_REPORTS == 1
        if not due or self._reporter is None or self._guard.disabled:
            return
        try:
            with self._governor.timing():
                taken = self.steps_before() if self._steps_before is None else self._steps_before
                if self._reporter is not None:
                    nothing, layout = torch.zeros(0, 0), Layout((), (), self.info)
                    told = Measurement(layout, taken, time.time(), nothing, {"skipped_steps": skipped})
                    self._reporter.measured(told)
        except Exception as error:
            self._guard.caught("reporting skipped steps", error)

    def steps_before(self) -> int:
        """The first optimizer is about to take its first step: tell so, and return the steps taken before."""
        taken = 0
        try:
            self._governor.measure_next_step()
            first = self._options.first_step
            known = self._steps_taken() if first is None else first - 1
            taken = known or 0
            if known is None:
                # None: which of the run's points these steps would hide is unknown.
                self._reporter = None
            self._steps_before = known
            if self._reporter is not None:
                self._reporter.started(taken + 1)
        except Exception as error:
            self._guard.caught("reading the step number", error)
        return taken

    def _steps_taken(self) -> int | None:
        """Steps taken before the first one watched; None: not known, and the run may show steps already.

        By the optimizers' counts. One that counts none may have forgotten: then by what was saved of these weights.
        """
        counts = [largest_step_count(stepping) for stepping in self._steppings]
        if None not in counts and any(counts):
            return max(count for count in counts if count is not None)
        saved = [hooks.saved.step_of_weights(hooks.stepping, hooks.measurer.watched) for hooks in self._hooks]
        if saved[0] is not None and len(set(saved)) == 1:
            return saved[0]
        if None not in counts:
            return 0
        shown_already = 0 if self._last_step_shown is None else self._last_step_shown()
        name = " + ".join(dict.fromkeys(type(hooks.stepping).__name__ for hooks in self._hooks))
        if shown_already is None:
            _LOG.warning(
                "%s keeps no step count; pass first_step=…: without it nothing is sent, since steps counted from 1 "
                "would hide what this run has shown",
                name,
            )
        else:
            then = shown_already + 1
            _LOG.warning("%s keeps no step count; pass first_step=…: its next step is called %d", name, then)
        return shown_already

    def take(self, step: int) -> None:
        """Iteration number `step` is over and was measured: hand it over, and let the governor judge its cost."""
        try:
            with self._governor.timing():
                parts = [part for hooks in self._hooks for part in hooks.totals or ()]
                lists = [hooks.measurer.watched for hooks in self._hooks]
                if [*map(id, lists)] != [*map(id, self._laid_out)]:
                    self.layout, self._laid_out = None, lists
                    self._union.layers.extend(self.watched)
                beginnings = [hooks.beginnings for hooks in self._hooks]
                if beginnings != self._beginnings:
                    self._beginnings = beginnings
                    self._begin_again(step)
                measured = len(parts)
                for average in self.averages:
                    parts += average.take(self._union.layers)
                self._hand_over(step, self._union.of(parts))
                if len(parts) > measured and self.last is not None:
                    self.last_occasional[KEYS] = self.last
        except Exception as error:
            self._guard.caught("reporting a step", error)
        for hooks in self._hooks:
            hooks.totals = None
        if self._governor.adjust():
            for hooks in self._hooks:
                hooks.measurer.shrink_sample(int(self._governor.sample))
        if self._contract is not None:
            self._contract.enforce()

    def _begin_again(self, step: int) -> None:
        """Start the recent past at this step: it leaves out everything measured before."""
        self._kept_since = step
        self.history.begin_anew()
        self.last_occasional.clear()

    def _hand_over(self, step: int, table: Table[Tensor]) -> None:
        if self.last is None:
            self._coverage = coverage_of(
                self._hooks[0].model, [hooks.stepping for hooks in self._hooks], is_watched
            )
        scalars, layout = self._scalars(), self._current_layout()
        if self._contract is not None:
            layout = self._held_to(self._contract, layout, step, table)
            scalars["expectations_broken"] = float(len(self._contract.broken))
        last = self.last = Measurement(layout, step, time.time(), table.array, scalars)
        self.history.add(last)
        # The watch and its history hold this step now, too.
        kept = float(table.array.nbytes + self.history.bytes)
        for hooks in self._hooks:
            kept += hooks.measurer.buffer_bytes()
            if hooks.totals is not None:
                self.last_occasional.update(dict.fromkeys(hooks.measurer.occasional, last))
        for average in self.averages:
            kept += average.bytes
        scalars["agent_memory_bytes"] = kept
        if self._reporter is not None:
            self._reporter.measured(last)

    def _held_to(self, contract: Contract, layout: Layout, step: int, table: Table[Tensor]) -> Layout:
        """Check the step against the expectations; returns the layout, rebuilt if it must report a new breach."""
        if self._looked_at is not layout:
            contract.look_at(layout, step)
        contract.measured(table.array, step, begins=step == self._kept_since)
        self._looked_at = self._current_layout()
        return self._looked_at

    def _scalars(self) -> dict[str, float | Tensor]:
        """The agent's own numbers."""
        governor, restarts = self._governor, 0
        put_off = self.last is None and len(self._union.layers) > _MANY_LAYERS
        if self._bytes_per_parameter is None and not put_off:
            self._bytes_per_parameter = bytes_per_parameter(self._steppings)
        scalars: dict[str, float | Tensor] = {
            "agent_cpu_seconds": governor.agent_cpu_seconds,
            "agent_overhead_ratio": governor.overhead_ratio,
            "agent_wall_seconds": governor.wall_seconds,
        }
        losses = 0
        for hooks in self._hooks:
            restarts += hooks.measurer.oracle_restarts
            losses += len(hooks.losses)
        known: dict[str, float | Tensor | None] = {
            "agent_interval": governor.interval if governor.interval != self._options.every else None,
            "agent_sample": float(governor.sample) if governor.sample != self._options.sample else None,
            "oracle_restarts": restarts or None,
            "bytes_per_parameter": self._bytes_per_parameter,
            "external_writes": self.external_writes or None,
            "resume_losses": losses or None,
            "skipped_steps": self.skipped_steps,
        }
        for key, value in known.items():
            if value is not None:
                scalars[key] = value if isinstance(value, torch.Tensor) else float(value)
        return scalars

    def layout_after_look(self) -> Layout | None:
        """The layout, rebuilt if a look has found unseen steps since; None if there is nothing new."""
        known = self.layout
        layout = None if known is None else self._current_layout()
        return None if layout is known else layout

    def _current_layout(self) -> Layout:
        """The present meaning of rows and columns; built again only after a change."""
        layout, union, closures, changes = self.layout, self._union, False, 0
        seen_by = list[tuple[SeenBy, bool]]()
        for hooks in self._hooks:
            seen_by.append((hooks.seen_by, hooks.measurer.copies_optimizer))
            closures = closures or hooks.closure_seen
            changes += hooks.changes
        broken = () if self._contract is None else (*self._contract.broken, changes)
        described = failures() if len(MEASURES) > len(OWN) else [], closures, broken, seen_by, self._kept_since
        if (
            layout is None
            or self._described != described
            or len(layout.statistics) != len(union.statistics)
            or len(layout.layers) != len(union.layers)
        ):
            self._described, watched = described, self.watched
            layers = tuple(watched[name].layer() for name in union.layers)
            layout = self.layout = Layout(layers, tuple(union.statistics), self.info)
        return layout
