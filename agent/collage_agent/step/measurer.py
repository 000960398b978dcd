"""Measured steps of one optimizer: gathering before a step, the tables made after it, and the memory for both.

The hooks call it. It owns the buckets, oracles and windows of its optimizer; results are tables by name, on the
device, and reading them is left to the worker (`tests/agent/step/test_measurer.py`,
`tests/agent/test_no_synchronisation.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, Literal

from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.before_after import WholeTensor
from collage_agent.intent.intent_choice import Intent
from collage_agent.intent.whole_optimizer import OptimizerCopy, WholeOptimizer
from collage_agent.sample.sampling import TensorSample
from collage_agent.sample.state_mappings import states_of
from collage_agent.stats.counterfactuals import COUNTERFACTUAL_SUMS
from collage_agent.step.bucket import LOOK_EVERY, Bucket
from collage_agent.step.bucket_planner import Kind, Planner, Signature, step_counter_of
from collage_agent.step.device_gather import prepare
from collage_agent.step.gather import BlockLayout, TensorViews
from collage_agent.step.observed_step import Follows
from collage_agent.step.optimizer_oracles import Oracles
from collage_agent.step.oracle import Oracle
from collage_agent.step.rotation import ELEMENTS_A_STEP, Rotation, nan_where_skipped
from collage_agent.step.totals import KernelTotals
from collage_agent.step.touched_rows import TouchedBucket
from collage_agent.step.windows import Windows
from collage_agent.training.skipped_steps import loss_scaling
from collage_agent.training.watched_parameters import WatchedParameter
from collage_monitor.totals_table import Table

__all__ = [
    "StepMeasurer",
    "buffer_bytes",
]

_WINDOW_SAMPLE: Final = 2048
_NO_STATE: Final[dict[str, Any]] = {}
_NO_TENSORS: Final = frozenset({int, float, bool, str, TensorSample})


class StepMeasurer:
    """Measures steps of one optimizer, and keeps its oracles and windows running.

    Call `before` and `after` around each measured step. `occasional` holds the keys that the last measured step
    reported but other steps may not: windows and counterfactuals. Tensors stepped in lock-step are measured as one
    bucket. When gradients come or go, or states appear, the buckets are planned again.

    Kernels of our optimizers add up totals of every element (`KernelTotals`), which replace the sample's. For what
    they lack, the sample is still taken: at every LOOK_EVERY-th measured step if they step all tensors and nobody
    asked for copies, an oracle or windows, and at each otherwise.
    """

    def __init__(
        self,
        watched: Sequence[WatchedParameter],
        intents: Sequence[Intent],
        sample: int | Literal["all"],
        *,
        oracle: bool,
        windows: Windows | None = None,
        seed: int,
        casts: Sequence[str] = (),
    ) -> None:
        self.sample: int | Literal["all"] = sample
        self.windows = windows
        self.occasional: list[tuple[str, ...]] = []
        self._planner = Planner(watched, intents, seed=seed, casts=casts)
        self._oracles = Oracles(self._planner) if oracle else None
        self._versions: list[int] = []
        self._signature: Signature | None = None
        self._buckets: list[Bucket] = []
        self._follows: Follows = "nothing"
        self._rotation = Rotation(None if sample == "all" else ELEMENTS_A_STEP)
        self._rotates = _rotates(intents)
        self._copied = _copied(intents)
        self._kernel = KernelTotals()
        self._without_sample: int | None = None
        """Measured steps since the last one with a sample; None: kernels are not known to add up all tensors."""
        self._takes_sample = True
        self._copies = bool(casts)
        self._buffer_bytes: tuple[tuple[object, ...] | None, float] = (None, 0.0)
        for device in {entry.parameter.device for entry in watched}:
            prepare(device)

    @property
    def watched(self) -> Sequence[WatchedParameter]:
        """The parameters that are watched, in places that stay theirs; a new list when groups have changed."""
        return self._planner.watched

    @property
    def sparse(self) -> Collection[str]:
        """The tensors whose gradients were seen to be sparse, by name."""
        return self._planner.sparse

    @property
    def copies_optimizer(self) -> bool:
        """Whether u comes from a copy of the whole optimizer."""
        return self._copied is not None

    @property
    def oracle_restarts(self) -> int:
        """How often the oracles had to attach again."""
        return 0 if self._oracles is None else self._oracles.restarts

    def buffer_bytes(self) -> float:
        """Bytes of the buffers kept for this optimizer; counted again after a new plan."""
        counted_for, found = self._buffer_bytes
        plans = (self._buckets, self._rotation.kept, None if self.windows is None else self.windows.buckets)
        if counted_for != plans:
            ours = (self._buckets, self._attached_oracles(), self.windows, self._rotation)
            found = float(buffer_bytes(ours, [watched.parameter for watched in self.watched]))
            self._buffer_bytes = plans, found
        return found

    def shrink_sample(self, sample: int) -> None:
        """From the next measured step on, use a smaller sample: a prefix of the present one."""
        self.sample, self._signature = sample, None
        self._give_up_copies("a copy of it takes more than the agent's budget")

    def _give_up_copies(self, reason: str) -> None:
        """From the next measured step on, what a copy of the whole optimizer told is not known."""
        for intent in self._planner.intents if self._copied is not None else ():
            if isinstance(intent, WholeOptimizer):
                intent.give_up(reason)
        self._copied, self._signature = None, None

    def regroup(self, watched: Sequence[WatchedParameter], intents: Sequence[Intent]) -> None:
        """The parameter groups changed: all parameters, those so far in their places, and one intent a group.

        Oracles continue with the tensors that are still stepped, unless parameters were replaced.
        """
        replaced = any(new.parameter is not old.parameter for new, old in zip(watched, self.watched, strict=False))
        self._planner.regroup(watched, intents)
        self._rotates = _rotates(intents)
        self._copied = _copied(intents)
        self._signature = self._without_sample = None
        if self.windows is not None:
            self.windows.plan_anew()
        if replaced:
            self._versions = []
            self.state_was_loaded()

    def state_was_loaded(self) -> None:
        """The live weights and states were replaced: oracles and windows start again."""
        if self._oracles is not None:
            self._oracles.restart()
        if self.windows is not None:
            self.windows.discard()
        self._signature, self._buckets = None, []
        self._without_sample = None
        self._rotation.forget()
        self._follows = "nothing"

    def step_raised(self) -> None:
        """The live step raised: oracles and windows counted a step that did not complete, and start again."""
        if self._oracles is not None:
            self._oracles.step_raised()
        if self.windows is not None:
            self.windows.discard()
        self._signature, self._follows = None, "other steps"
        self._without_sample = None

    def measure_replays(self) -> None:
        """From now on a CUDA graph may take the steps, and clip or cast the gradients in it.

        Then they are final after the step only. Oracles, windows and whole tensors in rotation need them before, so
        they are switched off.
        """
        self._oracles = self.windows = None
        self._rotates, self._signature, self._buckets = False, None, []
        self._give_up_copies("its steps call no hooks, so nothing is known before them")

    def gather_gradients_again(self) -> None:
        """After a step, in place of the gradients that `before` gathered. Inside `isolated`."""
        for bucket in self._buckets:
            bucket.gather_gradients_again()

    def step_oracles(self, optimizer: Optimizer, *, measured: bool) -> None:
        """Have the oracles take the step that the optimizer is about to take. Inside `isolated`.

        measured: skip the step now; `before` lets the oracles take it once it has gathered the gradients.
        """
        if self._oracles is not None:
            self._oracles.prepare(optimizer, self.sample, written=self._weights_were_written())
            if not measured:
                self._oracles.step(optimizer)

    def add_to_windows(self, optimizer: Optimizer, step: int, doublings: int) -> None:
        """Add u of step number `step`, which the optimizer is about to take, to the windows. Inside `isolated`."""
        if self.windows is None:
            return
        if self.windows.is_open and self._weights_were_written():
            self.windows.discard()
        signature = self._signature_of(optimizer, closure=False)
        cap = self.sample if self.sample == "all" else min(self.sample, _WINDOW_SAMPLE)

        def plan() -> list[Bucket]:
            planned = self._planner.plans(optimizer, signature, cap, ())
            return [
                bucket
                for bucket in planned
                if bucket.intent.kind in ("shadow", "rule") and not isinstance(bucket, TouchedBucket)
            ]

        self.windows.before(optimizer, step, doublings, (cap, signature), plan)

    def note_step_taken(self) -> None:
        """After the live step: the launch has begun; remember weights' versions, to notice writes by others.

        O(1) a tensor.
        """
        self._follows = "other steps"
        if self._oracles is not None or (self.windows is not None and self.windows.is_open):
            self._versions = [watched.parameter._version for watched in self.watched]

    def before(self, optimizer: Optimizer, *, closure: bool, counterfactuals: bool = True) -> None:
        """Gather what the step is about to change. Inside `isolated`.

        counterfactuals: whether `after` is to measure them, which takes a sample.
        """
        self._kernel.ask(None if closure else optimizer)
        self._takes_sample = closure or counterfactuals or self._sample_is_due()
        if not self._takes_sample:
            return
        signature = self._signature_now(optimizer, closure)
        if signature != self._signature:
            if self._oracles is not None:
                self._oracles.split_by_state(optimizer)
                signature = self._signature_now(optimizer, closure)
            before, self._signature = self._buckets, signature
            self._buckets = self._planner.plans(optimizer, signature, self.sample, self._attached_oracles())
            for old, new in product(before, self._buckets):
                new.take_over(old)
        for bucket in self._buckets:
            known = self._oracles is not None and self._oracles.weights_gathered(bucket)
            bucket.follows = self._follows
            bucket.gather_before(optimizer, weights_gathered=known)
            bucket.look_at_whole(optimizer)
        if not closure:
            if self._oracles is not None:
                self._oracles.step(optimizer, self._buckets)
            if self._rotates:
                self._rotation.before(optimizer, self._planner, self._follows)
            if self._copied is not None:
                self._copied.begin(optimizer, [intent.composition for intent in self._planner.intents])

    def _sample_is_due(self) -> bool:
        known = self._without_sample
        asked = self._copies or self._oracles is not None or self.windows is not None or self._rotates
        return asked or known is None or known + 1 >= LOOK_EVERY

    def after(self, optimizer: Optimizer, *, counterfactuals: bool = False) -> list[Table[Tensor]]:
        """Estimated totals of the step, [statistic][layer], a table for each part of it. Inside `isolated`.

        `counterfactuals`: also measure how much other storage strategies would have kept.
        """
        scale, skipped = loss_scaling(optimizer)
        whole = self._kernel.tables(self.watched)
        if self._copied is not None:
            self._copied.step(scale)
        found = self._after_sample(optimizer, scale, counterfactuals) if self._takes_sample else []
        if self._copied is not None:
            self._copied.release()
            if self._copied.refused is not None:
                self._give_up_copies(self._copied.refused)
        self._note_coverage(found, whole)
        found += whole
        if skipped is not None:
            found = [nan_where_skipped(skipped, part) for part in found]
        if not self._takes_sample:
            return found
        if self._rotates:
            found += self._rotation.after(optimizer, scale, skipped)
        kept = counterfactuals and any(COUNTERFACTUAL_SUMS[0] in part for part in found)
        self.occasional += [COUNTERFACTUAL_SUMS] if kept else []
        if self.windows is not None:
            ended = self.windows.after(optimizer)
            self.occasional += dict.fromkeys(tuple(part.statistics) for part in ended)
            found += [nan_where_skipped(skipped, part) for part in ended]
        return found

    def _after_sample(
        self, optimizer: Optimizer, scale: Tensor | None, counterfactuals: bool
    ) -> list[Table[Tensor]]:
        self._follows = "measured step"
        found: list[Table[Tensor]] = []
        for bucket in self._buckets:
            found += bucket.measure(optimizer, scale, counterfactuals=counterfactuals)
        if self._oracles is not None:
            self._oracles.keep_buckets(self._buckets)
        return found

    def _note_coverage(self, sampled: Sequence[Table[Tensor]], whole: Sequence[Table[Tensor]]) -> None:
        """Whether the next measured steps need a sample, and what only this one's sample could say."""
        self.occasional = []
        members = {member for bucket in self._buckets for member in bucket.members}
        if not members or not members <= self._kernel.covered:
            self._without_sample = None
        elif not self._takes_sample:
            self._without_sample = (self._without_sample or 0) + 1
        else:
            self._without_sample = 0
            said = {key for part in whole for key in part.statistics}
            self.occasional = [
                tuple(dict.fromkeys(key for part in sampled for key in part.statistics if key not in said))
            ]

    def _signature_now(self, optimizer: Optimizer, closure: bool) -> Signature:
        return self._signature_of(optimizer, closure, self._attached_oracles())

    def _signature_of(self, optimizer: Optimizer, closure: bool, oracles: Sequence[Oracle] = ()) -> Signature:
        """The key that groups tensors stepped alike; steps are counted from the first tensor's."""
        kinds: dict[Kind, list[int]] = {}
        first: float | None = None
        kept = optimizer.state.get if self._planner.keeps_by_name else states_of(optimizer)
        for index, parameter, group, name in self._planner.stepped:
            gradient: Tensor | None = getattr(parameter, name, None)
            if gradient is None and not closure:
                continue
            own = kept(parameter, _NO_STATE)
            counter = own.get("step")
            step = counter.item() if type(counter) is Tensor and counter.is_cpu else step_counter_of(own)
            if first is None:
                first = step
            dtype = None if gradient is None else gradient.dtype
            sparse = gradient is not None and gradient.is_sparse
            kinds.setdefault((group, len(own), step - first, dtype, sparse), []).append(index)
        return Signature(closure, tuple(oracles), kinds)

    def _attached_oracles(self) -> Sequence[Oracle]:
        return () if self._oracles is None else self._oracles.attached or ()

    def _weights_were_written(self) -> bool:
        """Whether anything wrote to a weight since the last step, by torch's own count of writes."""
        return any(
            watched.parameter._version != version
            for watched, version in zip(self.watched, self._versions, strict=False)
        )


