"""Totals of a step's updates, added up while the step has them in registers: of all elements, without a sample.

`advance_and_add` makes a step and returns its sums, in torch's operations: recorded by `device_code.py`, it is the
kernel that steps and adds. u is the rule in fp64, as in `CollageOptimizer.exact_displacement`; e and the counts are
those of the agent's own measures, whose names the sums have (`tests/agent/step/test_kernel_totals.py`).

A kernel leaves a row of sums for each chunk. `added_by_tensor` adds the rows in groups, then the groups of each
tensor. In whatever order a level adds, n terms are off by at most (c + g + n / (c · g)) · 2^-53 of the sum of their
sizes, for chunks of c elements and groups of g rows: by 6e-13 for 10^9 terms. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from collage_optim import integer_codes
from collage_optim.advance import Step, advance_in_wide
from collage_optim.arithmetic import Scalar, State, WideArithmetic
from collage_optim.device_code import built
from collage_optim.random_numbers import RandomSource
from collage_optim.strategies import MASTER_PARAMETER, PARAMETER_LOW, StateStorage

__all__ = ["GROUP_ROWS", "FoundTotals", "StepTotals", "added_by_tensor", "advance_and_add", "groups_of"]

GROUP_ROWS: Final = 256
"""Rows that one program adds."""
_BLOCK_BYTES: Final = 64
"""Of a block of elements, the agent's sampling unit: rounding errors are squared after they are added in one."""
_COUNT_BITS: Final = 12
_COUNTS: Final = 5
"""A chunk's count takes so many bits, and so many counts are added as one integer."""

_ADDING = """
import triton
import triton.language as tl


@triton.jit
def added(rows, sums, groups, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr):
    first = tl.load(groups + 2 * tl.program_id(0)).to(tl.int64)
    count = tl.load(groups + 2 * tl.program_id(0) + 1)
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros([AT_ONCE, COLUMNS], tl.float64)
    for start in range(0, count, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        places = (first + row)[:, None] * COLUMNS + columns[None, :]
        total += tl.load(rows + places, mask=(row < count)[:, None], other=0.0)
    tl.store(sums + tl.program_id(0).to(tl.int64) * COLUMNS + columns, tl.sum(total, axis=0))
"""


class FoundTotals(NamedTuple):
    """Sums of one step over each of some parameters: fp64 [parameters, at least names], in the order of `names`."""

    parameters: Sequence[Tensor]
    names: tuple[str, ...]
    sums: Tensor


@dataclass
class StepTotals:
    """What a step has added up, by launches. Set as an optimizer's `step_totals` before the step, it asks for that.

    Only kernels add up; what is stepped otherwise is not among `found`. A shard's sums are those of the part
    that is here.
    """

    found: list[FoundTotals] = field(default_factory=list)


@dataclass(frozen=True)
class _Stored:
    """What a chunk keeps, fp64: the registered and the stored weight, its low component as floats, and averages."""

    visible: Tensor
    weight: Tensor
    low: Tensor | None
    averages: State

    @classmethod
    def of(cls, step: Step, chunk: State) -> _Stored:
        storage, low = step.strategy.parameter, chunk.get(PARAMETER_LOW)
        if storage is StateStorage.WIDE:
            weight = chunk[MASTER_PARAMETER].to(torch.float64, copy=True)
        else:
            weight = _loaded(chunk, "parameter", storage)
        averages = {
            moment.name: _loaded(chunk, moment.name, step.strategy.moment_storage(moment.second))
            for moment in step.moments
        }
        low = low.to(torch.float64, copy=True) if low is not None and low.dtype.is_floating_point else None
        return cls(chunk["parameter"].to(torch.float64, copy=True), weight, low, averages)


def _loaded(chunk: State, name: str, storage: StateStorage) -> Tensor:
    """The stored value in fp64, exactly."""
    wide = torch.float32 if storage.is_coded else torch.float64
    return integer_codes.load(WideArithmetic(None, wide, torch.float64), chunk, name, storage).to(torch.float64)


def advance_and_add(
    step: Step,
    arithmetic: WideArithmetic,
    chunk: State,
    scalars: Mapping[str, Scalar],
    exact: Mapping[str, Scalar],
    source: RandomSource | None = None,
) -> dict[str, Tensor]:
    """`advance_in_wide` of a chunk, of at most CHUNK_ELEMENTS and in whole blocks; its sums, fp64 [()] each.

    exact: the rule's numbers in double precision. Elements that are not finite in θ, g, u or e are counted, and
    enter no sum; see the measures of `collage_agent.stats` for the others.
    """
    before = _Stored.of(step, chunk)
    gradient = chunk["gradient"].to(torch.float64, copy=True)
    averages = {name: own.clone() for name, own in before.averages.items()}
    intended = step.rule.displacement(
        WideArithmetic(None, torch.float64, torch.float64),
        before.weight,
        -gradient if step.maximize else gradient,
        averages,
        exact,
    )
    advance_in_wide(step, arithmetic, chunk, scalars, source)
    after = _Stored.of(step, chunk)
    visible = after.visible - before.visible
    effective = after.weight - before.weight
    if before.low is not None and after.low is not None:
        effective = after.low - before.low + visible
    is_visible = step.strategy.parameter_state is None
    bad = _any(map(_nonfinite, (gradient, intended, before.weight, after.weight, before.visible, after.visible)))
    rows = {"parameter": before.weight, "gradient": gradient, "intended": intended, "effective": effective}
    rows["visible"] = effective if is_visible else visible
    rows = {name: torch.where(bad, 0.0, row) for name, row in rows.items()}
    states = {name: (before.averages[name], averages[name], after.averages[name]) for name in after.averages}
    block = _BLOCK_BYTES // step.dtype.itemsize
    flags = {"nonfinite": bad, "nonfinite_gradients": _nonfinite(gradient)}
    flags["nonfinite_parameters"] = _nonfinite(after.visible)
    flags.update(_classes(rows, bad))
    flags.update(_zero_states(rows["gradient"], states, bad, step.dtype))
    found = _update_sums(rows, block)
    for moment in step.moments:
        if moment.decay is not None:
            found.update(_decrements(moment.name, *states[moment.name], bad, block))
    return found | _counted(flags)


