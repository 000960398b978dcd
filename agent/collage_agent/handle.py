"""Watching a model's optimizers: one report for each measured iteration, and the handle that the user holds."""

from __future__ import annotations

import html
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Unpack

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.totals import TableUnion
from collage_agent.guard import Guard
from collage_agent.intent.choose import IntentCache
from collage_agent.intent.foreign import ForeignOptimizer, is_foreign, only_passes_on
from collage_agent.measure.windows import WindowSchedule
from collage_agent.measurement import Layout, Measurement, Reporter
from collage_agent.options import WatchArguments, WatchOptions
from collage_agent.stats import failures
from collage_agent.training.deepspeed import SubGroup, showing_only, sub_groups
from collage_agent.training.parameters import WatchedParameter
from collage_agent.training.scaling import most_skipped
from collage_agent.watching.description import bytes_per_parameter, external_writes, joined
from collage_agent.watching.governor import Governor
from collage_agent.watching.history import StepHistory
from collage_agent.watching.hooks import OptimizerHooks, largest_step_count
from collage_agent.watching.iterations import Iterations
from collage_agent.watching.verdict import edq_change, evidence_of_past, summarise, verdict
from collage_monitor import wire
from collage_monitor.judgement import Evidence, Judgement, judge
from collage_monitor.table import Table

__all__ = ["Optimizers", "Watch", "watch"]

Optimizers = Any
"""What `watch` takes: an optimizer, or several over different parameters (a sequence, or a mapping's values).

An optimizer of another make, or a function that takes the step, is measured between `before` and `after`.
"""
_MANY_LAYERS = 2_000
"""With more, the first report is without bytes per parameter: counting them takes a quarter of such a step."""
_LOG = logging.getLogger("collage_agent")


def watch(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    reporter: Reporter | None = None,
    seed: int = 0,
    worker_cpu_seconds: Callable[[], float] | None = None,
    last_step_shown: Callable[[], int | None] | None = None,
    **options: Unpack[WatchArguments],
) -> Watch:
    """Measure what becomes of the optimizer's updates, from its next step on; see `collage_agent.watch`.

    Several optimizers count iterations instead of steps: one is over when each has stepped, or when one of them
    steps again. reporter takes measurements away; seed fixes the sample; worker_cpu_seconds is what delivery has
    used. last_step_shown is asked where an optimizer keeps no count of its steps: see `Run.last_step_shown`.
    Costs a self-test of 20 to 400 ms for each kind of parameter group. Synchronises no device.

    Raises:
        TypeError, ValueError: an option that cannot be used, or a model or optimizer that is none.
    """
    checked = WatchOptions(**options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}; pass the torch.nn.Module that is trained")
    return Watch(model, _several(model, optimizer), checked, reporter, seed, worker_cpu_seconds, last_step_shown)