def _copied(intents: Sequence[Intent]) -> OptimizerCopy | None:
    return next((intent.copied for intent in intents if isinstance(intent, WholeOptimizer)), None)


def _rotates(intents: Sequence[Intent]) -> bool:
    """Whether tensors of some group are stepped whole, in turns."""
    return any(isinstance(intent, WholeTensor) for intent in intents)


def buffer_bytes(root: object, parameters: Iterable[Tensor]) -> int:
    """Bytes of the tensors reachable from `root` through our own objects, on whatever device they are.

    Memory that views share counts once, the memory of the training's `parameters` not at all. Reads sizes and
    addresses only: synchronises no device.
    """
    found = _tensors(root, {id(parameter) for parameter in parameters})
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(root: object, known: Iterable[int]) -> Iterator[Tensor]:
    """The tensors reachable from `root`, except objects with a known id."""
    seen = set(known)
    waiting: list[Any] = [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield local_part(found)
        elif isinstance(found, list | tuple | set | frozenset):
            # Skip numbers, names and samples: a large model has as many of them as tensors.
            waiting += [entry for entry in found if type(entry) not in _NO_TENSORS]
        elif isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, BlockLayout):
            # Not `rows` if nothing has asked for them.
            waiting += (found.tensor_of_block, vars(found).get("rows", ()), found.device_gather)
        elif isinstance(found, TensorViews):
            waiting += (found.zeros, found.copies)
        elif type(found).__module__.partition(".")[0] in ("collage_agent", "collage_optim"):
            waiting += vars(found).values() if hasattr(found, "__dict__") else ()
