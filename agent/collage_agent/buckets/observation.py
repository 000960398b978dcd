"""A measured step as it is seen: θ, g and u from what was known before it, e and eᵛ from what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collage_agent.intent.choose import Intent
from collage_agent.intent.clone import clone_value
from collage_agent.sample import stored
from collage_agent.stats import MovingAverages, StepView
from collage_agent.stats.blocks import leave_out, nonfinite, on_host
from collage_agent.stats.classes import class_codes, class_counts
from collage_agent.stats.edq import edq_products, squared_block_sums
from collage_agent.stats.view import ROWS

__all__ = ["IntendedUpdate", "Observation", "StepInputs", "Values", "Workspace", "add_up", "view_of"]

Values = Mapping[str, Tensor]


class Workspace:
    """Large fp64 buffers that each run of slots writes over: a fresh one costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def buffer(self, name: str, device: torch.device, *shape: int) -> Tensor:
        """fp64 of this shape, with whatever was left in it; valid until the name is asked for again."""
        elements = math.prod(shape)
        known = self._buffers.get((name, device))
        if known is None or known.numel() < elements:
            known = self._buffers[name, device] = torch.empty(elements, dtype=torch.float64, device=device)
        return known[:elements].view(shape)


@dataclass(frozen=True)
class StepInputs:
    """A run of gathered slots before the live step: values by key, in their stored dtypes.

    `group` and `scalars` are what the optimizer held; `decay` is lr·λ where it decays weights apart from the
    gradient; `scale` is what gradients are to be divided by; in `workspace` the work is done, until the next one's.
    """

    before: Values
    group: dict[str, Any]
    scalars: dict[str, Any]
    decay: float | Tensor | None
    intent: Intent
    scale: Tensor | None
    workspace: Workspace


class IntendedUpdate:
    """u, and the moving averages before the step and after it in exact arithmetic. Synchronises nothing.

    Fills θ, g and u: fp64 [slots]. `averages` are the names of the rows of `states` fp64 [3, averages, slots]: |s|
    before the step, s after it, and room for s as stored after it. `known`: there is a u; without, it is 0.
    """

    def __init__(self, seen: StepInputs, parameter: Tensor, gradient: Tensor, intended: Tensor) -> None:
        kept, before = seen.intent.kept, seen.before
        add_up(before, stored.stored_parameter(before, kept), parameter)
        _fill_gradient(seen, gradient)
        names = stored.average_names(before, kept)
        self.averages = [name for name in names if before[name].is_floating_point()]
        slots = parameter.numel()
        self.states = seen.workspace.buffer("states", parameter.device, 3, len(self.averages), slots)
        self.known = self._intend(seen, parameter, gradient, intended)

    def _intend(self, seen: StepInputs, parameter: Tensor, gradient: Tensor, intended: Tensor) -> bool:
        kept = seen.intent.kept
        state: dict[str, Any] = clone_value(seen.scalars)
        for name in stored.average_names(seen.before, kept):
            if not seen.before[name].is_floating_point():
                state[name] = seen.before[name].clone()
        for index, name in enumerate(self.averages):
            state[name] = add_up(seen.before, stored.components(name, seen.before, kept), self.states[1, index])
        torch.abs(self.states[1], out=self.states[0])
        if not seen.intent.displacement(seen.group, state, parameter, gradient, intended):
            intended.zero_()
            return False
        for index, name in enumerate(self.averages):
            if state[name].data_ptr() != self.states[1, index].data_ptr():
                self.states[1, index].copy_(state[name])
        return True


def _fill_gradient(seen: StepInputs, target: Tensor) -> None:
    gradient = seen.before.get(stored.GRADIENT)
    if gradient is None:
        target.zero_()
        return
    target.copy_(gradient)
    if seen.scale is not None:
        target.div_(seen.scale)


def add_up(values: Values, keys: list[str], target: Tensor) -> Tensor:
    """The sum of the values under `keys`, written to `target` and returned."""
    target.copy_(values[keys[0]])
    for key in keys[1:]:
        target.add_(values[key])
    return target


@dataclass(frozen=True)
class Observation(StepInputs):
    """A run of gathered slots before and after the live step.

    `columns` [blocks] int64 names each block's tensor of `tensors`, `held` fp64 [blocks] counts its slots that hold
    something, `padding` lists the others; `scales` fp64 [blocks]: of fp8, where counterfactuals are asked for.
    """

    after: Values
    block: int
    columns: Tensor
    held: Tensor
    tensors: int
    padding: Tensor
    scales: Tensor | None