class Watch:
    """Watched optimizers: `remove()` ends it, `summary()` gives the numbers, printing it gives the verdict."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer | ForeignOptimizer],
        options: WatchOptions,
        reporter: Reporter | None,
        seed: int,
        worker_cpu_seconds: Callable[[], float] | None,
        last_step_shown: Callable[[], int | None] | None,
    ) -> None:
        self.options = options
        self.optimizers = optimizers
        self._last_step_shown = last_step_shown
        self._reporter = reporter
        self._guard = Guard(stops_measuring=True)
        cycle = WindowSchedule(options.windows, options.every).cycle
        self._governor = Governor(options.every, options.sample, options.budget, worker_cpu_seconds, cycle=cycle)
        self._hooks: list[OptimizerHooks] = []
        intents, names = IntentCache(), dict[str, None]()
        # Sub-groups that an optimizer steps in turn are like several optimizers: one iteration, one report.
        parts: list[tuple[Optimizer | ForeignOptimizer, SubGroup | None]] = []
        for optimizer in optimizers:
            own = [] if isinstance(optimizer, ForeignOptimizer) else sub_groups(model, optimizer)
            parts += [(optimizer, part) for part in own] or [(optimizer, None)]
        for number, (optimizer, part) in enumerate(parts):
            with nullcontext() if isinstance(optimizer, ForeignOptimizer) else showing_only(optimizer, part):
                hooks = OptimizerHooks(
                    model,
                    optimizer,
                    options,
                    self._governor,
                    self._guard,
                    intents,
                    number=number,
                    names_used=names,
                    seed=seed,
                    sub_group=part,
                )
            self._hooks.append(hooks)
        if not names and all(hooks.stepping is hooks.optimizer for hooks in self._hooks):
            raise ValueError(_nothing_to_watch(options, [name for hooks in self._hooks for name in hooks.left_out]))
        self._union = TableUnion()
        self._bytes_per_parameter: float | None = None
        self._layout: Layout | None = None
        self._laid_out: list[Sequence[WatchedParameter]] = []
        self._failures: list[str] = []
        self._last: Measurement | None = None
        self._history = StepHistory()
        self._last_occasional: dict[tuple[str, ...], Measurement] = {}
        self._iterations = Iterations(len(self._hooks), self._steps_before_watch, self._report)
        for hooks in self._hooks:
            hooks.begin(self._iterations)
        self._advice = "; ".join(own.advice for own in optimizers if isinstance(own, ForeignOptimizer))
        if self._advice:
            _LOG.warning("%s", self._advice)

    def before(self) -> None:
        """Say that a step is about to be taken, gradients being final, by what calls no hooks of torch's.

        Of a torch optimizer the hooks say so; then this does nothing. Synchronises nothing, and never raises.
        """
        for hooks in self._hooks:
            hooks.before_by_hand()

    def after(self) -> None:
        """Say that the step announced by `before` has been taken; it is measured if it is due."""
        for hooks in self._hooks:
            hooks.after_by_hand()

    @property
    def step(self) -> int | None:
        """Number of the last completed optimizer step; None before the first under this watch."""
        return self._iterations.step

    @property
    def removed(self) -> bool:
        """Whether the watch has ended."""
        return self._hooks[0].removed

    @property
    def info(self) -> wire.WatchInfo:
        """What is watched and how, as it travels."""
        notes = [*([self._guard.reason] if self._guard.reason else []), *failures()]
        return joined([hooks.info(notes) for hooks in self._hooks])

    def remove(self) -> None:
        """Stop watching: take the hooks off. Numbers measured so far stay; safe to call twice."""
        for hooks in self._hooks:
            hooks.remove()
        self._iterations.end()

    def summary(self) -> dict[str, Any]:
        """{"step", "model": {key: value}, "layers": {name: {key: value}}} of the last measured step.

        Windows and counterfactuals are the last ones. Values are float or None (undefined); 95 % intervals stand
        beside theirs as NAME_low, NAME_high. Blocks until the step is finished: synchronises the device. This
        process's shards only.
        """
        summary = summarise(self._last, self._last_occasional)
        skipped = most_skipped(hooks.skipped for hooks in self._hooks)
        if skipped is not None:
            summary["model"]["skipped_steps"] = float(skipped)
        written = external_writes([hooks.stepping for hooks in self._hooks])
        if written:
            summary["model"]["external_writes"] = float(written)
        return summary

    def evidence(self) -> Evidence:
        """What a judgement rests on: the recent past, merged, of this process's shards. Synchronises the device."""
        return evidence_of_past(self._history.past(), self._layout, self.info)

    def judgement(self) -> Judgement:
        """The run's health, in one word, a sentence, and the numbers behind it. Synchronises the device."""
        return judge(self.evidence())

    def __str__(self) -> str:
        if self._advice and self.step is None:
            return f"nothing is measured: {self._advice}"
        past = self._history.past()
        evidence = evidence_of_past(past, self._layout, self.info)
        return verdict(evidence, self.summary(), edq_change(past, self._layout))

    def __repr__(self) -> str:
        at = "not started" if self.step is None else f"at step {self.step}"
        return f"<Watch of {self.info.optimizer}, {len(self._watched())} layers, {at}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _steps_before_watch(self) -> int:
        """The first optimizer is about to take its first step: tell so, and return the steps taken before."""
        taken = 0
        try:
            self._governor.measure_next_step()
            first = self.options.first_step
            known = self._steps_taken() if first is None else first - 1
            taken = known or 0
            if known is None:
                # None: nobody knows which of the run's points these steps would hide.
                self._reporter = None
            if self._reporter is not None:
                self._reporter.started(taken + 1)
        except Exception as error:
            self._guard.caught("reading the step number", error)
        return taken

    def _steps_taken(self) -> int | None:
        """Steps taken before the first one watched; None: not known, and the run may show steps already."""
        counts = [largest_step_count(hooks.stepping) for hooks in self._hooks]
        if None not in counts:
            return max(count for count in counts if count is not None)
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

    def _report(self) -> None:
        try:
            with self._governor.timing():
                parts = [part for hooks in self._hooks for part in hooks.totals or ()]
                self._hand_over(self._union.of(parts, self._watched()))
        except Exception as error:
            self._guard.caught("reporting a step", error)
        for hooks in self._hooks:
            hooks.totals = None
        if self._governor.adjust():
            for hooks in self._hooks:
                hooks.meter.shrink_sample(int(self._governor.sample))

    def _hand_over(self, table: Table[Tensor]) -> None:
        put_off = self._last is None and len(self._union.layers) > _MANY_LAYERS
        if self._bytes_per_parameter is None and not put_off:
            self._bytes_per_parameter = bytes_per_parameter([hooks.stepping for hooks in self._hooks])
        scalars: dict[str, float | Tensor] = {
            "agent_cpu_seconds": self._governor.agent_cpu_seconds,
            "agent_overhead_ratio": self._governor.overhead_ratio,
            "agent_wall_seconds": self._governor.wall_seconds,
        }
        if self._governor.interval != self.options.every:
            scalars["agent_interval"] = float(self._governor.interval)
        if self._governor.sample != self.options.sample:
            scalars["agent_sample"] = float(self._governor.sample)
        restarts = sum(hooks.meter.oracle_restarts for hooks in self._hooks)
        if restarts:
            scalars["oracle_restarts"] = float(restarts)
        if self._bytes_per_parameter is not None:
            scalars["bytes_per_parameter"] = self._bytes_per_parameter
        written = external_writes([hooks.stepping for hooks in self._hooks])
        if written:
            scalars["external_writes"] = float(written)
        skipped = most_skipped(hooks.skipped for hooks in self._hooks)
        if skipped is not None:
            scalars["skipped_steps"] = skipped
        assert self.step is not None
        self._last = Measurement(self._current_layout(), self.step, time.time(), table.array, scalars)
        self._history.add(self._last)
        own_bytes = sum(hooks.meter.buffer_bytes() for hooks in self._hooks)
        # The watch and its history hold this step now, too.
        scalars["agent_memory_bytes"] = table.array.nbytes + self._history.bytes + own_bytes
        for hooks in self._hooks:
            if hooks.totals is not None:
                self._last_occasional.update(dict.fromkeys(hooks.meter.occasional, self._last))
        if self._reporter is not None:
            self._reporter.measured(self._last)

    def _watched(self) -> dict[str, WatchedParameter]:
        """All watched parameters by the names of their layers."""
        return {entry.name: entry for hooks in self._hooks for entry in hooks.meter.watched}

    def _current_layout(self) -> Layout:
        layout, lists = self._layout, [hooks.meter.watched for hooks in self._hooks]
        if (
            layout is None
            or any(then is not now for then, now in zip(self._laid_out, lists, strict=True))
            or len(layout.statistics) != len(self._union.statistics)
            or len(layout.layers) != len(self._union.layers)
            or self._failures != failures()
            or (layout.watch.intent != "before-after" and any(hooks.closure_seen for hooks in self._hooks))
        ):
            self._failures, self._laid_out = failures(), lists
            watched = self._watched()
            layers = tuple(watched[name].layer() for name in self._union.layers)
            layout = self._layout = Layout(layers, tuple(self._union.statistics), self.info)
        return layout


