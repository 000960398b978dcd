"""One chunk of a bucket's sample: from gathered values before and after the step to block totals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collage_agent import stored
from collage_agent.intent.choose import Intent
from collage_agent.intent.clone import clone_value
from collage_agent.stats import (
    class_codes,
    count_classes,
    edq_block_sums,
    edq_products,
    leave_out,
    nonfinite,
    on_host,
    squared_block_sums,
    state_decrement_block_sums,
    ulp_octave_counts,
)

__all__ = ["BlockTotals", "Chunk", "Observation", "Workspace"]

Values = Mapping[str, Tensor]


@dataclass
class BlockTotals:
    """What blocks add up to, before tensors are told apart.

    squares: Σ θ², g², e², eᵛ², u²; products: Σ u·e, u·eᵛ; classes: rows of CLASS_COUNTS; fp64 [rows, blocks].
    decrements: name of the average → intended and observed, fp64 [2, blocks]. octaves: fp64 [BINS, tensors].
    """

    squares: Tensor
    products: Tensor
    classes: Tensor
    decrements: dict[str, Tensor]
    octaves: Tensor


class Workspace:
    """Large fp64 buffers that one chunk after the other writes over: a fresh one costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, device: torch.device, *shape: int) -> Tensor:
        """fp64 of this shape, with whatever was left in it; valid until the name is asked for again."""
        elements = math.prod(shape)
        known = self._buffers.get(name)
        if known is None or known.numel() < elements:
            known = self._buffers[name] = torch.empty(elements, dtype=torch.float64, device=device)
        return known[:elements].view(shape)


@dataclass(frozen=True)
class Observation:
    """A run of gathered slots: values by key, in their stored dtypes, before and after the live step.

    `group` and `scalars` are what the optimizer held before the step; `columns` [blocks] int64 names each block's
    tensor of `tensors`; `padding` lists slots that hold nothing; `scale` is what gradients are to be divided by;
    in `workspace` the chunk works, until the next one does.
    """

    before: Values
    after: Values
    group: dict[str, Any]
    scalars: dict[str, Any]
    intent: Intent
    block: int
    columns: Tensor
    tensors: int
    padding: Tensor
    scale: Tensor | None
    workspace: Workspace


