"""One chunk of a bucket's sample: from gathered values before and after the step to block totals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from collage_agent.buckets.intended import Before, Intended, Values
from collage_agent.buckets.keeping import Sums, average_sums, decay_sums, residual_of, residual_sums
from collage_agent.sample import stored
from collage_agent.stats import (
    COUNTERFACTUAL_SUMS,
    class_codes,
    count_classes,
    counterfactual_block_sums,
    edq_block_sums,
    edq_products,
    leave_out,
    nonfinite,
    on_host,
    squared_block_sums,
    ulp_octave_counts,
)

__all__ = ["BlockTotals", "Chunk", "Observation"]


@dataclass
class BlockTotals:
    """What blocks add up to, before tensors are told apart.

    squares: Σ θ², g², e², eᵛ², u²; products: Σ u·e, u·eᵛ; classes: rows of CLASS_COUNTS; fp64 [rows, blocks].
    further: sums that not every optimizer has, with their keys. octaves: of updates, fills: of residuals, fp64
    [BINS, tensors].
    """

    squares: Tensor
    products: Tensor
    classes: Tensor
    further: list[Sums]
    octaves: Tensor
    fills: Tensor


@dataclass(frozen=True)
class Observation(Before):
    """A run of gathered slots before and after the live step.

    `columns` [blocks] int64 names each block's tensor of `tensors`; `padding` lists slots that hold nothing;
    `scales` fp64 [blocks] are those of fp8 where counterfactuals are asked for.
    """

    after: Values
    block: int
    columns: Tensor
    tensors: int
    padding: Tensor
    scales: Tensor | None


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
        self._averages = Intended(observation, self.parameter, self.gradient, self.intended)
        self.visible_parameter = parameter.to(torch.float64) if self._apart else self.parameter
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

    def totals(self, octaves: Tensor, fills: Tensor) -> BlockTotals:
        """The chunk's block totals; its histograms of updates and residuals are added to `octaves` and `fills`."""
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
        if self._averages.known:
            octaves += ulp_octave_counts(
                self.intended,
                seen.before[stored.PARAMETER],
                seen.before[stored.PARAMETER].dtype,
                seen.columns,
                seen.tensors,
                block,
            )
        return BlockTotals(squares, products, count_classes(codes, block), self._further(fills), octaves, fills)

    def _further(self, fills: Tensor) -> list[Sums]:
        seen, block = self._seen, self._seen.block
        padding = len(seen.padding)
        found = average_sums(seen, self._averages, seen.after, self.gradient, self.left_out, padding, block)
        squares = None if self._apart else self._squares[0]
        found += decay_sums(seen, self.visible_parameter, squares, self.left_out, block)
        residual = residual_of(seen, seen.after)
        if residual is not None:
            found.append(residual_sums(seen, residual, self.left_out, block))
            parameter = seen.before[stored.PARAMETER]
            fills += ulp_octave_counts(
                residual, parameter, parameter.dtype, seen.columns, seen.tensors, block, gaps=0.5
            )
        if seen.scales is not None and self._averages.known:
            sums = counterfactual_block_sums(self.parameter, self.intended, seen.scales, block)
            found.append((COUNTERFACTUAL_SUMS, sums))
        return found

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

    def _fill_effective(self, stored_after: list[str]) -> None:
        before, after = self._seen.before, self._seen.after
        if stored.PARAMETER not in stored_after:
            self.effective.copy_(after[stored_after[0]]).sub_(self.parameter)
            return
        self.effective.copy_(self.visible)
        for key in stored_after[1:]:
            change = after[key].to(torch.float64)
            self.effective.add_(change.sub_(before[key]) if key in before else change)