def _several(model: nn.Module, given: object) -> list[Optimizer | ForeignOptimizer]:
    """The optimizers that `watch` was given, each once."""
    if isinstance(given, Optimizer) or is_foreign(given):
        found: Any = [given]
    else:
        found = list(given.values()) if isinstance(given, Mapping) else given
    if (
        isinstance(found, str)
        or not isinstance(found, Sequence)
        or not found
        or not all(isinstance(entry, Optimizer) or is_foreign(entry) for entry in found)
    ):
        raise TypeError(
            f"optimizer={type(given).__name__}; pass the torch.optim.Optimizer that trains it, or several of them"
        )
    known = [only_passes_on(entry) or entry for entry in found]
    optimizers = [
        ForeignOptimizer(entry, model) if is_foreign(entry) else entry
        for entry in {id(entry): entry for entry in known}.values()
    ]
    stepped: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in (entry for group in optimizer.param_groups for entry in group["params"]):
            if stepped.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"optimizers {stepped[id(parameter)]} and {number} both step a parameter of shape "
                    f"{tuple(parameter.shape)}: give each of them its own watch"
                )
    return optimizers


def _nothing_to_watch(options: WatchOptions, left_out: list[str]) -> str:
    if left_out:
        return f"no parameter can be measured: {', '.join(left_out)}"
    if options.layers is not None:
        return (
            f"layers={options.layers!r} selects no parameter that the optimizer steps; see model.named_parameters()"
        )
    return "the optimizer steps no parameter; pass the optimizer that trains the model"
