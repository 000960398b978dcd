"""A measured step in fp64: θ, g and u from the values before it, e and eᵛ from those after it.

A step is read in tiles, so that its memory is bounded. The meaning of θ, g, u, e and eᵛ is fixed by
`docs/metrics.md`; tile sizes are free (`tests/agent/step/test_finite.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import torch
from collage_optim.from_host import from_host
from torch import Tensor

from collage_agent.intent.intent_choice import Intent
from collage_agent.intent.optimizer_clone import clone_entries
from collage_agent.sample.stored_parts import GRADIENT, PARAMETER, leaves_residual
from collage_agent.stats.block_sums import nonfinite, on_host, sum_is_finite, zero_excluded
from collage_agent.stats.classes import Flags, class_counts
from collage_agent.stats.edq import edq_products, squared_block_sums
from collage_agent.stats.step_view import ROWS, Copies, LargestWeights, MovingAverages, StepView, StoredWeights
from collage_agent.step.gather import BlockLayout
from collage_agent.step.layout import StepLayout

__all__ = [
    "Follows",
    "IntendedUpdate",
    "KeptWeights",
    "ObservedStep",
    "Scratch",
    "Tile",
    "tile_slots",
    "tiles_of",
    "view_of",
]

TILE_SLOTS: Final = 196_608
"""Slots of a tile, which are worked on together: on the host the fp64 rows then stay in the cache."""
_DEVICE_TILE_SLOTS: Final = 5 * TILE_SLOTS
"""On a device, where each tile is 150 launches more, and 150 bytes a slot are 150 MB while a step is measured."""
Values = Mapping[str, Tensor]
Follows = Literal["nothing", "measured step", "other steps"]
"""What came before a measured step, since the launch began or states were loaded: directly before it, or at all."""
_ABOUT: Final = 1.5
_VISIBLE_ROWS: Final = tuple(name for name in ROWS if name != "visible")


@dataclass(frozen=True)
class Tile:
    """Slots of a bucket that are processed together, and their fixed properties.

    `blocks`: those that they make up. `tensor_of_block` [blocks] int64: a block's place in the bucket's tensors.
    `block_elements` fp64 [blocks] counts a block's slots that hold an element, `padding` lists the others.
    """

    slots: slice
    blocks: slice
    tensor_of_block: Tensor
    block_elements: Tensor
    padding: Tensor


def tile_slots(device: torch.device) -> int:
    """The most slots of a tile: a multiple of every block."""
    return TILE_SLOTS if device.type == "cpu" else _DEVICE_TILE_SLOTS


def tiles_of(layout: BlockLayout) -> list[Tile]:
    """The tiles of a layout, in the order of their slots."""
    found, block, most = [], layout.block, tile_slots(layout.device)
    for start in range(0, layout.slots, most):
        slots = slice(start, min(start + most, layout.slots))
        blocks = slice(slots.start // block, slots.stop // block)
        padding = [slot - start for slot in layout.padding if start <= slot < slots.stop]
        held = torch.full((slots.stop - start,), 1.0, dtype=torch.float64)
        held[padding] = 0.0
        empty = from_host(torch.tensor(padding, dtype=torch.int64), layout.device)
        elements = from_host(held.view(-1, block).sum(1), layout.device)
        found.append(Tile(slots, blocks, layout.tensor_of_block[blocks], elements, empty))
    return found


class Scratch:
    """Memory for the fp64 rows of a tile on the host, kept from one tile to the next and shared by buckets.

    Fresh memory each time would be returned and faulted in again, which costs more than the arithmetic. On a
    device the allocator keeps it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """fp64 of this shape with undefined content, on the device of `like`; valid until `name` is taken again."""
        if not like.is_cpu:
            return torch.empty(*shape, dtype=torch.float64, device=like.device)
        size = shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            kept = self._kept[name] = torch.empty(size, dtype=torch.float64)
        return kept[:size].view(*shape)


@dataclass(frozen=True)
class KeptWeights:
    """The gathered components of the weights, visible and stored, and the keys that add up to the stored one."""

    values: Values
    stored: tuple[str, ...]

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """Those of what adds up to the stored weight."""
        return [self.values[key].dtype for key in self.stored]

    def total(self) -> Tensor:
        """θ [slots], in a dtype that holds it: its own where nothing is added up, else fp64."""
        total = self.values[self.stored[0]]
        if len(self.stored) == 1:
            return total
        return _sum_components(self.values, self.stored, torch.empty_like(total, dtype=torch.float64))