class Chunk:
    """u, e and eᵛ of an observation, with what is not finite left out. Synchronises nothing.

    `rows` fp64 [5 or 4, slots]: θ before, g, e, eᵛ, u; e and eᵛ share a row where the registered parameter is all
    that is stored. `left_out` uint8 [slots].
    """

    def __init__(self, observation: Observation) -> None:
        self._seen = observation
        kept = self._kept = observation.intent.kept
        before, after = observation.before, observation.after
        stored_after = stored.stored_parameter(after, kept)
        self._apart = stored_after != [stored.PARAMETER]
        parameter = before[stored.PARAMETER]
        slots = parameter.numel()
        self.rows = observation.workspace.buffer("rows", parameter.device, 4 + self._apart, slots)
        self.parameter, self.gradient, self.effective = self.rows[0], self.rows[1], self.rows[2]
        self.visible, self.intended = self.rows[-2], self.rows[-1]
        _add_up(before, stored.stored_parameter(before, kept), self.parameter)
        self.visible_parameter = parameter.to(torch.float64) if self._apart else self.parameter
        self._fill_gradient()
        names = stored.average_names(before, kept)
        self._averages = [name for name in names if before[name].is_floating_point()]
        self._states = observation.workspace.buffer("states", parameter.device, 3, len(self._averages), slots)
        self._has_intent = self._intend()
        self.visible.copy_(after[stored.PARAMETER]).sub_(self.visible_parameter)
        if self._apart:
            self._fill_effective(stored_after)
        if len(observation.padding):
            self.rows.index_fill_(1, observation.padding, 0.0)
        self._leave_out_nonfinite()

    @property
    def parameter_after(self) -> Tensor:
        """θ after the step, fp64 [slots]."""
        return self.parameter + self.effective

    def totals(self, octaves: Tensor) -> BlockTotals:
        """The chunk's block totals; its histogram is added to `octaves`."""
        seen, block = self._seen, self._seen.block
        squares = self._squares
        element_products = edq_products(self.intended, self.rows[2:-1])
        products = edq_block_sums(element_products, block)
        if not self._apart:
            # Not by a list of rows: its copy to a device would wait for it.
            squares = torch.cat((squares[:3], squares[2:]))
            products = products.expand(2, -1)
        codes = class_codes(
            self.intended,
            self.effective,
            self.visible,
            element_products[0],
            self.left_out,
            self._bad_gradient,
            self._bad_parameter,
        )
        if self._has_intent:
            octaves += ulp_octave_counts(
                self.intended,
                seen.before[stored.PARAMETER],
                seen.before[stored.PARAMETER].dtype,
                seen.columns,
                seen.tensors,
                block,
            )
        return BlockTotals(squares, products, count_classes(codes, block), self._decrements(), octaves)

    def _intend(self) -> bool:
        """Fill u, and the states before the step and after it in exact arithmetic; False: there is no u."""
        seen = self._seen
        state: dict[str, Any] = clone_value(seen.scalars)
        for name in stored.average_names(seen.before, self._kept):
            if not seen.before[name].is_floating_point():
                state[name] = seen.before[name].clone()
        for index, name in enumerate(self._averages):
            keys = stored.components(name, seen.before, self._kept)
            state[name] = _add_up(seen.before, keys, self._states[1, index])
        torch.abs(self._states[1], out=self._states[0])
        intended = seen.intent.displacement(seen.group, state, self.parameter, self.gradient, self.intended)
        if not intended:
            self.intended.zero_()
            return False
        for index, name in enumerate(self._averages):
            if state[name].data_ptr() != self._states[1, index].data_ptr():
                self._states[1, index].copy_(state[name])
        return True

    def _leave_out_nonfinite(self) -> None:
        """Where sums of squares say that all is finite, and the host can look at them, that is the whole work."""
        self._squares = squared_block_sums(self.rows, self._seen.block)
        self._bad_gradient: Tensor | None = None
        self._bad_parameter: Tensor | None = None
        if on_host(self._squares) and math.isfinite(self._squares.numpy().sum()):
            self.left_out = torch.zeros(self.rows.shape[1], dtype=torch.uint8)
            self.left_out.index_fill_(0, self._seen.padding, 1)
            return
        self._find_nonfinite()
        leave_out(self.rows, self.left_out)
        self._squares = squared_block_sums(self.rows, self._seen.block)

    def _find_nonfinite(self) -> None:
        """θ, e and eᵛ are finite where their components are, which are cheaper to look at in their own dtype."""
        before, after = self._seen.before, self._seen.after
        self._bad_gradient = nonfinite(before.get(stored.GRADIENT, self.gradient))
        self._bad_parameter = nonfinite(after[stored.PARAMETER])
        self.left_out = nonfinite(self.intended).bitwise_or_(self._bad_gradient).bitwise_or_(self._bad_parameter)
        self.left_out.bitwise_or_(nonfinite(before[stored.PARAMETER]))
        if self._apart:
            for values in (before, after):
                for key in stored.stored_parameter(values, self._kept):
                    self.left_out.bitwise_or_(nonfinite(values[key]))
        self.left_out.index_fill_(0, self._seen.padding, 1)

    def _fill_gradient(self) -> None:
        gradient = self._seen.before.get(stored.GRADIENT)
        if gradient is None:
            self.gradient.zero_()
            return
        self.gradient.copy_(gradient)
        if self._seen.scale is not None:
            self.gradient.div_(self._seen.scale)

    def _fill_effective(self, stored_after: list[str]) -> None:
        before, after = self._seen.before, self._seen.after
        if stored.PARAMETER not in stored_after:
            self.effective.copy_(after[stored_after[0]]).sub_(self.parameter)
            return
        self.effective.copy_(self.visible)
        for key in stored_after[1:]:
            change = after[key].to(torch.float64)
            self.effective.add_(change.sub_(before[key]) if key in before else change)

    def _decrements(self) -> dict[str, Tensor]:
        """By name of the average, [2, blocks]: intended and observed; no decrement was possible where it is new."""
        seen = self._seen
        if not self._has_intent:
            return {}
        found: dict[str, Tensor] = {}
        for index, name in enumerate(self._averages):
            _add_up(seen.after, stored.components(name, seen.after, self._kept), self._states[2, index])
        if self._averages:
            sums = state_decrement_block_sums(self._states, self.left_out, seen.block)
            found = {name: sums[:, index] for index, name in enumerate(self._averages) if self._judged(name)}
        for name in stored.average_names(seen.after, self._kept):
            if name not in seen.before and self._judged(name):
                found[name] = torch.zeros(2, len(seen.columns), dtype=torch.float64, device=self.rows.device)
        return found

    def _judged(self, name: str) -> bool:
        return name in self._seen.after and stored.decaying(name, self._seen.after[name].dtype)


def _add_up(values: Values, keys: list[str], target: Tensor) -> Tensor:
    target.copy_(values[keys[0]])
    for key in keys[1:]:
        target.add_(values[key])
    return target
