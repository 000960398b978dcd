"""The handle that `watch` gives the user.

`session.py` makes it for a run, tests without one. It finds the optimizers, makes the parts of `watching/` that
measure them, and gives what they measure to a `Reporter`. It knows no run: `session.py` joins the two. The public
methods of a `Watch` are fixed (`tests/agent/test_watch.py`; the documented methods: `tests/docs/test_api.py`).
`look`, `join`, `parameters`, `skipped_so_far`, `came_through` and `compare_with_saved` are for the agent, `_last`
is for tests.
"""

from __future__ import annotations

import dataclasses
import html
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from torch.optim.optimizer import Optimizer

from collage_agent.error_guard import Guard
from collage_agent.intent.foreign_optimizers import ForeignOptimizer, contained, is_foreign, unwrapped
from collage_agent.intent.intent_choice import IntentCache
from collage_agent.measurement import Layout, Measurement, Reporter
from collage_agent.sample.stored_parts import PLAIN_TENSORS
from collage_agent.step.windows import WindowSchedule
from collage_agent.training.deepspeed import SubGroup, showing_only, sub_groups
from collage_agent.training.watched_parameters import WatchedParameter
from collage_agent.watch_options import WatchArguments, WatchOptions, checked_options
from collage_agent.watching.assembly import Assembly
from collage_agent.watching.average_watch import AverageWatch
from collage_agent.watching.governor import Governor
from collage_agent.watching.hooks import OptimizerHooks
from collage_agent.watching.iterations import BackwardSteps, Iterations
from collage_agent.watching.resume_check import ResumeCheck
from collage_agent.watching.saved_numbers import SavedNumbers
from collage_agent.watching.watch_texts import evidence_of_past, judgement_text, summarise
from collage_monitor import wire
from collage_monitor.diagnosis import Evidence, judge
from collage_monitor.forecast import Forecast, ForecastError, forecast_strategies
from collage_monitor.schedule import schedule_of

__all__ = ["Optimizers", "Watch", "watch"]

