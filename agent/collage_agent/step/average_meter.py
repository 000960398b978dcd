"""The updates of an average of the weights, on a sample, compared with an fp64 average of the same weights.

`watching/average_watch.py` finds the average and calls it at each update. The statistics are those of
`collage_monitor/statistics/averages.py` (`tests/agent/watching/test_average_watch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from collage_optim.tensor_step import local_part
from torch import Tensor

from collage_agent.sample.sampling import draw
from collage_agent.stats.block_sums import block_sums, flag_counts, nonfinite, zero_excluded
from collage_agent.step.gather import BlockLayout, Staging
from collage_agent.step.measurer import buffer_bytes
from collage_agent.step.totals import SampleSizes
from collage_agent.training.averaged_tensors import AveragedTensor, Share
from collage_monitor.statistics.averages import KEYS
from collage_monitor.totals_table import Axis, Table

__all__ = ["AverageMeter"]

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT_ELEMENTS, _FEWEST_EXACT = 2**13, 64
"""Elements that the fp64 average follows, in all and in each tensor at least: every update carries them along."""
_AXIS: Final = Axis(KEYS)
_OF_UPDATE: Final = ("average_squared_sum", "average_effective_sum", "average_rounding_variance")
_COUNTS: Final = ("average_active", "average_lost", "average_moved", "average_nonfinite")
_OF_EXACT: Final = ("average_stored_squared_sum", "average_exact_squared_sum", "average_drift_squared_sum")
_UNKNOWN_WITHOUT_SHARE: Final = _AXIS.positions([*_OF_UPDATE, "average_active", "average_lost"])
_UNKNOWN_WITHOUT_EXACT: Final = _AXIS.positions(_OF_EXACT[1:])


class AverageMeter:
    """Measures updates of an average. Where weights and average lie on one device, nothing is synchronised.

    Call `update` after each update, and `before` ahead of each one to be measured. Updates are counted since
    `start`, when the fp64 average starts from the stored one.
    """

    def __init__(self, tensors: Sequence[AveragedTensor], sample: int | Literal["all"], seed: int) -> None:
        kinds: dict[tuple[object, ...], list[int]] = {}
        for place, tensor in enumerate(tensors):
            kinds.setdefault(tensor.kind, []).append(place)
        followed = max(_EXACT_ELEMENTS // len(tensors), _FEWEST_EXACT)
        self._updates = 0
        self._exact_known = True
        self._gathered = False
        self._places = list(kinds.values())
        self._buckets = [
            _Bucket([tensors[place] for place in places], sample, followed, seed) for places in self._places
        ]
        self.start()
        known = [part for tensor in tensors for part in (tensor.weight, tensor.average)]
        self.bytes = float(buffer_bytes(self._buckets, known))

    def replace(self, averages: Sequence[Tensor]) -> None:
        """Replace the averages' tensors by these, in the original order."""
        for bucket, places in zip(self._buckets, self._places, strict=True):
            bucket.averages[:] = [averages[place] for place in places]

    def start(self) -> None:
        """The stored average is what the next updates begin with: it was set, or loaded."""
        self._updates = 0
        self._exact_known, self._gathered = True, False
        for bucket in self._buckets:
            bucket.start()

    def before(self) -> None:
        """The next update is measured: keep the values that it will change."""
        self._gathered = True
        for bucket in self._buckets:
            bucket.sample.gather_before()

    def update(self, share: Share) -> list[Table[Tensor]] | None:
        """Note that the average has been updated by `share` of θ − a; returns the result, [statistic][layer] in
        parts, if `before` was called."""
        self._updates += 1
        self._exact_known &= share is not None
        measured, self._gathered = self._gathered, False
        tables = []
        for bucket in self._buckets:
            if share is not None:
                bucket.carry(share)
            if measured:
                array = bucket.measure(share)
                array[0] = self._updates
                # Row by row: a list of places would be copied to the device, which waits for it.
                for row in _UNKNOWN_WITHOUT_SHARE if share is None else ():
                    array[row] = torch.nan
                for row in () if self._exact_known else _UNKNOWN_WITHOUT_EXACT:
                    array[row] = torch.nan
                tables.append(Table(_AXIS, bucket.layers, array))
        return tables if measured else None


