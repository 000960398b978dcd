"""The hooks around one optimizer's step: values are gathered before it, the step is measured after it.

`handle.py` makes one for each optimizer, and removes it. It decides when to measure; `step/measurer.py` does
it. It raises nothing and leaves weights, states and random numbers as they are
(`tests/agent/test_bit_identity.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from collage_agent.error_guard import Guard
from collage_agent.intent.foreign_optimizers import ForeignOptimizer
from collage_agent.intent.intent_choice import IntentCache, fitting_class
from collage_agent.intent.optimizer_clone import isolated
from collage_agent.step.measurer import StepMeasurer
from collage_agent.step.rotation import intents_on_this_rank
from collage_agent.step.windows import Windows
from collage_agent.training.ddp import stepping_optimizer
from collage_agent.training.deepspeed import SubGroup
from collage_agent.training.shards import Sharding
from collage_agent.training.skipped_steps import SkippedSteps
from collage_agent.training.watched_parameters import (
    WatchedParameter,
    regrouped,
    watched_parameters,
    with_unique_names,
)
from collage_agent.watch_options import WatchOptions
from collage_agent.watching.governor import Governor
from collage_agent.watching.iterations import Iterations, inside_own_step, makes_states_only
from collage_agent.watching.resume_check import ResumeCheck
from collage_agent.watching.saved_numbers import CheckpointComparison
from collage_agent.watching.unseen_steps import NOTES, SeenBy, UnseenSteps
from collage_agent.watching.watch_description import describe, notes_on
from collage_monitor import wire
from collage_monitor.totals_table import Table

__all__ = ["OptimizerHooks", "is_watched"]

_LOGGER = logging.getLogger("collage_agent")
_IS_META: Final = attrgetter("is_meta")
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerHooks:
    """The hooks on one watched optimizer. `totals`: of the last measured step, until the watch takes them.

    `number` is the optimizer's place in its watch; `names_used` holds the layer names used so far in that watch.
    With a `sub_group` the hooks cover only that part of the optimizer, and must be made while it is shown.

    A step is the outermost pair of calls of its hooks: `_depth` counts those inside each other, as a wrapper or a
    closure takes them. It is 0 between steps; where it is not at the next step, a step has raised.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | ForeignOptimizer,
        options: WatchOptions,
        governor: Governor,
        guard: Guard,
        intents: IntentCache,
        *,
        number: int,
        names_used: dict[str, None],
        seed: int,
        sub_group: SubGroup | None = None,
    ) -> None:
        self.foreign = optimizer if isinstance(optimizer, ForeignOptimizer) else None
        # A foreign optimizer has parameter groups and states too; nothing else is read from it.
        self.optimizer = cast(Optimizer, optimizer)
        self.stepping = stepping_optimizer(self.optimizer)
        self.options = options
        self.totals: list[Table[Tensor]] | None = None
        self.closure_seen = False
        self.changes = 0
        """Raised whenever `info` would say something else; `Assembly` makes the layout again by it."""
        self.beginnings = 0
        """Raised whenever states are loaded, or a strategy or dtype changed: numbers of before tell nothing now."""
        self.model = model
        self._thread = threading.get_ident()
        self._number = number
        self._names_used = names_used
        self._sub_group = sub_group
        self._governor = governor
        self._guard = guard
        sharding = Sharding(model, self.optimizer, sub_group)
        self._mixed_precision = sharding.mixed_precision
        watched, self.left_out = watched_parameters(model, self.stepping, options, sharding)
        with governor.timing():
            self._intents = intents_on_this_rank(self.stepping, intents.of(self.foreign or self.stepping), watched)
            self._fitting = None if self.foreign else intents.fitting(self.stepping)
        self._groups = _groups_of(self.stepping)
        self._on_meta = [entry.parameter for entry in watched if entry.parameter.is_meta]
        self._windows = Windows(options.windows, options.every) if options.windows else None
        self._step = 0
        self.measurer = StepMeasurer(
            with_unique_names(watched, number, names_used),
            self._intents,
            options.sample,
            oracle=options.oracle,
            windows=self._windows,
            seed=seed,
            casts=options.casts,
        )
        self.skipped = SkippedSteps(self.optimizer)
        self.resume = ResumeCheck()
        self._looks_at_resume = True
        self.saved = CheckpointComparison()
        self._iterations: Iterations | None = None
        self._depth = 0
        self._measuring = False
        self._being_captured = False
        self.unseen = UnseenSteps()
        self._calls = 0
        self._called_before = 0
        self._missed_steps = False
        self.seen_by: SeenBy = "hooks"
        """Who tells of a torch optimizer's steps. Its "hooks", until steps are found that call none: "nobody".
        From then on "hand", if `before_by_hand` and `after_by_hand` are called, unless hooks are, in between."""
        # If the user compiles the step, the hooks are called from compiled code, and must themselves run eagerly.
        self._eager_before = torch.compiler.disable(self._before)  # type: ignore[no-untyped-call]
        self._eager_after = torch.compiler.disable(self._after)  # type: ignore[no-untyped-call]
        self._handles: list[Any] = []
        self.removed = True

    def begin(self, iterations: Iterations) -> None:
        """Install the hooks, where there are any; steps are counted in `iterations`."""
        self._iterations = iterations
        self.removed = False
        if self.foreign is not None:
            return
        loaded = self.optimizer.register_load_state_dict_post_hook(self._state_was_loaded)
        if self.seen_by == "backward":
            self._handles = [loaded]
            return
        self._handles = [
            loaded,
            # A wrapper that shares out tensors copies them back after its inner optimizer's step.
            self.stepping.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
            self.stepping.register_state_dict_pre_hook(self._state_is_saved),
        ]

    def before_by_hand(self) -> None:
        """A step is about to be taken; measured if no hook of torch's sees this optimizer's steps."""
        if self.removed:
            return
        if self._is_told_by_hand():
            self._before(self.optimizer, (), {})
        self._called_before = self._calls

    def after_by_hand(self) -> None:
        """The step that `before_by_hand` announced has been taken. Its hooks have seen it, or it counts now."""
        if self.removed or self._calls != self._called_before:
            # Hooks were called in between, and spoke for this step.
            self.seen_by = "nobody" if self.seen_by == "hand" else self.seen_by
        elif self._is_told_by_hand():
            self._after(self.optimizer)
        elif self.seen_by == "nobody" or self.look_for_unseen_steps():
            # Without proof it may be a step that a loss scaler has skipped.
            assert self._iterations is not None
            self.seen_by = "hand"
            self.changes += 1
            self._windows = None
            self.measurer.measure_replays()
            self._iterations.begin_step(self._number)
            self._iterations.end_step(self._number)

    def look_for_unseen_steps(self) -> bool:
        """Whether steps turn out to be taken that call no hook: True once. Nothing waits.

        Only the thread that watches looks: a backward pass exchanges gradients without Python's lock, and a read of
        one from another thread can end the process.
        """
        if self.removed or self.foreign is not None or self.seen_by != "hooks" or self._guard.disabled:
            return False
        if threading.get_ident() != self._thread:
            return False
        found = self.unseen.look(
            None if self._depth else self._calls, self.stepping, self.measurer.watched, self._gradient_of
        )
        if found:
            self._missed_steps = True
            self._note_unseen_steps()
        return found

    def _note_unseen_steps(self) -> None:
        self.seen_by = "nobody"
        self.changes += 1
        _LOGGER.warning("%s; training is not affected", NOTES["nobody"])

    def _is_told_by_hand(self) -> bool:
        return self.foreign is not None or self.seen_by in ("hand", "backward")

    def _gradient_of(self, entry: WatchedParameter) -> Tensor | None:
        return self._intents[entry.group].composition.gradient_of(entry.parameter)

    @property
    def losses(self) -> list[wire.ResumeLoss]:
        """What this launch lost, each kind once: what is known by what was saved says more."""
        known = {loss.kind: loss for loss in (*self.resume.losses, *self.saved.losses)}
        return list(known.values())

    def _told_beside_weights(self) -> set[str | None]:
        """States beside the weights of which the look at this launch's first step has told the loss."""
        if all(loss.kind not in ("masters", "residuals") for loss in self.resume.losses):
            return set()
        own = [intent.composition for intent in self._intents]
        return {key for composition in own for key in (composition.master, composition.residual)}

    def remove(self) -> None:
        """Take the hooks off."""
        self.removed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.skipped.stop()

    def info(self, notes: Sequence[str]) -> wire.WatchInfo:
        """The description of this optimizer's watch, in wire form."""
        own = notes_on(
            self._stepped(),
            self._intents,
            left_out=[*self.left_out, *([_on_meta(len(self._on_meta))] if self._on_meta else [])],
            shared_by=None if self.stepping is self.optimizer else type(self.optimizer).__name__,
            cast_to=self._mixed_precision,
        )
        described = describe(
            self.stepping,
            self.options,
            self._stepped(),
            self._intents,
            notes=[*own, *filter(None, (NOTES[self.seen_by], self.resume.note)), *notes],
            closure=self.closure_seen,
            in_backward=self.seen_by == "backward",
            fitting=self._fitting,
            sparse=self.measurer.sparse,
        )
        named = described.optimizer if self.foreign is None else self.foreign.named
        doubts = self.resume.doubts if self.saved.continuation is None else []
        told = {"resume_losses": self.losses, "launch_doubts": doubts, "continuation": self.saved.continuation}
        return replace_fields(described, optimizer=named, **told)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        if torch.compiler.is_compiling():
            return self._eager_before(optimizer, args, kwargs)  # type: ignore[no-any-return]
        self._being_captured = self._is_being_captured()
        if self._being_captured:
            return None
        return self._before(optimizer, args, kwargs)

    def _is_being_captured(self) -> bool:
        """Whether a CUDA graph is being captured: nothing runs now, and the graph would replay our work."""
        if _device_of(self.measurer).type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return False
        if self.seen_by == "hooks":
            self._note_unseen_steps()
        return True

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        self._calls += 1
        if self._sub_group is not None and not self._sub_group.steps(optimizer):
            self.skipped.count_call()
            return None
        if self._depth and inside_own_step(optimizer):
            self._depth += 1
            return None
        if self._iterations is not None and self._iterations.step is None and makes_states_only(optimizer):
            return None
        if self._depth or self._missed_steps:
            # An earlier step raised, or steps ran unseen: drop what was gathered for them.
            self._missed_steps = False
            self.measurer.step_raised()
        self._depth, self._measuring = 1, False
        self.skipped.count_call()
        if self._guard.disabled or self._iterations is None:
            return None
        step = self._step = self._iterations.begin_step(self._number)
        measured = self._governor.is_due(step)
        if not (measured or self.options.oracle or self._in_window()):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or self.closure_seen:
            self._gather_before(optimizer, measured, closure is not None)
            return None
        wrapped = self._closure_then_gather(closure, optimizer, measured)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _in_window(self) -> bool:
        """Whether the step about to be taken lies in a window."""
        windows = self._windows
        return windows is not None and bool(windows.schedule.covering(self._step, self._governor.doublings))

    def _closure_then_gather(
        self, closure: Callable[[], Any], optimizer: Optimizer, measured: bool
    ) -> Callable[[], Any]:
        """The closure, wrapped to gather after its first evaluation, when the gradient is known.

        An optimizer that evaluates it again has moved the parameters in between: that step is not measured, and
        later steps are measured by before and after alone.
        """
        evaluations = 0

        def evaluate() -> Any:
            nonlocal evaluations
            loss = closure()
            evaluations += 1
            if evaluations == 1:
                self._gather_before(optimizer, measured, closure=False)
            else:
                self.closure_seen = True
                self._measuring = False
            return loss

        return evaluate

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._eager_after(optimizer)
        elif not self._being_captured:
            self._after(optimizer)
        self._being_captured = False

    def _after(self, optimizer: Optimizer) -> None:
        self._calls += 1
        if self._sub_group is not None and not self._sub_group.steps(optimizer):
            return
        if self._depth > 1:
            if inside_own_step(optimizer):
                self._depth -= 1
                return
        elif not self._depth:
            return
        self._depth = 0
        assert self._iterations is not None
        if not self._guard.disabled:
            try:
                self.skipped.count_skipped(optimizer)
                self.measurer.note_step_taken()
            except Exception as error:
                self._guard.caught("looking at the optimizer after a step", error)
            if self._measuring:
                self._measuring = False
                self._measure()
        self._iterations.end_step(self._number)

    def _gather_before(self, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        try:
            with self._governor.timing(), isolated(_device_of(self.measurer)):
                self._notice_changed_groups(optimizer)
                if closure:
                    self.closure_seen = True
                else:
                    self.measurer.step_oracles(optimizer, measured=measured)
                    if self._in_window():
                        self.measurer.add_to_windows(optimizer, self._step, self._governor.doublings)
                if measured:
                    if self._looks_at_resume:
                        told = self.options.first_step
                        self.resume.before(self.stepping, self.measurer.watched, self._intents, self._step, told)
                        self.saved.begin(self.stepping, self._stepped(), self._step)
                    due, closed = self._governor.counterfactuals_due(self._step), closure or self._is_average()
                    self.measurer.before(optimizer, closure=closed, counterfactuals=due)
                    self._measuring = True
        except Exception as error:
            # The oracles may have missed the step that is about to be taken.
            self.measurer.step_raised()
            self._guard.caught("looking at the optimizer before a step", error)

    def _is_average(self) -> bool:
        """Whether the step is one that uses no gradients, as an average of the weights does."""
        return self.foreign is not None and all(self._gradient_of(own) is None for own in self.measurer.watched)

    def _measure(self) -> None:
        assert self._iterations is not None
        try:
            with self._governor.timing(), isolated(_device_of(self.measurer)):
                if self.seen_by == "hand":
                    self.measurer.gather_gradients_again()
                due = self._governor.counterfactuals_due(self._step)
                self.totals = self.measurer.after(self.stepping, counterfactuals=due)
                if self._looks_at_resume:
                    self._looks_at_resume = False
                    self.resume.after(self.stepping, self.measurer.watched, self._intents, self._step)
                    self.saved.after(self.stepping, self._stepped(), self._step, self._told_beside_weights())
            self._iterations.measured = True
        except Exception as error:
            self._guard.caught("measuring a step", error)

    def _notice_changed_groups(self, optimizer: Optimizer) -> None:
        groups = _groups_of(optimizer)
        if groups == self._groups and all(map(_IS_META, self._on_meta)):
            return
        found, left_out = watched_parameters(
            self.model, optimizer, self.options, Sharding(self.model, self.optimizer, self._sub_group)
        )
        intents = intents_on_this_rank(optimizer, IntentCache().of(self.foreign or optimizer), found)
        kept, new = regrouped(self.measurer.watched, found, [members for members, _, _ in groups])
        self.measurer.regroup([*kept, *with_unique_names(new, self._number, self._names_used)], intents)
        self.changes += 1
        before, self._groups, self._intents, self.left_out = self._groups, groups, intents, left_out
        self._on_meta = [entry.parameter for entry in self.measurer.watched if entry.parameter.is_meta]
        self._fitting = None if self.foreign else fitting_class(optimizer, intents)
        if any(old[1:] != new[1:] for old, new in zip(before, groups, strict=False) if old[0] and new[0]):
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.beginnings += 1
        self.changes += 1
        self.measurer.state_was_loaded()

    def _state_was_loaded(self, optimizer: Optimizer) -> None:
        # Changed weights and states come from the load, not from an unseen step.
        self._calls += 1
        self._looks_at_resume = True
        self._governor.measure_next_step()
        self._begin_anew()

    def _state_is_saved(self, optimizer: Optimizer) -> None:
        """A checkpoint is being made: a summary of it is kept for a launch that resumes from it."""
        if self.saved.numbers is None or not self._step or self._depth or self._guard.disabled:
            return
        try:
            with self._governor.timing(), isolated(_device_of(self.measurer)):
                self.saved.keep(self.stepping, self._stepped(), self._step)
        except Exception as error:
            self._guard.caught("keeping checksums of what is saved", error)

    def _stepped(self) -> list[WatchedParameter]:
        return [entry for entry in self.measurer.watched if entry.stepped]


def is_watched(optimizer: Optimizer) -> bool:
    """Whether a watch has its hooks on the optimizer."""
    of_steps, of_loads = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    hooks: list[object] = [*of_steps.values(), *of_loads.values()]
    return any(isinstance(getattr(hook, "__self__", None), OptimizerHooks) for hook in hooks)


_Group = tuple[tuple[int, ...], object, torch.dtype | None]
"""Identities of the parameters, the strategy if it is one of ours, and the dtype of the first."""


def _groups_of(optimizer: Optimizer) -> tuple[_Group, ...]:
    """All that decides, step by step, which group steps which tensor, and how it is kept."""
    return tuple(
        [
            (
                tuple(map(id, group["params"])),
                group.get("strategy"),
                group["params"][0].dtype if group["params"] else None,
            )
            for group in optimizer.param_groups
        ]
    )


def _on_meta(tensors: int) -> str:
    return f"{tensors} tensor{'s' * (tensors > 1)} on the meta device, which holds no numbers"


def _device_of(measurer: StepMeasurer) -> torch.device:
    for entry in measurer.watched:
        if entry.stepped:
            return entry.parameter.device
    return torch.device("cpu")
