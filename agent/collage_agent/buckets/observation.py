"""From gathered values before and after the step to a view of it: u, e and eᵛ, with what is not finite left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_agent.buckets.intended import IntendedUpdate, StepInputs, Values, add_up
from collage_agent.sample import stored
from collage_agent.stats import MovingAverages, StepView
from collage_agent.stats.blocks import leave_out, nonfinite, on_host
from collage_agent.stats.classes import class_codes, class_counts
from collage_agent.stats.edq import edq_products
from collage_agent.stats.norms import squared_block_sums
from collage_agent.stats.view import ROWS

__all__ = ["Observation", "view_of"]


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
    present = {name: after[name] for name in update.averages if name in after}
    for name in present if update.known else ():
        add_up(after, stored.components(name, after, kept), update.states[2, update.averages.index(name)])
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
