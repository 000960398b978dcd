"""Watching a model's optimizer: hooks around its step, the measured steps, and the handle that the user holds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from collage_agent.description import bytes_per_parameter, describe
from collage_agent.governor import Governor
from collage_agent.guard import Guard
from collage_agent.intent.choose import choose_intent
from collage_agent.intent.clone import isolated
from collage_agent.measure import Meter
from collage_agent.measurement import Layout, Measurement, Reporter
from collage_agent.options import DEFAULTS, Exclude, WatchOptions
from collage_agent.parameters import watched_parameters
from collage_agent.scaling import SkippedSteps
from collage_agent.shards import Sharding, stepping_optimizer
from collage_agent.summary import summarise
from collage_agent.verdict import verdict
from collage_agent.whole import WholeTotals
from collage_agent.windows import Windows
from collage_monitor import wire

__all__ = ["Watch", "watch"]

_HOST: Final = torch.device("cpu")
_HOOKS_FILE: Final = torch_optimizer.__file__


def watch(
    model: nn.Module,
    optimizer: Optimizer,
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

    every: measure the steps divisible by it. sample: elements looked at in each tensor, or "all".
    layers: regular expression(s) of the names to watch, or `Exclude(...)`. strategy: the label that the user
    believes in. oracle: keep an fp64 optimizer running beside the live one. budget: the agent's CPU over the rest
    of the process's, None for no governor. windows: numbers of steps over which u is added up, in bursts that take
    about a quarter of the steps. first_step: number of the next step, None: read from the optimizer.
    reporter takes measurements away; seed and shard fix the sample; worker_cpu_seconds is what delivery has used.

    Costs a self-test of 5 to 35 ms for each kind of parameter group. Synchronises no device.

    Raises:
        TypeError, ValueError: an option that cannot be used, or a model or optimizer that is none.
    """
    options = WatchOptions(every, sample, layers, strategy, oracle, tuple(windows), budget, first_step)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}; pass the torch.nn.Module that is trained")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={type(optimizer).__name__}; pass the torch.optim.Optimizer that trains it")
    return Watch(model, optimizer, options, reporter, seed, shard, worker_cpu_seconds)


