"""One optimizer under a watch: the hooks around its step, what is looked at before it and measured after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from collage_agent.guard import Guard
from collage_agent.intent.choose import Intents, choose_intent
from collage_agent.intent.clone import isolated
from collage_agent.measure.meter import Meter
from collage_agent.measure.windows import Windows
from collage_agent.options import WatchOptions
from collage_agent.training.parameters import WatchedParameter, watched_parameters
from collage_agent.training.scaling import SkippedSteps
from collage_agent.training.shards import Sharding, stepping_optimizer
from collage_agent.training.subgroups import SubGroup
from collage_agent.watching.description import describe
from collage_agent.watching.governor import Governor
from collage_agent.watching.iterations import Iterations
from collage_monitor import wire
from collage_monitor.table import Table

__all__ = ["OptimizerHooks", "steps_taken"]

_HOST: Final = torch.device("cpu")
_HOOKS_FILE: Final = torch_optimizer.__file__
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerHooks:
    """One optimizer under a watch. `totals` are those of its last measured step, until somebody takes them.

    `number` tells it from the others that the watch has; `named` are the layers of all of them so far. With a
    `sub_group` it is one of those that the optimizer steps in turn, and is made while that one is shown.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        options: WatchOptions,
        governor: Governor,
        guard: Guard,
        intents: Intents,
        *,
        number: int,
        named: dict[str, None],
        seed: int,
        shard: int,
        sub_group: SubGroup | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.stepping = stepping_optimizer(optimizer)
        self.options = options
        self.totals: list[Table[Tensor]] | None = None
        self.closure_seen = False
        self._model = model
        self._number = number
        self._named = named
        self._sub_group = sub_group
        self._governor = governor
        self._guard = guard
        sharding = Sharding(model, optimizer, sub_group)
        self._mixed_precision = sharding.mixed_precision
        watched, self.left_out = watched_parameters(model, self.stepping, options, sharding)
        with governor.timing():
            self._chosen = intents.of(self.stepping)
        self._groups = _sizes_of(self.stepping)
        self._windows = Windows(options.windows, options.every) if options.windows else None
        self._entered = 0
        self.meter = Meter(
            _apart(watched, number, named),
            self._chosen,
            options.sample,
            oracle=options.oracle,
            windows=self._windows,
            seed=seed,
            shard=shard,
        )
        self.skipped = SkippedSteps(optimizer)
        self._iterations: Iterations | None = None
        self._depth = 0
        self._measuring = False
        # Where the user compiles the step, the hooks are called from compiled code and stay out of it.
        self._uncompiled_before = torch.compiler.disable(self._before)  # type: ignore[no-untyped-call]
        self._uncompiled_after = torch.compiler.disable(self._after)  # type: ignore[no-untyped-call]
        self._handles: list[Any] = []

    def begin(self, iterations: Iterations) -> None:
        """Take part in these iterations from the next step on."""
        self._iterations = iterations
        self._handles = [
            # A wrapper that shares out tensors copies them back after its inner optimizer's step.
            self.stepping.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
            self.optimizer.register_load_state_dict_post_hook(self._state_was_loaded),
        ]

    @property
    def removed(self) -> bool:
        """Whether the hooks are off."""
        return not self._handles

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.skipped.stop()

    def info(self, notes: Sequence[str]) -> wire.WatchInfo:
        """What is watched of this optimizer and how, as it travels."""
        return describe(
            self.stepping,
            self.options,
            self.meter.watched,
            self._chosen,
            notes=[*self._notes(), *notes],
            closure=self.closure_seen,
        )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        if torch.compiler.is_compiling():
            return self._uncompiled_before(optimizer, args, kwargs)  # type: ignore[no-any-return]
        return self._before(optimizer, args, kwargs)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if self._sub_group is not None and not self._sub_group.steps(optimizer):
            self.skipped.called()
            return None
        if self._depth and _inside_own_step(optimizer):
            self._depth += 1
            return None
        if self._depth:
            # Left over from a step that raised.
            self.meter.broken_off()
        self._depth = 1
        self._measuring = False
        self.skipped.called()
        if self._guard.disabled or self._iterations is None:
            return None
        step = self._entered = self._iterations.entered(self._number)
        measured = step % self._governor.interval == 0
        if not (measured or self.options.oracle or self._in_window()):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or self.closure_seen:
            self._look(optimizer, measured, closure is not None)
            return None
        looking = self._looking_after(closure, optimizer, measured)
        return ((args[0], looking, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": looking})

    def _in_window(self) -> bool:
        """Whether u of the step that is about to be taken is added up."""
        windows = self._windows
        return windows is not None and bool(windows.schedule.covering(self._entered, self._governor.doublings))

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
                self.closure_seen = True
                self._measuring = False
            return loss

        return evaluate

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._uncompiled_after(optimizer)
        else:
            self._after(optimizer)

    def _after(self, optimizer: Optimizer) -> None:
        if self._sub_group is not None and not self._sub_group.steps(optimizer):
            return
        if self._depth > 1:
            if _inside_own_step(optimizer):
                self._depth -= 1
                return
        elif not self._depth:
            return
        self._depth = 0
        assert self._iterations is not None
        if not self._guard.disabled:
            try:
                self.skipped.stepped(optimizer)
                self.meter.stepped()
            except Exception as error:
                self._guard.caught("looking at the optimizer after a step", error)
            if self._measuring:
                self._measuring = False
                self._measure()
        self._iterations.stepped(self._number)

    def _look(self, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        try:
            with self._governor.timing(), isolated(_device_of(self.meter)):
                if measured:
                    self._notice_new_groups(optimizer)
                if closure:
                    self.closure_seen = True
                else:
                    self.meter.follow(optimizer)
                    if self._in_window():
                        self.meter.add_up(optimizer, self._entered, self._governor.doublings)
                if measured:
                    self.meter.before(optimizer, closure=closure)
                    self._measuring = True
        except Exception as error:
            self._guard.caught("looking at the optimizer before a step", error)

    def _measure(self) -> None:
        assert self._iterations is not None
        try:
            with self._governor.timing(), isolated(_device_of(self.meter)):
                self.totals = self.meter.after(self.stepping, counterfactuals=self._governor.rarely(self._entered))
            self._iterations.measured = True
        except Exception as error:
            self._guard.caught("measuring a step", error)

    def _notice_new_groups(self, optimizer: Optimizer) -> None:
        sizes = _sizes_of(optimizer)
        if sizes == self._groups:
            return
        self._groups = sizes
        self._chosen = choose_intent(optimizer)
        known = {id(watched.parameter) for watched in self.meter.watched}
        found, self.left_out = watched_parameters(
            self._model, optimizer, self.options, Sharding(self._model, self.optimizer, self._sub_group)
        )
        new = [watched for watched in found if id(watched.parameter) not in known]
        self.meter.extend(_apart(new, self._number, self._named), self._chosen)

    def _state_was_loaded(self, optimizer: Optimizer) -> None:
        self.meter.state_was_loaded()

    def _notes(self) -> list[str]:
        notes = [f"left out: {', '.join(self.left_out)}"] if self.left_out else []
        if self.stepping is not self.optimizer:
            notes.append(f"tensors are shared out over ranks by {type(self.optimizer).__name__}")
        if self._mixed_precision:
            cast = ", ".join(self._mixed_precision)
            notes.append(
                f"shards are cast to {cast} for the forward pass, after the step: that rounding is not seen"
            )
        return notes


def _apart(watched: Sequence[WatchedParameter], number: int, named: dict[str, None]) -> list[WatchedParameter]:
    """Parameters under names that nobody has yet: those that no module knows are called alike."""
    found = [
        replace(entry, name=f"optimizer{number}.{entry.name}") if entry.name in named else entry
        for entry in watched
    ]
    named.update((entry.name, None) for entry in found)
    return found


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


def steps_taken(optimizer: Optimizer) -> int:
    """The largest `step` in the optimizer's state. Synchronises, once, a device on which it is kept."""
    steps = [state.get("step", 0) for state in optimizer.state.values() if isinstance(state, dict)]
    return max((int(step.max().item()) if isinstance(step, Tensor) else int(step) for step in steps), default=0)


def _sizes_of(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def _device_of(meter: Meter) -> torch.device:
    return meter.watched[0].parameter.device if meter.watched else _HOST