Optimizers = Any
"""What `watch` takes: an optimizer, or several over different parameters (a sequence, or a mapping's values).

An optimizer of another make, or a function that takes the step, is measured between `before` and `after`.
"""
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
    """Measure how the optimizer's updates arrive, from its next step on; see `collage_agent.watch`.

    Several optimizers count iterations instead of steps: one is over when each has stepped, or when one of them
    steps again. reporter takes the measurements; seed fixes the sample; worker_cpu_seconds is the CPU time of
    delivery. last_step_shown is called if an optimizer keeps no count of its steps: see `Run.last_step_shown`.
    Costs a self-test of 20 to 400 ms for each kind of parameter group. Synchronises no device.

    Raises:
        TypeError, ValueError: an option that cannot be used, or a model or optimizer that is none.
    """
    checked = checked_options(**options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}; pass the torch.nn.Module, then its optimizer")
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
        self.model = model
        self.options = options
        self.optimizers = optimizers
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
        self._assembly = Assembly(self._hooks, options, self._governor, self._guard, reporter, last_step_shown)
        # While the hooks are on, the watch lives, also where the training keeps no handle: a later run reports it.
        self._assembly.watch = self
        self._iterations = Iterations(len(self._hooks), self._steps_before, self._assembly.take)
        for hooks in self._hooks:
            hooks.begin(self._iterations)
        self._intents, self._seed, self._of_optimizers = intents, seed, tuple(self._hooks)
        self._backward = BackwardSteps(
            [
                own.parameter
                for hooks in self._hooks
                for own in hooks.measurer.watched
                if _may_be_released(hooks, own)
            ],
            self._one_each,
            self._together,
            self._iterations.end,
            self._guard.caught,
        )
        self._backward.look()
        self._advice = "; ".join(own.advice for own in optimizers if isinstance(own, ForeignOptimizer))
        if self._advice:
            _LOG.warning("%s", self._advice)

    def _steps_before(self) -> int:
        """The first step is about to be taken: if not in the backward pass, none will be."""
        if not self._backward.seen:
            self._backward.begins_outside()
        return self._assembly.steps_before()

    def _one_each(self) -> dict[int, OptimizerHooks]:
        """Parameters turn out to be stepped one by one: from now on each is measured by itself."""
        members: dict[int, OptimizerHooks] = {}
        names, intents = dict[str, None](), self._intents.of_unknown_rounding()
        kept = [
            hooks for hooks in self._hooks if not any(_may_be_released(hooks, own) for own in _watched_by(hooks))
        ]
        for hooks in self._hooks:
            for own in _watched_by(hooks) if hooks not in kept else ():
                options = dataclasses.replace(self.options, layers=rf"\A{re.escape(own.name)}\Z")
                member = OptimizerHooks(
                    self.model,
                    hooks.optimizer,
                    options,
                    self._governor,
                    self._guard,
                    intents,
                    number=len(members),
                    names_used=names,
                    seed=self._seed,
                )
                member.seen_by, member.resume = "backward", ResumeCheck(alone=True)
                members[id(own.parameter)] = member
            if hooks not in kept:
                hooks.remove()
        self._take_turns([*kept, *members.values()])
        return members

    def _together(self) -> None:
        """They are not: each optimizer steps its parameters, as before."""
        if all(hooks.removed or hooks.seen_by == "backward" for hooks in self._hooks):
            self._iterations.step = None
        for hooks in self._hooks:
            if hooks.seen_by == "backward":
                hooks.remove()
        self._take_turns(self._of_optimizers)

    def _take_turns(self, hooks: Sequence[OptimizerHooks]) -> None:
        self._hooks[:] = hooks
        self._iterations.members = len(hooks)
        for own in hooks:
            if own.removed:
                own.begin(self._iterations)

    def before(self) -> None:
        """Announce a step, with final gradients, of an optimizer that calls no torch hooks.

        No-op if the torch optimizer's hooks are called: they do this. A replayed CUDA graph calls
        none: once that is known, its steps are measured here. Synchronises nothing, and never raises.
        """
        for hooks in self._hooks if not self._backward.seen else ():
            hooks.before_by_hand()

    def after(self) -> None:
        """Say that the step announced by `before` has been taken; it is measured if it is due."""
        for hooks in self._hooks if not self._backward.seen else ():
            hooks.after_by_hand()

    def look(self) -> Layout | None:
        """Look for steps that the hooks do not see, and report them once; see `UnseenSteps`.

        Returns the new layout for the run; None without news, or on any thread but the one that watches.
        Synchronises nothing.
        """
        if not self.removed:
            self._backward.look()
        found = [hooks.look_for_unseen_steps() for hooks in self._hooks]
        return self._assembly.layout_after_look() if any(found) else None

    @property
    def averages(self) -> list[AverageWatch]:
        """The averages of these weights that are reported with each measured step, found or passed: one at most."""
        return [average for average in self._assembly.averages if not average.removed]

    @property
    def parameters(self) -> frozenset[int]:
        """Identities of the watched parameters."""
        return frozenset(id(entry.parameter) for entry in self._assembly.watched.values())

    def join(self, average: AverageWatch) -> Governor | None:
        """Report an average of these weights from now on, and return the bounds of its cost; None if another
        average is reported already.

        One that was passed takes the place of one that was found.
        """
        known = self.averages
        if known and (average.found or not known[0].found):
            return None
        for other in known:
            other.remove()
        self._assembly.averages = [average]
        return self._governor

    def came_through(self, door: wire.Door) -> Watch:
        """Say which framework attached it: lines to paste are of its kind. Returns the watch."""
        self._assembly.door = door
        return self

    def compare_with_saved(self, folder: Path) -> None:
        """Keep summaries of checkpoints there, and compare this launch's start with them."""
        for number, hooks in enumerate(self._hooks):
            hooks.saved.numbers = SavedNumbers(folder / f"{number}.msgpack")

    @property
    def step(self) -> int | None:
        """Number of the last completed optimizer step; None before the first under this watch."""
        return self._iterations.step

    @property
    def _last(self) -> Measurement | None:
        return self._assembly.last

    @property
    def skipped_so_far(self) -> float:
        """Steps that a loss scaler skipped, known without waiting, if none was measured yet."""
        return self._assembly.skipped_so_far

    @property
    def removed(self) -> bool:
        """Whether the watch has ended."""
        return self._hooks[0].removed

    @property
    def info(self) -> wire.WatchInfo:
        """The description of the watch in wire form."""
        return self._assembly.info

    def remove(self) -> None:
        """Stop watching: take the hooks off. Numbers measured so far stay; safe to call twice."""
        for hooks in self._hooks:
            hooks.remove()
        self._backward.stop()
        self._iterations.end()
        for average in self.averages:
            average.watch_removed()

    def summary(self) -> dict[str, Any]:
        """{"step", "model": {key: value}, "layers": {name: {key: value}}} of the last measured step.

        Windows and counterfactuals are the last ones. Values are float or None (undefined); 95 % intervals stand
        beside theirs as NAME_low, NAME_high. Blocks until the step is finished: synchronises the device. This
        process's shards only. Never raises: numbers that cannot be read are left out.
        """
        return self._guard.answer("summary", self._summary, {"step": self.step, "model": {}, "layers": {}})

    def _summary(self) -> dict[str, Any]:
        assembly = self._assembly
        summary = summarise(assembly.last, assembly.last_occasional)
        if assembly.skipped_steps is not None:
            summary["model"]["skipped_steps"] = float(assembly.skipped_steps)
        if assembly.external_writes:
            summary["model"]["external_writes"] = float(assembly.external_writes)
        return summary

    def evidence(self) -> Evidence:
        """The evidence for a judgement: the merged recent past of this process's shards. Synchronises the
        device."""
        skipped = float(self._assembly.skipped_steps or 0.0)
        found = evidence_of_past(self._assembly.history.past(), self._assembly.layout, self.info, skipped)
        return dataclasses.replace(found, logged=getattr(self._reporter, "losses_not_finite", dict)())

    def judgement(self) -> wire.Judgement:
        """The run's health: one word, a sentence, and the numbers behind it. Synchronises the device."""
        return judge(self.evidence())

    def forecast(self, schedule: str | Callable[[int], float], steps: int | None = None) -> Forecast:
        """Forecast of the step from which this run, and other strategies in its place, lose updates; print it.

        schedule: of the learning rate over the whole run, "cosine:3e-4:100:10000" (see
        `collage_monitor.schedule.parse_schedule`), or a function from the step, from 1, to the rate, with the
        `steps` of the run. Groups with other rates are taken to follow it in proportion. Covers this process's
        shards only. Blocks until the last measured step is finished: synchronises the device.

        Raises:
            ValueError: no schedule.
            ForecastError: too few steps were measured, or no weights in bfloat16 or float16.
        """
        planned, info = schedule_of(schedule, steps), self.info
        record = self._assembly.history.grids(info.shown_strategy)
        if record is None:
            raise ForecastError("no step with a known update was measured yet: train some steps first")
        return forecast_strategies(record, planned)

    def __str__(self) -> str:
        unknown = f"step {self.step}: what was measured cannot be read; the log of collage_agent says why"
        return self._guard.answer("print", self._text, unknown)

    def _text(self) -> str:
        if self._advice and self.step is None:
            return f"nothing is measured: {self._advice}"
        return judgement_text(self.evidence(), self.summary())

    def __repr__(self) -> str:
        at = "not started" if self.step is None else f"at step {self.step}"
        optimizer = self._guard.answer("repr", lambda: self.info.optimizer, "unknown optimizers")
        return f"<Watch of {optimizer}, {len(self._assembly.watched)} layers, {at}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _watched_by(hooks: OptimizerHooks) -> list[WatchedParameter]:
    return [own for own in hooks.measurer.watched if own.stepped]


def _may_be_released(hooks: OptimizerHooks, own: WatchedParameter) -> bool:
    """Whether the optimizer, which steps several parameters, may step this one by itself in the backward pass."""
    whole = type(own.parameter) in PLAIN_TENSORS and own.parameter.is_leaf and own.parameter.requires_grad
    return whole and own.stepped and hooks.foreign is None and len(_watched_by(hooks)) > 1


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
    known = [one for entry in found for one in contained(entry) or [unwrapped(entry) or entry]]
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