@dataclass(frozen=True)
class ObservedStep:
    """A tile of gathered slots before the live step and after it: values by key, in their stored dtypes.

    `group` and `scalars` are the optimizer's; `decay` is lr·λ if it decays weights apart from the gradient; `scale`
    divides gradients. The bucket has so many `tensors`. `scales` fp64 [blocks] are those of fp8, where
    counterfactuals are asked for. `formats` of copies that are asked for: fp64 [blocks], NaN where one is not
    known; the `largest` |θ| before and after, where they need it. `held` uint8 [slots]: 1 where the last measured
    step left a residual, None: not known. `launch`, in the first step of a
    launch: see `stepped_since_kept`; None in others. `adjacent`: see
    `StepView.adjacent`. If only u is needed, `after` is empty.
    """

    before: Values
    after: Values
    layout: StepLayout
    group: dict[str, Any]
    scalars: dict[str, Any]
    decay: float | Tensor | None
    intent: Intent
    scale: Tensor | None
    tile: Tile
    block: int
    tensors: int
    scales: Tensor | None
    formats: Values
    largest: tuple[LargestWeights | None, LargestWeights | None]
    held: Tensor | None
    adjacent: bool
    launch: tuple[bool | Tensor, bool | Tensor] | None

    @cached_property
    def visible_parameter(self) -> Tensor:
        """θᵛ before the step, fp64 [slots]."""
        return self.before[PARAMETER].to(torch.float64)

    @cached_property
    def residual(self) -> Tensor | None:
        """r before the step, fp64 [slots], 0 where it did not exist yet; None: the weight is not kept as a sum."""
        layout = self.layout.after
        if not layout.is_sum:
            return None
        kept = self.before.get(layout.stored[1])
        if kept is None:
            return torch.zeros_like(self.before[PARAMETER], dtype=torch.float64)
        return kept.to(torch.float64)


class IntendedUpdate:
    """u, and the moving averages before the step and after it in exact arithmetic. Synchronises nothing.

    Fills θ, g and u: fp64 [slots]. `states` fp64 [3, averages, slots] has a row for each of the layout's `names`:
    |s| before the step, s after it, and room for s as stored after it. `known`: there is a u; without, it is 0.
    """

    def __init__(
        self,
        step: ObservedStep,
        parameter: Tensor,
        gradient: Tensor,
        intended: Tensor,
        scratch: Scratch | None = None,
    ) -> None:
        if step.residual is not None and step.layout.before.is_sum:
            torch.add(step.visible_parameter, step.residual, out=parameter)
        else:
            _sum_components(step.before, step.layout.before.stored, parameter)
        _fill_gradient(step, gradient)
        shape = (3, len(step.layout.names), parameter.numel())
        self.states = parameter.new_empty(shape) if scratch is None else scratch.take("states", shape, parameter)
        self.known = self._intend(step, parameter, gradient, intended)

    def _intend(self, step: ObservedStep, parameter: Tensor, gradient: Tensor, intended: Tensor) -> bool:
        layout, exact = step.layout, self.states[1]
        state = clone_entries(step.scalars)
        for average in layout.before.averages:
            if not average.is_float:
                state[average.name] = step.before[average.name].clone()
        rows = dict(zip(layout.names, exact, strict=True))
        for average in layout.averages:
            state[average.name] = _sum_components(step.before, average.components, rows[average.name])
        torch.abs(exact, out=self.states[0])
        if not step.intent.displacement(step.group, state, parameter, gradient, intended):
            intended.zero_()
            return False
        for name, row in rows.items():
            if state[name] is not row and state[name].data_ptr() != row.data_ptr():
                row.copy_(state[name])
        return True


def _fill_gradient(step: ObservedStep, target: Tensor) -> None:
    gradient = step.before.get(GRADIENT)
    if gradient is None:
        target.zero_()
        return
    target.copy_(gradient)
    if step.scale is not None:
        target.div_(step.scale)


def _sum_components(values: Values, keys: Sequence[str], target: Tensor) -> Tensor:
    """The sum of the values under `keys`, written to `target` and returned."""
    target.copy_(values[keys[0]])
    for key in keys[1:]:
        target.add_(values[key])
    return target


def view_of(step: ObservedStep, scratch: Scratch) -> StepView:
    """The step as measures read it, valid until `scratch` is used again. No synchronisation."""
    layout, tile, registered = step.layout, step.tile, step.before[PARAMETER]
    # e and eᵛ share a row where the registered parameter is all that is stored.
    names = _VISIBLE_ROWS if layout.is_visible else ROWS
    rows = scratch.take("rows", (len(names), registered.numel()), registered)
    row = dict(zip(names, rows, strict=True))
    parameter, effective = row["parameter"], row["effective"]
    visible = row.setdefault("visible", effective)
    update = IntendedUpdate(step, parameter, row["gradient"], row["intended"], scratch)
    visible_parameter = parameter if layout.is_visible else step.visible_parameter
    visible.copy_(step.after[PARAMETER]).sub_(visible_parameter)
    if not layout.is_visible:
        _fill_effective(step, parameter, visible, effective)
    squares, flags = _exclude_nonfinite(step, rows, row)
    squares_of = dict(zip(names, squares, strict=True))
    squares_of.setdefault("visible", squares_of["effective"])
    updates = rows[2:]
    products = edq_products(row["intended"], updates[:-1])
    if flags is None:
        update.states.index_fill_(2, tile.padding, 0.0)
    return StepView(
        **row,
        excluded=_vacant(step) if flags is None else flags.excluded,
        finite=flags is None,
        intended_known=update.known,
        registered=registered,
        block=step.block,
        tensor_of_block=tile.tensor_of_block,
        tensors=step.tensors,
        block_elements=tile.block_elements,
        classes=class_counts(updates, products[0], flags, step.block, tile.block_elements),
        squares=squares_of,
        products=products,
        averages=_averages_of(step, update),
        visible_parameter=visible_parameter,
        residual=step.residual,
        residual_after=step.after[layout.after.stored[1]] if layout.after.is_sum else None,
        adjacent=step.adjacent,
        held=_held_by(step, update, row["intended"], registered) if layout.after.is_sum else None,
        decay=step.decay,
        scales=step.scales,
        copies=_copies_of(step, parameter if flags is None else None) if step.formats else None,
    )