class _Sample:
    """Blocks of averaged tensors of one kind and of their weights, gathered to the weights' device."""

    def __init__(
        self, tensors: Sequence[AveragedTensor], averages: Sequence[Tensor], cap: int | Literal["all"], seed: int
    ) -> None:
        self._averages, self._weights = averages, [tensor.weight for tensor in tensors]
        dtypes = local_part(self._weights[0]).dtype, local_part(averages[0]).dtype
        itemsize = min(dtype.itemsize for dtype in dtypes)
        samples = [
            draw(tensor.name, local_part(tensor.average).numel(), itemsize, cap, seed=seed, shard=tensor.shard)
            for tensor in tensors
        ]
        self._layout, self._of_averages = BlockLayout(samples, self._weights), BlockLayout(samples, averages)
        self.block, self.device = self._layout.block, self._layout.device
        self.sizes = SampleSizes(samples, self._layout)
        self._staged = Staging(self._layout, dtypes[0])
        self._before = Staging(self._of_averages, dtypes[1])
        self._after = Staging(self._of_averages, dtypes[1], self._before.views)
        self._wide = torch.zeros(self._layout.slots, dtype=torch.float64, device=self.device)

    def weights(self) -> Tensor:
        """θ, fp64 [slots], until the next call."""
        self._layout.gather(self._weights, self._staged)
        return self._wide.copy_(self._staged.values)

    def gather_before(self) -> None:
        self._of_averages.gather(self._averages, self._before)

    def before(self) -> Tensor:
        """The stored average as `gather_before` found it, fp64 [slots]."""
        return self._before.values.to(self.device).to(torch.float64)

    def stored(self) -> Tensor:
        """The stored average, in its own dtype [slots]."""
        self._of_averages.gather(self._averages, self._after)
        return self._after.values.to(self.device)


class _Bucket:
    """Averaged tensors of one kind: a sample of their updates, and a smaller one that an fp64 average follows.

    exact, base: the fp64 average now and at the start, [slots]; seen: bits of the stored one when last looked at.
    """

    def __init__(
        self, tensors: Sequence[AveragedTensor], sample: int | Literal["all"], followed: int, seed: int
    ) -> None:
        self.averages = [tensor.average for tensor in tensors]
        self.layers = Axis(tensor.name for tensor in tensors)
        self.sample = self._followed = _Sample(tensors, self.averages, sample, seed)
        if sample != "all" and max(local_part(average).numel() for average in self.averages) > followed:
            self._followed = _Sample(tensors, self.averages, min(sample, followed), seed)
        self._of_sample = self.sample.sizes.factors((*_OF_UPDATE, *_COUNTS))
        self._of_followed = self._followed.sizes.factors(_OF_EXACT)

    def start(self) -> None:
        stored = self.sample.stored()
        self._seen = _bits(stored).clone()
        self._moved = torch.zeros(len(stored), dtype=torch.bool, device=stored.device)
        self._exact = self._followed.stored().to(torch.float64, copy=True)
        self._base = self._exact.clone()

    def carry(self, share: float | Tensor) -> None:
        """Update the fp64 average as the stored one was."""
        weights = self._followed.weights()
        if isinstance(share, Tensor):
            self._exact.lerp_(weights, share.to(weights))
        else:
            self._exact.lerp_(weights, share)

    def measure(self, share: Share) -> Tensor:
        """Estimated totals, fp64 [statistics, tensors]; without a share those of the update alone are void."""
        of_update = self._measure_update(share)
        elements = (self.sample.sizes.elements - of_update[6]).unsqueeze(0)
        return torch.cat((torch.zeros_like(elements), of_update[:5], elements, of_update[5:], self._measure_way()))

    def _measure_update(self, share: Share) -> Tensor:
        """Totals of _OF_UPDATE and _COUNTS."""
        sample = self.sample
        stored, before = sample.stored(), sample.before()
        bits = _bits(stored)
        self._moved.logical_or_(bits != self._seen)
        self._seen.copy_(bits)
        intended = sample.weights().sub_(before).mul_(1.0 if share is None else share)
        effective = stored.to(torch.float64) - before
        excluded = nonfinite(intended + effective)
        rows = torch.stack((intended * intended, intended * effective))
        zero_excluded(rows, excluded)
        known = excluded == 0
        active = intended.ne(0).logical_and_(known)
        flags = torch.stack((active, active & effective.eq(0), self._moved & known, ~known))
        sums = block_sums(rows, sample.block)
        variance = (sums[1] - sums[0]).square_().unsqueeze(0)
        by_block = torch.cat((sums, variance, flag_counts(flags, sample.block)))
        return sample.sizes.segments.sums(by_block).mul(self._of_sample)

    def _measure_way(self) -> Tensor:
        """Totals of _OF_EXACT: the movement of the stored average and of the fp64 one, and their difference."""
        stored = self._followed.stored().to(torch.float64)
        moved, exact, drift = stored - self._base, self._exact - self._base, stored - self._exact
        rows = torch.stack((moved * moved, exact * exact, drift * drift))
        zero_excluded(rows, nonfinite(moved + exact))
        sums = block_sums(rows, self._followed.block)
        return self._followed.sizes.segments.sums(sums).mul(self._of_followed)


def _bits(values: Tensor) -> Tensor:
    return values.view(_INTEGERS[values.element_size()])