def _update_sums(rows: State, block: int) -> dict[str, Tensor]:
    found = {f"{name}_squared_sum": (row * row).sum() for name, row in rows.items()}
    intended = rows["intended"]
    product = rows["effective"] * intended
    found["intended_effective_sum"] = product.sum()
    found["intended_visible_sum"] = (rows["visible"] * intended).sum()
    found["rounding_variance"] = _squared_by_block(product - intended * intended, block)
    # A block's largest square is above 0 where one of its u is.
    moved = intended.ne(0).to(torch.int64).view(-1, block).sum(1)
    found["active_blocks"] = moved.ne(0).to(torch.int64).sum().to(torch.float64)
    return found


def _squared_by_block(errors: Tensor, block: int) -> Tensor:
    sums = errors.view(-1, block).sum(1)
    return (sums * sums).sum()


def _classes(rows: State, bad: Tensor) -> dict[str, Tensor]:
    """Which elements are of which class; those that are not finite are 0 in all rows."""
    intended, effective, visible = rows["intended"], rows["effective"], rows["visible"]
    counted, moved, still = ~bad, effective.ne(0), effective.eq(0)
    idle, active = intended.eq(0) & counted, intended.ne(0)
    far = (effective - intended).abs() > intended.abs() * 0.5
    return {
        "idle": idle,
        "stray": idle & moved,
        "lost": active & still,
        "distorted": active & moved & far,
        "reversed": effective * intended < 0,
        "faithful": active & moved & ~far,
        "lost_visible": active & visible.eq(0),
        "unchanged": visible.eq(0) & counted,
    }


def _zero_states(
    gradient: Tensor, states: Mapping[str, tuple[Tensor, ...]], bad: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Where g is not 0, and of these, which states are; of float16 weights, also which are not finite."""
    nonzero = gradient.ne(0)
    found = {"gradient_nonzero": nonzero}
    for name, (*_, stored) in states.items():
        found[f"state_zero/{name}"] = stored.eq(0) & nonzero
        if dtype == torch.float16:
            found[f"state_infinite/{name}"] = _nonfinite(stored) & ~bad
    return found


def _decrements(
    name: str, before: Tensor, exact: Tensor, stored: Tensor, bad: Tensor, block: int
) -> dict[str, Tensor]:
    """Σ (|s after| − |s before|) of an average, intended and as stored, where |s| should shrink."""
    size = before.abs()
    intended = exact.abs() - size
    shrinks = intended.lt(0) & ~bad
    intended, observed = (torch.where(shrinks, change, 0.0) for change in (intended, stored.abs() - size))
    return {
        f"state_decrement_intended_sum/{name}": intended.sum(),
        f"state_decrement_observed_sum/{name}": observed.sum(),
        f"state_rounding_variance/{name}": _squared_by_block(observed - intended, block),
    }


def _counted(flags: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How many flags are set. Several counts are added at once, each in bits of its own: a sum over a chunk, across
    threads, costs a device as much as some operations on all its elements."""
    names, found = list(flags), {}
    for start in range(0, len(names), _COUNTS):
        some = names[start : start + _COUNTS]
        word = flags[some[0]].to(torch.int64)
        for place, name in enumerate(some[1:], start=1):
            word = word + flags[name].to(torch.int64) * (1 << _COUNT_BITS * place)
        together = word.sum()
        for place, name in enumerate(some):
            count = (together >> _COUNT_BITS * place) & ((1 << _COUNT_BITS) - 1)
            found[name] = count.to(torch.float64)
    return found


def _nonfinite(values: Tensor) -> Tensor:
    return (values - values).ne(0)


def _any(flags: Any) -> Tensor:
    first, *others = flags
    for other in others:
        first = first | other
    return torch.as_tensor(first)


def groups_of(counts: NDArray[numpy.int64]) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
    """Of tensors with so many rows each, one after the other: the first row of each group and its rows, int32
    [groups, 2], and the first group of each tensor and its groups, int32 [tensors, 2]."""
    groups = -(-counts // GROUP_ROWS)
    first_group = numpy.cumsum(groups) - groups
    within = numpy.arange(groups.sum()) - numpy.repeat(first_group, groups)
    first = numpy.repeat(numpy.cumsum(counts) - counts, groups) + within * GROUP_ROWS
    rows = numpy.minimum(numpy.repeat(counts, groups) - within * GROUP_ROWS, GROUP_ROWS)
    by_group, by_tensor = numpy.stack((first, rows), 1), numpy.stack((first_group, groups), 1)
    return by_group.astype(numpy.int32), by_tensor.astype(numpy.int32)


def added_by_tensor(rows: Tensor, by_group: Tensor, by_tensor: Tensor) -> Tensor:
    """The rows of sums, fp64 [chunks, columns], of each tensor together: fp64 [tensors, columns].

    columns: a power of two. The others as `groups_of` made them, on the device. The order of additions is fixed.
    Raises ImportError without Triton. No synchronisation.
    """
    added = _adding()
    for groups in (by_group, by_tensor):
        sums = rows.new_empty(len(groups), rows.shape[1])
        added[(len(groups),)](rows, sums, groups, COLUMNS=rows.shape[1], AT_ONCE=16)
        rows = sums
    return rows


@lru_cache(maxsize=1)
def _adding() -> Any:
    return built("added", _ADDING)