class Watch:
    """A watched optimizer: `remove()` ends it, `summary()` gives the numbers, printing it gives the verdict."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        options: WatchOptions,
        reporter: Reporter | None,
        seed: int,
        shard: int,
        worker_cpu_seconds: Callable[[], float] | None,
    ) -> None:
        self.options = options
        self._model = model
        self._optimizer = optimizer
        self._stepping = stepping_optimizer(optimizer)
        self._reporter = reporter
        self._guard = Guard()
        self._whole = WholeTotals(self._stepping, options)
        self._windows = Windows(options.windows, options.every) if options.windows else None
        self._governor = Governor(
            options.every,
            options.sample,
            options.budget,
            worker_cpu_seconds,
            whole=self._whole.possible,
            cycle=0 if self._windows is None else self._windows.schedule.cycle,
        )
        sharding = Sharding(model, optimizer)
        self._mixed_precision = sharding.mixed_precision
        watched, self._left_out = watched_parameters(model, self._stepping, options, sharding)
        if not watched and self._stepping is optimizer:
            raise ValueError(_nothing_to_watch(options, self._left_out))
        with self._governor.timing():
            self._intents = choose_intent(self._stepping)
        self._groups = _sizes_of(self._stepping)
        self._meter = Meter(
            watched,
            self._intents,
            options.sample,
            oracle=options.oracle,
            windows=self._windows,
            seed=seed,
            shard=shard,
        )
        self._skipped = SkippedSteps(optimizer)
        self._step: int | None = None
        self._depth = 0
        self._measuring = False
        self._closure_seen = False
        self._bytes_per_parameter: float | None = None
        self._layout: Layout | None = None
        self._last: Measurement | None = None
        self._rarer: dict[tuple[str, ...], Measurement] = {}
        # Where the user compiles the step, the hooks are called from compiled code and stay out of it.
        self._uncompiled_before = torch.compiler.disable(self._before)  # type: ignore[no-untyped-call]
        self._uncompiled_after = torch.compiler.disable(self._after)  # type: ignore[no-untyped-call]
        self._handles: list[Any] = [
            # A wrapper that shares out tensors copies them back after its inner optimizer's step.
            self._stepping.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._state_was_loaded),
        ]

    @property
    def step(self) -> int | None:
        """Number of the last completed optimizer step; None before the first under this watch."""
        return self._step

    @property
    def removed(self) -> bool:
        """Whether the watch has ended."""
        return not self._handles

    @property
    def info(self) -> wire.WatchInfo:
        """What is watched and how, as it travels."""
        return describe(
            self._stepping,
            self.options,
            self._meter.watched,
            self._intents,
            notes=self._notes(),
            closure=self._closure_seen,
        )

    def remove(self) -> None:
        """Stop watching: take the hooks off. Numbers measured so far stay; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._skipped.stop()

    def summary(self) -> dict[str, Any]:
        """{"step", "model": {key: value}, "layers": {name: {key: value}}} of the last measured step.

        Windows are those that ended last. Values are float or None (undefined); 95 % intervals stand beside theirs
        as NAME_low, NAME_high. Blocks until the step is finished: synchronises the device. This process's shards.
        """
        summary = summarise(self._last, self._rarer)
        skipped = self._skipped.count
        if skipped is not None:
            summary["model"]["skipped_steps"] = float(skipped)
        return summary

    def __str__(self) -> str:
        return verdict(self.summary(), self.info)

    def __repr__(self) -> str:
        at = "not started" if self._step is None else f"at step {self._step}"
        return f"<Watch of {type(self._optimizer).__name__}, {len(self._meter.watched)} layers, {at}>"

    def _repr_markdown_(self) -> str:
        return f"```text\n{self}\n```"

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            return self._uncompiled_before(optimizer, args, kwargs)  # type: ignore[no-any-return]
        return self._before(optimizer, args, kwargs)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._depth and _inside_own_step(optimizer):
            self._depth += 1
            return None
        # A depth left over from a step that raised is dropped here.
        self._depth = 1
        self._measuring = False
        self._skipped.called()
        if self._guard.disabled:
            return None
        if self._step is None:
            self._start(optimizer)
        assert self._step is not None
        interval = self._governor.interval
        measured = (self._step + 1) % interval == 0
        # The step before a measured one shows what a step takes that makes no totals.
        compared = self._governor.whole and (self._step + 2) % interval == 0
        if not (measured or compared or self.options.oracle or self._in_window()):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or self._closure_seen:
            self._look(optimizer, measured, closure is not None)
            return None
        looking = self._looking_after(closure, optimizer, measured)
        return ((args[0], looking, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": looking})

    def _looking_after(self, closure: Callable[[], Any], optimizer: Optimizer, measured: bool) -> Callable[[], Any]:
        """The closure, followed by the look that a step without one gets before it: the gradient is known then.

        An optimizer that evaluates it again moves the parameters between: that step is not measured, and from
        then on only what changed is.
        """
        evaluations = 0

        def evaluate() -> Any:
            nonlocal evaluations
            loss = closure()
            evaluations += 1
            if evaluations == 1:
                self._look(optimizer, measured, closure=False)
            else:
                self._closure_seen = True
                self._measuring = False
            return loss

        return evaluate

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._uncompiled_after(optimizer)
        else:
            self._after(optimizer)

    def _after(self, optimizer: Optimizer) -> None:
        if self._depth > 1:
            if _inside_own_step(optimizer):
                self._depth -= 1
                return
        elif not self._depth:
            return
        self._depth = 0
        if self._governor.whole:
            self._governor.spent(*self._whole.ended())
        if self._step is not None:
            self._step += 1
        if self._guard.disabled:
            return
        try:
            self._skipped.stepped(optimizer)
            self._meter.stepped()
        except Exception as error:
            self._guard.caught("looking at the optimizer after a step", error)
        if self._measuring:
            self._measuring = False
            self._measure(self._stepping)

    def _in_window(self) -> bool:
        assert self._step is not None
        windows = self._windows
        return windows is not None and bool(windows.schedule.covering(self._step + 1, self._governor.doublings))

    def _add_up(self, optimizer: Optimizer) -> None:
        if self._in_window():
            assert self._step is not None
            self._meter.add_up(optimizer, self._step + 1, self._governor.doublings)

    def _start(self, optimizer: Optimizer) -> None:
        self._step = 0
        try:
            first = self.options.first_step
            self._step = (_steps_taken(optimizer) if first is None else first - 1) or 0
            if self._reporter is not None:
                self._reporter.started(self._step + 1)
        except Exception as error:
            self._guard.caught("reading the step number", error)

    def _look(self, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        try:
            with self._governor.timing(), isolated(_device_of(self._meter)):
                if measured:
                    self._notice_new_groups(optimizer)
                if closure:
                    self._closure_seen = True
                else:
                    self._meter.follow(optimizer)
                    self._add_up(optimizer)
                if measured:
                    self._meter.before(optimizer, closure=closure)
                    self._measuring = True
        except Exception as error:
            self._guard.caught("looking at the optimizer before a step", error)
        if self._governor.whole:
            self._whole.begins(asked=self._measuring)

    def _measure(self, optimizer: Optimizer) -> None:
        try:
            with self._governor.timing():
                with isolated(_device_of(self._meter)):
                    totals = self._meter.after(optimizer, self._whole if self._governor.whole else None)
                self._hand_over(totals)
        except Exception as error:
            self._guard.caught("measuring a step", error)
        whole = self._governor.whole
        if self._governor.judge():
            self._meter.shrink_sample(int(self._governor.sample))
        if self._governor.whole != whole:
            self._layout = None

    def _hand_over(self, totals: Tensor) -> None:
        if self._bytes_per_parameter is None:
            self._bytes_per_parameter = bytes_per_parameter(self._stepping)
        scalars: dict[str, float | Tensor] = {
            "agent_cpu_seconds": self._governor.agent_cpu_seconds,
            "agent_overhead_ratio": self._governor.overhead_ratio,
            "agent_wall_seconds": self._governor.wall_seconds,
            "agent_memory_bytes": self._meter.kept_bytes(self._stepping),
        }
        if self._governor.interval != self.options.every:
            scalars["agent_interval"] = float(self._governor.interval)
        if self._governor.sample != self.options.sample:
            scalars["agent_sample"] = float(self._governor.sample)
        if self._bytes_per_parameter is not None:
            scalars["bytes_per_parameter"] = self._bytes_per_parameter
        skipped = self._skipped.count
        if skipped is not None:
            scalars["skipped_steps"] = skipped
        assert self._step is not None
        self._last = Measurement(self._current_layout(), self._step, time.time(), totals, scalars)
        for keys in self._meter.rarer:
            self._rarer[keys] = self._last
        if self._reporter is not None:
            self._reporter.measured(self._last)

    def _current_layout(self) -> Layout:
        layout = self._layout
        if (
            layout is None
            or len(layout.statistics) != len(self._meter.statistics)
            or len(layout.layers) != len(self._meter.watched)
            or (self._closure_seen and layout.watch.intent != "before-after")
        ):
            layers = tuple(watched.layer() for watched in self._meter.watched)
            layout = self._layout = Layout(layers, tuple(self._meter.statistics), self.info)
        return layout

    def _notice_new_groups(self, optimizer: Optimizer) -> None:
        sizes = _sizes_of(optimizer)
        if sizes == self._groups:
            return
        self._groups = sizes
        self._intents = choose_intent(optimizer)
        known = {id(watched.parameter) for watched in self._meter.watched}
        sharding = Sharding(self._model, self._optimizer)
        found, self._left_out = watched_parameters(self._model, optimizer, self.options, sharding)
        self._meter.extend([watched for watched in found if id(watched.parameter) not in known], self._intents)

    def _state_was_loaded(self, optimizer: Optimizer) -> None:
        self._meter.restart_oracle()
        if self._windows is not None:
            self._windows.drop()

    def _notes(self) -> list[str]:
        notes = [f"left out: {', '.join(self._left_out)}"] if self._left_out else []
        if self._stepping is not self._optimizer:
            notes.append(f"tensors are shared out over ranks by {type(self._optimizer).__name__}")
        if self._mixed_precision:
            cast = ", ".join(self._mixed_precision)
            notes.append(
                f"shards are cast to {cast} for the forward pass, after the step: that rounding is not seen"
            )
        if self._governor.whole:
            notes.append("updates are counted over whole tensors, inside the step")
        elif self._whole.possible:
            notes.append(
                "updates are counted on the sample: over whole tensors they would cost more than the budget"
            )
        return [*notes, self._guard.reason] if self._guard.disabled else notes


def _inside_own_step(optimizer: Optimizer) -> bool:
    """Whether the hook that asks runs inside a hooked step that another hooked step of the optimizer called.

    The frames say so: a counter alone would stay up after a step that raised.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name == "wrapper"
            and code.co_filename == _HOOKS_FILE
            and frame.f_locals.get("self") is optimizer
        ):
            steps += 1
        frame = frame.f_back
    return steps > 1


def _steps_taken(optimizer: Optimizer) -> int:
    """The largest `step` in the optimizer's state. Synchronises, once, a device on which it is kept."""
    steps = [state.get("step", 0) for state in optimizer.state.values() if isinstance(state, dict)]
    return max((int(step.max().item()) if isinstance(step, Tensor) else int(step) for step in steps), default=0)


def _sizes_of(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def _device_of(meter: Meter) -> torch.device:
    return meter.watched[0].parameter.device if meter.watched else _HOST


def _nothing_to_watch(options: WatchOptions, left_out: list[str]) -> str:
    if left_out:
        return f"no parameter can be measured: {', '.join(left_out)}"
    if options.layers is not None:
        return (
            f"layers={options.layers!r} selects no parameter that the optimizer steps; see model.named_parameters()"
        )
    return "the optimizer steps no parameter; pass the optimizer that trains the model"
