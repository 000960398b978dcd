"""Watching a model's optimizers: one report for each measured iteration, and the handle that the user holds."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.totals import TableUnion
from collage_agent.guard import Guard
from collage_agent.intent.choose import Intents
from collage_agent.measure.windows import WindowSchedule
from collage_agent.measurement import Layout, Measurement, Reporter
from collage_agent.options import DEFAULTS, Exclude, WatchOptions
from collage_agent.training.parameters import WatchedParameter
from collage_agent.training.scaling import most_skipped
from collage_agent.training.subgroups import SubGroup, shown, sub_groups
from collage_agent.watching.description import bytes_per_parameter, joined
from collage_agent.watching.governor import Governor
from collage_agent.watching.hooks import OptimizerHooks, steps_taken
from collage_agent.watching.iterations import Iterations
from collage_agent.watching.verdict import summarise, verdict
from collage_monitor import wire
from collage_monitor.table import Table

__all__ = ["Optimizers", "Watch", "watch"]

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer]
"""What `watch` takes: an optimizer, or several over different parameters, such as one for each parameter."""


def watch(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int = DEFAULTS["every"],
    sample: int | Literal["all"] = DEFAULTS["sample"],
    layers: str | Sequence[str] | Exclude | None = DEFAULTS["layers"],
    strategy: str | None = DEFAULTS["strategy"],
    oracle: bool = DEFAULTS["oracle"],
    windows: tuple[int, ...] = DEFAULTS["windows"],
    budget: float | None = DEFAULTS["budget"],
    first_step: int | None = DEFAULTS["first_step"],
    reporter: Reporter | None = None,
    seed: int = 0,
    shard: int = 0,
    worker_cpu_seconds: Callable[[], float] | None = None,
) -> Watch:
    """Measure what becomes of the optimizer's updates, from its next step on, without changing the training.

    optimizer: one, or several over different parameters, in a sequence or as the values of a mapping. Several count
    iterations instead of steps: one is over when each has stepped, or when one of them steps again.
    every: measure the steps divisible by it. sample: elements looked at in each tensor, or "all".
    layers: regular expression(s) of the names to watch, or `Exclude(...)`. strategy: the label that the user
    believes in. oracle: keep an fp64 optimizer running beside the live one. budget: the agent's CPU over the rest
    of the process's, None for no governor. windows: numbers of steps over which u is added up, in bursts that take
    about a quarter of the steps. first_step: number of the next step, None: read from the optimizer.
    reporter takes measurements away; seed and shard fix the sample; worker_cpu_seconds is what delivery has used.

    Costs a self-test of 20 to 400 ms for each kind of parameter group. Synchronises no device.

    Raises:
        TypeError, ValueError: an option that cannot be used, or a model or optimizer that is none.
    """
    options = WatchOptions(every, sample, layers, strategy, oracle, tuple(windows), budget, first_step)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}; pass the torch.nn.Module that is trained")
    return Watch(model, _several(optimizer), options, reporter, seed, shard, worker_cpu_seconds)


class Watch:
    """Watched optimizers: `remove()` ends it, `summary()` gives the numbers, printing it gives the verdict."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: WatchOptions,
        reporter: Reporter | None,
        seed: int,
        shard: int,
        worker_cpu_seconds: Callable[[], float] | None,
    ) -> None:
        self.options = options
        self._reporter = reporter
        self._guard = Guard()
        cycle = WindowSchedule(options.windows, options.every).cycle
        self._governor = Governor(options.every, options.sample, options.budget, worker_cpu_seconds, cycle=cycle)
        self._attached: list[OptimizerHooks] = []
        intents, names = Intents(), dict[str, None]()
        # Sub-groups that an optimizer steps in turn are like several optimizers: one iteration, one report.
        parts: list[tuple[Optimizer, SubGroup | None]] = []
        for optimizer in optimizers:
            parts += [(optimizer, part) for part in sub_groups(model, optimizer)] or [(optimizer, None)]
        for number, (optimizer, part) in enumerate(parts):
            with shown(optimizer, part):
                attached = OptimizerHooks(
                    model,
                    optimizer,
                    options,
                    self._governor,
                    self._guard,
                    intents,
                    number=number,
                    named=names,
                    seed=seed,
                    shard=shard,
                    sub_group=part,
                )
            self._attached.append(attached)
        if not names and all(attached.stepping is attached.optimizer for attached in self._attached):
            raise ValueError(_nothing_to_watch(options, [name for own in self._attached for name in own.left_out]))
        self._union = TableUnion()
        self._bytes_per_parameter: float | None = None
        self._layout: Layout | None = None
        self._last: Measurement | None = None
        self._last_occasional: dict[tuple[str, ...], Measurement] = {}
        self._iterations = Iterations(len(self._attached), self._begun, self._report)
        for attached in self._attached:
            attached.begin(self._iterations)

    @property
    def step(self) -> int | None:
        """Number of the last completed optimizer step; None before the first under this watch."""
        return self._iterations.step

    @property
    def removed(self) -> bool:
        """Whether the watch has ended."""
        return self._attached[0].removed

    @property
    def info(self) -> wire.WatchInfo:
        """What is watched and how, as it travels."""
        notes = [self._guard.reason] if self._guard.disabled else []
        return joined([attached.info(notes) for attached in self._attached])

    def remove(self) -> None:
        """Stop watching: take the hooks off. Numbers measured so far stay; safe to call twice."""
        for attached in self._attached:
            attached.remove()
        self._iterations.end()

    def summary(self) -> dict[str, Any]:
        """{"step", "model": {key: value}, "layers": {name: {key: value}}} of the last measured step.

        Windows and counterfactuals are the last ones. Values are float or None (undefined); 95 % intervals stand
        beside theirs as NAME_low, NAME_high. Blocks until the step is finished: synchronises the device. This
        process's shards only.
        """
        summary = summarise(self._last, self._last_occasional)
        skipped = most_skipped(attached.skipped for attached in self._attached)
        if skipped is not None:
            summary["model"]["skipped_steps"] = float(skipped)
        return summary

    def __str__(self) -> str:
        return verdict(self.summary(), self.info)

    def __repr__(self) -> str:
        at = "not started" if self.step is None else f"at step {self.step}"
        return f"<Watch of {self.info.optimizer}, {len(self._watched())} layers, {at}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _begun(self) -> int:
        """The first optimizer is about to take its first step: the number of the last one before it."""
        taken = 0
        try:
            first = self.options.first_step
            steps = (
                [steps_taken(attached.stepping) for attached in self._attached] if first is None else [first - 1]
            )
            taken = max(steps)
            if self._reporter is not None:
                self._reporter.started(taken + 1)
        except Exception as error:
            self._guard.caught("reading the step number", error)
        return taken

    def _report(self) -> None:
        try:
            with self._governor.timing():
                parts = [part for attached in self._attached for part in attached.totals or ()]
                self._hand_over(self._union.of(parts, self._watched()))
        except Exception as error:
            self._guard.caught("reporting a step", error)
        for attached in self._attached:
            attached.totals = None
        if self._governor.judge():
            for attached in self._attached:
                attached.meter.shrink_sample(int(self._governor.sample))

    def _hand_over(self, table: Table[Tensor]) -> None:
        if self._bytes_per_parameter is None:
            self._bytes_per_parameter = bytes_per_parameter([attached.stepping for attached in self._attached])
        scalars: dict[str, float | Tensor] = {
            "agent_cpu_seconds": self._governor.agent_cpu_seconds,
            "agent_overhead_ratio": self._governor.overhead_ratio,
            "agent_wall_seconds": self._governor.wall_seconds,
            "agent_memory_bytes": sum(own.meter.kept_bytes(own.stepping) for own in self._attached),
        }
        if self._governor.interval != self.options.every:
            scalars["agent_interval"] = float(self._governor.interval)
        if self._governor.sample != self.options.sample:
            scalars["agent_sample"] = float(self._governor.sample)
        restarts = sum(own.meter.oracle_restarts for own in self._attached)
        if restarts:
            scalars["oracle_restarts"] = float(restarts)
        if self._bytes_per_parameter is not None:
            scalars["bytes_per_parameter"] = self._bytes_per_parameter
        skipped = most_skipped(attached.skipped for attached in self._attached)
        if skipped is not None:
            scalars["skipped_steps"] = skipped
        assert self.step is not None
        self._last = Measurement(self._current_layout(), self.step, time.time(), table.array, scalars)
        for attached in self._attached:
            if attached.totals is not None:
                self._last_occasional.update(dict.fromkeys(attached.meter.occasional, self._last))
        if self._reporter is not None:
            self._reporter.measured(self._last)

    def _watched(self) -> dict[str, WatchedParameter]:
        """All watched parameters by the names of their layers."""
        return {entry.name: entry for attached in self._attached for entry in attached.meter.watched}

    def _current_layout(self) -> Layout:
        layout = self._layout
        if (
            layout is None
            or len(layout.statistics) != len(self._union.statistics)
            or len(layout.layers) != len(self._union.layers)
            or (layout.watch.intent != "before-after" and any(own.closure_seen for own in self._attached))
        ):
            watched = self._watched()
            layers = tuple(watched[name].layer() for name in self._union.layers)
            layout = self._layout = Layout(layers, tuple(self._union.statistics), self.info)
        return layout


def _several(given: object) -> list[Optimizer]:
    """The optimizers that `watch` was given, each once."""
    if isinstance(given, Optimizer):
        return [given]
    found = list(given.values()) if isinstance(given, Mapping) else given
    if not isinstance(found, Sequence) or not found or not all(isinstance(entry, Optimizer) for entry in found):
        raise TypeError(
            f"optimizer={type(given).__name__}; pass the torch.optim.Optimizer that trains it, or several of them"
        )
    optimizers: list[Optimizer] = list(dict.fromkeys(found))
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