def _exclude_nonfinite(step: ObservedStep, rows: Tensor, row: Values) -> tuple[Tensor, Flags | None]:
    """Σ x² of each row by block, after what is not finite was set to zero in all rows; None: all was finite.

    On the host the sums tell that, and spare an eighth of the measured step. Elsewhere each element is looked at:
    θ, e and eᵛ are finite where their components are, which are cheaper to check in their own dtype.
    """
    padding = step.tile.padding
    if on_host(rows):
        squares = squared_block_sums(rows.index_fill_(1, padding, 0.0), step.block)
        if sum_is_finite(squares):
            return squares, None
    bad_gradient = nonfinite(step.before.get(GRADIENT, row["gradient"]))
    bad_parameter = nonfinite(step.after[PARAMETER])
    excluded = nonfinite(row["intended"]).bitwise_or_(bad_gradient).bitwise_or_(bad_parameter)
    excluded.bitwise_or_(nonfinite(step.before[PARAMETER]))
    if not step.layout.is_visible:
        for values, layout in ((step.before, step.layout.before), (step.after, step.layout.after)):
            for key in layout.stored:
                excluded.bitwise_or_(nonfinite(values[key]))
    zero_excluded(rows, excluded.index_fill_(0, padding, 1))
    return squared_block_sums(rows, step.block), Flags(excluded, bad_gradient, bad_parameter)


def _vacant(step: ObservedStep) -> Tensor:
    """uint8 [slots], 1 where a slot holds no element."""
    found = torch.zeros_like(step.before[PARAMETER], dtype=torch.uint8)
    return found.index_fill_(0, step.tile.padding, 1)


def _fill_effective(step: ObservedStep, parameter: Tensor, visible: Tensor, effective: Tensor) -> None:
    change = effective.copy_(step.after[step.layout.after.stored[-1]])
    if step.residual is None:
        change.sub_(parameter)
    else:
        change.sub_(step.residual).add_(visible)


def _averages_of(step: ObservedStep, update: IntendedUpdate) -> MovingAverages:
    layout = step.layout
    present = {name: [step.after[key] for key in keys] for name, keys in layout.present.items()}
    return MovingAverages(layout.names, update.states, layout.decaying, present, layout.growing)


def _held_by(step: ObservedStep, update: IntendedUpdate, intended: Tensor, registered: Tensor) -> Tensor | None:
    """uint8 [slots], 1 where the residual should not be 0 before the step; None: not known.

    In the first step of a launch the optimizer's averages decide: an element that was stepped and moves now had a
    residual, unless none could be kept before, or such an update leaves none.
    """
    stepped, few = step.launch or (True, False)
    if stepped is False or not step.layout.before.is_sum:
        return torch.zeros_like(step.before[PARAMETER], dtype=torch.uint8)
    if step.launch is None:
        return step.held
    witnessed = update.states[0].ne(0).any(0)
    if update.known:
        witnessed.logical_and_(leaves_residual(intended, registered))
    if few is not False:
        witnessed.logical_and_((_of_one_size(intended) & few).logical_not_())
    if isinstance(stepped, Tensor):
        witnessed.logical_and_(stepped)
    return witnessed.view(torch.uint8)


def _of_one_size(updates: Tensor) -> Tensor:
    """bool [()]: whether all that are not 0 are about as large, as Lion's."""
    sizes = updates.abs()
    return sizes.amax().le(_ABOUT * sizes.masked_fill(sizes.eq(0), torch.inf).amin())


def _copies_of(step: ObservedStep, parameter: Tensor | None) -> Copies:
    """The copies of the tile's weights, before and after; `parameter`: θ before, where all of it is finite."""
    layout = step.layout
    before, after = KeptWeights(step.before, layout.before.stored), KeptWeights(step.after, layout.after.stored)
    start = before.total() if parameter is None or len(before.stored) == 1 else parameter
    ends = [
        StoredWeights(values, None if found is None else found.of(step.tile.blocks), state.rounds_once_to)
        for values, found, state in zip(
            (start, after.total()), step.largest, (layout.before, layout.after), strict=True
        )
    ]
    return Copies(ends[0], ends[1], step.formats)