def view_of(seen: Observation) -> StepView:
    """What is seen of the step. Valid until the next one is made in the same workspace. Synchronises nothing."""
    registered = seen.before[stored.PARAMETER]
    stored_after = stored.stored_parameter(seen.after, seen.intent.kept)
    # e and eᵛ share a row where the registered parameter is all that is stored.
    names = ROWS if stored_after != [stored.PARAMETER] else tuple(name for name in ROWS if name != "visible")
    rows = seen.workspace.buffer("rows", registered.device, len(names), registered.numel())
    row = dict(zip(names, rows, strict=True))
    parameter, effective = row["parameter"], row["effective"]
    visible = row.setdefault("visible", effective)
    update = IntendedUpdate(seen, parameter, row["gradient"], row["intended"])
    visible_parameter = parameter if visible is effective else registered.to(torch.float64)
    visible.copy_(seen.after[stored.PARAMETER]).sub_(visible_parameter)
    if visible is not effective:
        _fill_effective(seen, stored_after, parameter, visible, effective)
    if len(seen.padding):
        rows.index_fill_(1, seen.padding, 0.0)
    squares, left_out, bad_gradient, bad_parameter = _leave_out_nonfinite(seen, rows, row)
    squares_of = dict(zip(names, squares, strict=True))
    squares_of.setdefault("visible", squares_of["effective"])
    products = edq_products(row["intended"], rows[names.index("effective") : names.index("intended")])
    codes = class_codes(row["intended"], effective, visible, products[0], left_out, bad_gradient, bad_parameter)
    return StepView(
        **row,
        left_out=left_out,
        bad_gradient=bad_gradient,
        bad_parameter=bad_parameter,
        known=update.known,
        registered=registered,
        block=seen.block,
        columns=seen.columns,
        tensors=seen.tensors,
        held=seen.held,
        classes=class_counts(codes, seen.block, seen.held),
        squares=squares_of,
        products=products,
        averages=_averages_of(seen, update, row["gradient"]),
        visible_parameter=visible_parameter,
        residual=_residual_of(seen, stored_after),
        decay=seen.decay,
        scales=seen.scales,
        padded=len(seen.padding),
    )


def _leave_out_nonfinite(
    seen: Observation, rows: Tensor, row: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums of squares by block with what is not finite left out, what is left out, and whose gradient, whose weight
    is not finite (None: nobody's).

    Where sums of squares say that all is finite, and the host can look at them, that is the whole work.
    """
    squares = squared_block_sums(rows, seen.block)
    if on_host(squares) and math.isfinite(squares.numpy().sum()):
        left_out = torch.zeros(rows.shape[1], dtype=torch.uint8)
        return squares, left_out.index_fill_(0, seen.padding, 1), None, None
    # θ, e and eᵛ are finite where their components are, which are cheaper to look at in their own dtype.
    bad_gradient = nonfinite(seen.before.get(stored.GRADIENT, row["gradient"]))
    bad_parameter = nonfinite(seen.after[stored.PARAMETER])
    left_out = nonfinite(row["intended"]).bitwise_or_(bad_gradient).bitwise_or_(bad_parameter)
    left_out.bitwise_or_(nonfinite(seen.before[stored.PARAMETER]))
    if len(rows) == len(ROWS):
        for values in (seen.before, seen.after):
            for key in stored.stored_parameter(values, seen.intent.kept):
                left_out.bitwise_or_(nonfinite(values[key]))
    left_out.index_fill_(0, seen.padding, 1)
    leave_out(rows, left_out)
    return squared_block_sums(rows, seen.block), left_out, bad_gradient, bad_parameter


def _fill_effective(
    seen: Observation, stored_after: list[str], parameter: Tensor, visible: Tensor, effective: Tensor
) -> None:
    if stored.PARAMETER not in stored_after:
        effective.copy_(seen.after[stored_after[0]]).sub_(parameter)
        return
    effective.copy_(visible)
    for key in stored_after[1:]:
        change = seen.after[key].to(torch.float64)
        effective.add_(change.sub_(seen.before[key]) if key in seen.before else change)


def _averages_of(seen: Observation, update: IntendedUpdate, gradient: Tensor) -> MovingAverages:
    kept, after = seen.intent.kept, seen.after
    judged = tuple(
        name
        for name in stored.average_names(after, kept)
        if stored.decaying(name, after[name].dtype) and (name in update.averages or name not in seen.before)
    )
    present = {
        name: [after[key] for key in stored.components(name, after, kept)]
        for name in update.averages
        if name in after
    }
    live = seen.before.get(stored.GRADIENT, gradient)
    return MovingAverages(tuple(update.averages), update.states, judged, present, live)


def _residual_of(seen: Observation, stored_after: list[str]) -> Tensor | None:
    """r before the step, fp64 [slots], 0 where it did not exist yet; None: the weight is not kept as a sum."""
    if stored_after[0] != stored.PARAMETER or len(stored_after) == 1:
        return None
    residual = torch.zeros_like(seen.before[stored.PARAMETER], dtype=torch.float64)
    for key in stored_after[1:]:
        if key in seen.before:
            residual.add_(seen.before[key])
    return residual
