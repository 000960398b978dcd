"""A measured step in fp64: θ, g and u from the values before it, e and eᵛ from those after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from collage_agent.intent.choose import Intent
from collage_agent.intent.clone import clone_value
from collage_agent.sample import stored
from collage_agent.stats import MovingAverages, StepView
from collage_agent.stats.blocks import nonfinite, on_host, sum_is_finite, zero_excluded
from collage_agent.stats.classes import Flags, class_counts
from collage_agent.stats.edq import edq_products, squared_block_sums
from collage_agent.stats.view import ROWS, Copies

__all__ = ["TILE_SLOTS", "IntendedUpdate", "ObservedStep", "StepInputs", "Values", "sum_components", "view_of"]

TILE_SLOTS: Final = 196_608
"""Slots of a tile, which are worked on together: the fp64 rows then stay in the cache."""
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class StepInputs:
    """A tile of gathered slots before the live step: values by key, in their stored dtypes.

    `group` and `scalars` are what the optimizer held; `decay` is lr·λ where it decays weights apart from the
    gradient; `scale` is what gradients are to be divided by.
    """

    before: Values
    group: dict[str, Any]
    scalars: dict[str, Any]
    decay: float | Tensor | None
    intent: Intent
    scale: Tensor | None


class IntendedUpdate:
    """u, and the moving averages before the step and after it in exact arithmetic. Synchronises nothing.

    Fills θ, g and u: fp64 [slots]. `averages` are the names of the rows of `states` fp64 [3, averages, slots]: |s|
    before the step, s after it, and room for s as stored after it. `known`: there is a u; without, it is 0.
    """

    def __init__(self, step: StepInputs, parameter: Tensor, gradient: Tensor, intended: Tensor) -> None:
        composition, before = step.intent.composition, step.before
        sum_components(before, stored.stored_parameter(before, composition), parameter)
        _fill_gradient(step, gradient)
        names = stored.average_names(before, composition)
        self.averages = [name for name in names if before[name].is_floating_point()]
        self.states = parameter.new_empty(3, len(self.averages), parameter.numel())
        self.known = self._intend(step, parameter, gradient, intended)

    def _intend(self, step: StepInputs, parameter: Tensor, gradient: Tensor, intended: Tensor) -> bool:
        composition = step.intent.composition
        state: dict[str, Any] = clone_value(step.scalars)
        for name in stored.average_names(step.before, composition):
            if not step.before[name].is_floating_point():
                state[name] = step.before[name].clone()
        for index, name in enumerate(self.averages):
            state[name] = sum_components(
                step.before, stored.components(name, step.before, composition), self.states[1, index]
            )
        torch.abs(self.states[1], out=self.states[0])
        if not step.intent.displacement(step.group, state, parameter, gradient, intended):
            intended.zero_()
            return False
        for index, name in enumerate(self.averages):
            if state[name].data_ptr() != self.states[1, index].data_ptr():
                self.states[1, index].copy_(state[name])
        return True


def _fill_gradient(step: StepInputs, target: Tensor) -> None:
    gradient = step.before.get(stored.GRADIENT)
    if gradient is None:
        target.zero_()
        return
    target.copy_(gradient)
    if step.scale is not None:
        target.div_(step.scale)


def sum_components(values: Values, keys: list[str], target: Tensor) -> Tensor:
    """The sum of the values under `keys`, written to `target` and returned."""
    target.copy_(values[keys[0]])
    for key in keys[1:]:
        target.add_(values[key])
    return target


@dataclass(frozen=True)
class ObservedStep(StepInputs):
    """A tile of gathered slots before and after the live step.

    `tensor_of_block` [blocks] int64: its place in `tensors`. `block_elements` fp64 [blocks] counts a block's slots
    that hold an element, `padding` lists the others. `scales` fp64 [blocks]: of fp8, where counterfactuals are
    asked for; `copies` in the formats that are asked for. `held` uint8 [slots]: 1 where the last measured step left
    a residual, None: not known. `launch`, in the first step of a launch: whether the states were stepped since
    residuals could be kept; None in others.
    """

    after: Values
    block: int
    tensor_of_block: Tensor
    block_elements: Tensor
    tensors: int
    padding: Tensor
    scales: Tensor | None
    copies: Copies | None
    held: Tensor | None = None
    launch: bool | Tensor | None = None


def view_of(step: ObservedStep) -> StepView:
    """The step as measures read it. No synchronisation."""
    registered = step.before[stored.PARAMETER]
    stored_after = stored.stored_parameter(step.after, step.intent.composition)
    # e and eᵛ share a row where the registered parameter is all that is stored.
    names = ROWS if stored_after != [stored.PARAMETER] else tuple(name for name in ROWS if name != "visible")
    rows = torch.empty(len(names), registered.numel(), dtype=torch.float64, device=registered.device)
    row = dict(zip(names, rows, strict=True))
    parameter, effective = row["parameter"], row["effective"]
    visible = row.setdefault("visible", effective)
    update = IntendedUpdate(step, parameter, row["gradient"], row["intended"])
    visible_parameter = parameter if visible is effective else registered.to(torch.float64)
    visible.copy_(step.after[stored.PARAMETER]).sub_(visible_parameter)
    if visible is not effective:
        _fill_effective(step, stored_after, parameter, visible, effective)
    squares, flags = _exclude_nonfinite(step, rows, row)
    squares_of = dict(zip(names, squares, strict=True))
    squares_of.setdefault("visible", squares_of["effective"])
    updates = rows[names.index("effective") :]
    products = edq_products(row["intended"], updates[:-1])
    if flags is None:
        update.states.index_fill_(2, step.padding, 0.0)
    return StepView(
        **row,
        excluded=_vacant(step) if flags is None else flags.excluded,
        finite=flags is None,
        intended_known=update.known,
        registered=registered,
        block=step.block,
        tensor_of_block=step.tensor_of_block,
        tensors=step.tensors,
        block_elements=step.block_elements,
        classes=class_counts(updates, products[0], flags, step.block, step.block_elements),
        squares=squares_of,
        products=products,
        averages=_averages_of(step, update),
        visible_parameter=visible_parameter,
        residual=_residual_of(step, stored_after),
        residual_after=step.after[stored_after[-1]] if _is_sum(stored_after) else None,
        held=_held_by(step, update, row["intended"]) if _is_sum(stored_after) else None,
        decay=step.decay,
        scales=step.scales,
        copies=step.copies,
    )


def _exclude_nonfinite(step: ObservedStep, rows: Tensor, row: Mapping[str, Tensor]) -> tuple[Tensor, Flags | None]:
    """Σ x² of each row by block, after what is not finite was set to zero in all rows; None: all was finite.

    On the host the sums tell that, and spare an eighth of the measured step. Elsewhere each element is looked at:
    θ, e and eᵛ are finite where their components are, which are cheaper to check in their own dtype.
    """
    if on_host(rows):
        squares = squared_block_sums(rows.index_fill_(1, step.padding, 0.0), step.block)
        if sum_is_finite(squares):
            return squares, None
    bad_gradient = nonfinite(step.before.get(stored.GRADIENT, row["gradient"]))
    bad_parameter = nonfinite(step.after[stored.PARAMETER])
    excluded = nonfinite(row["intended"]).bitwise_or_(bad_gradient).bitwise_or_(bad_parameter)
    excluded.bitwise_or_(nonfinite(step.before[stored.PARAMETER]))
    if len(rows) == len(ROWS):
        for values in (step.before, step.after):
            for key in stored.stored_parameter(values, step.intent.composition):
                excluded.bitwise_or_(nonfinite(values[key]))
    zero_excluded(rows, excluded.index_fill_(0, step.padding, 1))
    return squared_block_sums(rows, step.block), Flags(excluded, bad_gradient, bad_parameter)


def _vacant(step: ObservedStep) -> Tensor:
    """uint8 [slots], 1 where a slot holds no element."""
    found = torch.zeros_like(step.before[stored.PARAMETER], dtype=torch.uint8)
    return found.index_fill_(0, step.padding, 1)


def _fill_effective(
    step: ObservedStep, stored_after: list[str], parameter: Tensor, visible: Tensor, effective: Tensor
) -> None:
    if stored.PARAMETER not in stored_after:
        effective.copy_(step.after[stored_after[0]]).sub_(parameter)
        return
    effective.copy_(visible)
    for key in stored_after[1:]:
        change = step.after[key].to(torch.float64)
        effective.add_(change.sub_(step.before[key]) if key in step.before else change)


def _averages_of(step: ObservedStep, update: IntendedUpdate) -> MovingAverages:
    composition, after = step.intent.composition, step.after
    decaying = tuple(
        name
        for name in stored.average_names(after, composition)
        if stored.decaying(name, after[name].dtype) and (name in update.averages or name not in step.before)
    )
    present = {
        name: [after[key] for key in stored.components(name, after, composition)]
        for name in update.averages
        if name in after
    }
    return MovingAverages(tuple(update.averages), update.states, decaying, present)


def _is_sum(keys: list[str]) -> bool:
    return keys[0] == stored.PARAMETER and len(keys) > 1


def _held_by(step: ObservedStep, update: IntendedUpdate, intended: Tensor) -> Tensor | None:
    """uint8 [slots], 1 where the residual should not be 0 before the step; None: not known.

    In the first step of a launch the optimizer's averages are the witnesses: an element that was stepped and moves
    now has had a residual, unless none could be kept before.
    """
    if step.launch is False or step.intent.composition.residual not in step.before:
        return torch.zeros_like(step.before[stored.PARAMETER], dtype=torch.uint8)
    if step.launch is None:
        return step.held
    witnessed = update.states[0].ne(0).any(0)
    if update.known:
        witnessed.logical_and_(intended)
    if isinstance(step.launch, Tensor):
        witnessed.logical_and_(step.launch)
    return witnessed.view(torch.uint8)


def _residual_of(step: ObservedStep, stored_after: list[str]) -> Tensor | None:
    """r before the step, fp64 [slots], 0 where it did not exist yet; None: the weight is not kept as a sum."""
    if not _is_sum(stored_after):
        return None
    residual = torch.zeros_like(step.before[stored.PARAMETER], dtype=torch.float64)
    for key in stored_after[1:]:
        if key in step.before:
            residual.add_(step.before[key])
    return residual
