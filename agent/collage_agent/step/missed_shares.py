"""Estimates what a bucket's sample misses, by reading whole gradients and momenta every few measured steps.

Only intervals use the estimate: it widens or withdraws them, and changes no total.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from collage_agent.sample.sampling import TensorSample
from collage_agent.stats.block_sums import on_host
from collage_agent.stats.edq import squared_block_sums
from collage_agent.stats.intervals import missed_share, tail_share
from collage_agent.step.gather import BlockLayout
from collage_agent.step.layout import StateLayout
from collage_agent.step.totals import BlockTotals, SampleSizes

__all__ = ["MissedShares"]

_LOOKS_KEPT: Final = 4
_INTENDED: Final = "intended_squared_sum"
_SquareSums = tuple[Tensor, Tensor]
"""Σ x² by block [blocks] of the sample; of whole tensors Σ x² and the largest x² [2, tensors]; fp64."""


class MissedShares:
    """How much of each tensor the sample misses, from one look at whole tensors to the next.

    `shares` fp64 [tensors]: the largest `missed_share` of the last few looks, and the largest `tail_share` of the
    looks before this one, because each step may have another large element. 0 before the first. `unseen` bool
    [tensors]: tensors without a gradient in the sample; None: there are none. A look begins before a step, with its
    gradients, and ends after it, with the momenta and the block totals. It passes twice over each tensor.
    """

    def __init__(self, samples: Sequence[TensorSample], layout: BlockLayout, shares: Tensor) -> None:
        """shares: zeros."""
        self.shares = shares
        self.unseen: Tensor | None = None
        self._samples = samples
        self._layout = layout
        self._gradients: list[_SquareSums] = []
        self._past: deque[Tensor] = deque(maxlen=_LOOKS_KEPT)

    def begin(self, sampled: Tensor | None, gradients: Sequence[Tensor]) -> None:
        """Before the step: the gradients' squares. `sampled`: their gathered values; None: unknown."""
        self._gradients = [] if sampled is None else [self._squares(sampled, gradients)]

    def end(
        self,
        blocks: BlockTotals,
        sizes: SampleSizes,
        layout: StateLayout,
        after: Mapping[str, Tensor],
        states: Sequence[Mapping[str, Any]],
    ) -> None:
        """After the step: add the momenta's squares, and compute how much of Σ u² the blocks miss.

        layout, after, states: the layout of the tensors' states after the step, their gathered values, and the
        states.
        """
        looked_at = [*self._gradients, *self._momentum_squares(layout, after, states)]
        intended = next(part for part in blocks.by_block if _INTENDED in part)[_INTENDED]
        found = [
            missed_share(intended, sampled, whole, sizes.segments, sizes.scale, sizes.blocks, sizes.factor)
            for sampled, whole in looked_at
        ]
        shares = torch.stack(found or [torch.zeros_like(self.shares)])
        # The first is the gradient's, a momentum's where none is known. Where the sample saw none of it, its
        # zeros say nothing of the tensor.
        missed, unseen = shares.amax(0), shares[0].isinf()
        tail = tail_share(intended, sizes.segments, sizes.blocks, sizes.factor)
        self._past.append(torch.maximum(missed.where(missed.isfinite(), 0.0), tail))
        self.shares = torch.stack([missed, *self._past]).amax(0)
        self.unseen = None if on_host(unseen) and not unseen.any() else unseen

    def _momentum_squares(
        self, layout: StateLayout, after: Mapping[str, Tensor], states: Sequence[Mapping[str, Any]]
    ) -> list[_SquareSums]:
        """Covers states with a sign: momenta, to which steps may be proportional.

        Without a sign it is none: a second moment is large where steps are not.
        """
        found = []
        plain = {entry.key for entry in layout.others if entry.plain}
        for name in (average.name for average in layout.averages if average.is_float and average.name in plain):
            values = after[name]
            signed = values.lt(0).any()
            if on_host(signed) and not signed:
                continue
            sampled, whole = self._squares(values, [state[name] for state in states])
            found.append((sampled * signed, whole * signed))
        return found

    def _squares(self, sampled: Tensor, tensors: Sequence[Tensor]) -> _SquareSums:
        rows = sampled.to(torch.float64).unsqueeze(0)
        whole = self._layout.whole_squares(self._samples, tensors)
        return squared_block_sums(rows, self._layout.block)[0], whole
