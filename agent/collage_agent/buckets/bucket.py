"""A bucket: watched tensors that are stepped in lock-step, gathered and measured as one flat sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collage_agent.buckets.observation import BufferPool, IntendedUpdate, ObservedStep, StepInputs, view_of
from collage_agent.buckets.oracle import SLOTS_AT_ONCE, OracleView
from collage_agent.buckets.totals import BlockTotals
from collage_agent.intent.choose import Intent
from collage_agent.intent.clone import clone_value
from collage_agent.sample import stored
from collage_agent.sample.gather import BlockLayout, Staging
from collage_agent.sample.quantised import reading
from collage_agent.sample.sampling import TensorSample
from collage_agent.stats import MEASURES, StepView, Sums
from collage_agent.stats.counterfactuals import fp8_scales
from collage_agent.stats.view import table_of
from collage_monitor.definitions import Need
from collage_monitor.table import Table

__all__ = ["Bucket"]


class Bucket:
    """Gathers before and after a step and reduces the sample to block totals.

    `members` are indices of watched parameters. Buffers are made once: live values in their own dtype, the fp64
    work in runs of slots that stay in the cache, in a `workspace` that buckets measured in turn may share. Nothing
    here synchronises a device.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Tensor],
        samples: Sequence[TensorSample],
        intent: Intent,
        *,
        knows_gradient: bool = True,
        workspace: BufferPool | None = None,
    ) -> None:
        self.members = tuple(members)
        self.parameters = tuple(parameters)
        self.samples = tuple(samples)
        self.intent = intent
        self.knows_gradient = knows_gradient
        self.layout = BlockLayout(samples, parameters)
        self._before: dict[str, Staging] = {}
        self._after: dict[str, Staging] = {}
        self._group: dict[str, Any] = {}
        self._decay: float | Tensor | None = None
        self._scalars: dict[str, Any] = {}
        self._keys_before: tuple[str, ...] = ()
        self._scales: Tensor | None = None
        self._workspace = workspace or BufferPool()
        self._padding, self._held = [], []
        for slots in self._runs():
            padding = [slot - slots.start for slot in self.layout.padding if slots.start <= slot < slots.stop]
            held = torch.full((slots.stop - slots.start,), 1.0, dtype=torch.float64)
            held[padding] = 0.0
            self._padding.append(torch.tensor(padding).to(torch.int64).to(self.layout.device))
            self._held.append(held.view(-1, self.layout.block).sum(1).to(self.layout.device))

    @property
    def missing(self) -> frozenset[Need]:
        """What its steps lack of what statistics need."""
        lacking: list[Need] = [] if self.knows_gradient else ["gradient"]
        return frozenset([*lacking, "intended"] if self.intent.kind == "before-after" else lacking)

    @property
    def parameter_after(self) -> Tensor:
        """The registered weights at the sampled elements as `measure` last saw them: [slots], own dtype."""
        return self._after[stored.PARAMETER].values

    def gather_before(
        self,
        group: Mapping[str, Any],
        states: Sequence[Mapping[str, Any]],
        decay: float | Tensor | None = None,
    ) -> None:
        """Copy the sampled weights, gradients and states, and the group's numbers, before the step.

        `decay`: lr·λ where the optimizer decays weights apart from the gradient.
        """
        self._decay = decay
        self._group = {key: clone_value(value) for key, value in group.items() if key != "params"}
        first = states[0] if states else {}
        self._scalars = clone_value(stored.scalar_state(self.parameters[0], first))
        keys = tuple(stored.elementwise_state(self.parameters[0], first))
        self._gather(self._before, stored.PARAMETER, self.parameters)
        for key in keys:
            self._gather_state(self._before, key, states)
        self._keys_before = (stored.PARAMETER, *keys)
        if self.knows_gradient:
            gradients = [parameter.grad for parameter in self.parameters]
            self._gather(self._before, stored.GRADIENT, gradients, lasting=False)
            self._keys_before += (stored.GRADIENT,)

    def measure(
        self,
        states: Sequence[Mapping[str, Any]],
        scale: Tensor | None,
        oracles: Sequence[OracleView],
        *,
        counterfactuals: bool = False,
    ) -> BlockTotals:
        """Gather again after the step, work out u and e, and reduce them to block totals.

        `scale`: what the gathered gradients are to be divided by; `counterfactuals`: also measure how much
        other storage strategies would have kept. Runs inside `isolated`.
        """
        self._scales = self._fp8_scales() if counterfactuals else None
        keys_after = (stored.PARAMETER, *stored.elementwise_state(self.parameters[0], states[0]))
        self._gather(self._after, stored.PARAMETER, self.parameters)
        for key in keys_after[1:]:
            self._gather_state(self._after, key, states)
        found = []
        for index, slots in enumerate(self._runs()):
            view = view_of(self._observed_step(index, slots, keys_after, scale))
            found.append(_measure_run(view))
            for oracle in oracles:
                oracle.copy_run(
                    index, (view.intended, view.effective, view.parameter + view.effective), view.left_out
                )
            del view  # Its memory, still in the cache, is that of the next one.
        return _combine_runs(found)

    def intended(self, scale: Tensor | None) -> Tensor:
        """u of what was gathered before the step, fp64 [slots], valid until the next call; see `measure`."""
        found = self._workspace.buffer("intended", self.layout.device, self.layout.slots)
        for slots in self._runs():
            intended = found[slots]
            rows = self._workspace.buffer("rows", self.layout.device, 2, len(intended))
            IntendedUpdate(self._step_inputs(slots, scale), rows[0], rows[1], intended)
        return found

    def weights_before(self) -> dict[str, Tensor]:
        """Copies of the gathered components of the weights, visible and stored, by key."""
        return {key: self._before[key].values.clone() for key in self._weights(self._keys_before)}

    def weights_after(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The components of the weights, visible and stored, gathered now; valid until the next gathering."""
        keys = self._weights((stored.PARAMETER, *stored.elementwise_state(self.parameters[0], states[0])))
        for key in keys:
            if key == stored.PARAMETER:
                self._gather(self._after, key, self.parameters)
            else:
                self._gather_state(self._after, key, states)
        return {key: self._after[key].values for key in keys}

    def without_padding(self, values: Tensor) -> Tensor:
        """The same fp64 [slots] with 0 in the slots that hold nothing, in place."""
        for slots, padding in zip(self._runs(), self._padding, strict=True):
            if len(padding):
                values[slots].index_fill_(0, padding, 0.0)
        return values

    def _runs(self) -> Iterator[slice]:
        """The slots that are worked on together, one run of them after the other."""
        slots = self.layout.slots
        return (slice(start, min(start + SLOTS_AT_ONCE, slots)) for start in range(0, slots, SLOTS_AT_ONCE))

    def _weights(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((stored.PARAMETER, *stored.stored_parameter(keys, self.intent.kept))))

    def _step_inputs(self, slots: slice, scale: Tensor | None) -> StepInputs:
        return StepInputs(
            before={key: self._before[key].values[slots] for key in self._keys_before},
            group=self._group,
            scalars=self._scalars,
            decay=self._decay,
            intent=self.intent,
            scale=scale,
            workspace=self._workspace,
        )

    def _observed_step(
        self, run: int, slots: slice, keys_after: Sequence[str], scale: Tensor | None
    ) -> ObservedStep:
        block = self.layout.block
        return ObservedStep(
            **vars(self._step_inputs(slots, scale)),
            after={key: self._after[key].values[slots] for key in keys_after},
            block=block,
            columns=self.layout.columns[slots.start // block : slots.stop // block],
            held=self._held[run],
            tensors=len(self.members),
            padding=self._padding[run],
            scales=None if self._scales is None else self._scales[slots.start // block : slots.stop // block],
        )

    def _fp8_scales(self) -> Tensor:
        weights = stored.stored_parameter(self._keys_before, self.intent.kept)
        values = self._before[weights[0]].values
        return fp8_scales(values, self.layout.columns, len(self.members), self.layout.block)

    def _gather_state(self, into: dict[str, Staging], key: str, states: Sequence[Mapping[str, Any]]) -> None:
        # All tensors of a bucket are stored in the same form: if the first is read as it is, so are the others.
        plain = reading(states[0], key) is states[0][key]
        tensors = [state[key] for state in states] if plain else [reading(state, key) for state in states]
        self._gather(into, key, tensors, lasting=plain)

    def _gather(self, into: dict[str, Staging], key: str, tensors: Sequence[Any], *, lasting: bool = True) -> None:
        staging = into.get(key)
        if staging is None or staging.values.dtype != tensors[0].dtype:
            staging = into[key] = Staging(self.layout, tensors[0].dtype)
        self.layout.gather(tensors, staging, lasting=lasting)
        if key == self.intent.kept.residual and self.intent.kept.sign < 0:
            staging.values.neg_()


def _measure_run(view: StepView) -> list[Sums]:
    found = []
    for measure in MEASURES.values():
        sums = measure(view)
        found.append(sums if isinstance(sums, Sums) else Sums(sums))
    return found


def _combine_runs(runs: Sequence[Sequence[Sums]]) -> BlockTotals:
    """The runs' sums together: those by block concatenated, those by tensor added."""
    by_block: list[Table[Tensor]] = []
    by_tensor: list[Table[Tensor]] = []
    for same_measure in zip(*runs, strict=True):
        tables = [table for sums in same_measure if (table := table_of(sums.by_block)) is not None]
        if tables:
            by_block.append(_concatenate(tables, [table.array for table in tables]))
        tables = [table for sums in same_measure if (table := table_of(sums.by_tensor)) is not None]
        if tables:
            total = tables[0].array
            for table in tables[1:]:
                total = total + table.array
            by_tensor.append(Table(tables[0].statistics, None, total))
    return BlockTotals(by_block, by_tensor)


def _concatenate(tables: Sequence[Table[Tensor]], arrays: list[Tensor]) -> Table[Tensor]:
    return tables[0] if len(tables) == 1 else Table(tables[0].statistics, None, torch.cat(arrays, 1))
