"""From a bucket's block totals to estimated totals of its tensors, in the catalogue's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from collage_agent.bucket import Bucket, Followed
from collage_agent.chunk import BlockTotals
from collage_agent.sampling import TensorSample
from collage_agent.stats import (
    CLASS_COUNTS,
    column_sums,
    edq_block_sums,
    leave_out,
    ratio_variances,
    squared_block_sums,
)
from collage_monitor.metrics import HISTOGRAM_LABELS

__all__ = ["BASE_STATISTICS", "ORACLE_STATISTICS", "SampleSizes", "bucket_totals", "oracle_totals"]

_SQUARES: Final = (
    "parameter_squared_sum",
    "gradient_squared_sum",
    "effective_squared_sum",
    "visible_squared_sum",
    "intended_squared_sum",
)
_PRODUCTS: Final = ("intended_effective_sum", "intended_visible_sum")
_RATIOS: Final = {
    "edq_ratio": (1, 0),
    "edq_visible_ratio": (2, 0),
    "lost_update_ratio": (3, 5),
    "lost_visible_ratio": (4, 5),
}
"""Metric → rows (numerator, denominator) of Σ u², u·e, u·eᵛ, lost, lost_visible, active."""
_HISTOGRAM: Final = tuple(f"update_ulp_histogram/{label}" for label in HISTOGRAM_LABELS)
_KNOWN_WITHOUT_INTENT: Final = frozenset(
    {
        *("measured_steps", "elements", "sampled", "parameter_squared_sum", "gradient_squared_sum"),
        *("effective_squared_sum", "visible_squared_sum", "nonfinite", "unchanged"),
        *("nonfinite_gradients", "nonfinite_parameters"),
    }
)


def _variance_keys(metrics: Sequence[str]) -> tuple[str, ...]:
    names = ("variance_numerator", "variance_denominator", "covariance")
    return tuple(f"{name}/{metric}" for name in names for metric in metrics)


BASE_STATISTICS: Final = (
    *("measured_steps", "elements", "sampled", "active_blocks"),
    *_SQUARES,
    *_PRODUCTS,
    *CLASS_COUNTS,
    "idle",
    *_HISTOGRAM,
    *_variance_keys(tuple(_RATIOS)),
)
ORACLE_STATISTICS: Final = (
    *("oracle_steps", "oracle_sampled", "oracle_elements", "oracle_active_blocks"),
    *("oracle_squared_sum", "oracle_intended_squared_sum", "oracle_displacement_squared_sum"),
    "oracle_drift_squared_sum",
    *("oracle_effective_sum", "oracle_displacement_effective_sum"),
    *_variance_keys(("edq_oracle_ratio",)),
)


class SampleSizes:
    """Sizes of a bucket's samples, fp64 [tensors] on its device: made once, so that no step copies them there."""

    def __init__(self, samples: Sequence[TensorSample], device: torch.device) -> None:
        def vector(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(device)

        self.elements = vector([sample.elements for sample in samples])
        self.sampled = vector([sample.sampled for sample in samples])
        self.blocks = vector([sample.blocks for sample in samples])
        self.population_blocks = vector([sample.population_blocks for sample in samples])
        self.slots = self.blocks * samples[0].block
        self.scale = self.elements / self.sampled
        self.fixed = torch.stack((torch.ones_like(self.elements), self.elements, self.sampled))


def bucket_totals(bucket: Bucket, sizes: SampleSizes, blocks: BlockTotals) -> tuple[tuple[str, ...], Tensor]:
    """Keys, and estimated totals fp64 [keys, tensors], of one measured step.

    Sums and counts are multiplied by elements / sampled; `sampled` and `active_blocks` are raw. Without an
    intended update everything that needs it is NaN. No synchronisation.
    """
    columns, count = bucket.layout.columns, len(bucket.members)
    active = blocks.classes[_rows("lost", "distorted", "faithful")].sum(0, keepdim=True)
    decrements = list(blocks.decrements.values())
    stacked = torch.cat(
        (blocks.squares, blocks.products, blocks.classes, active, (active > 0).double(), *decrements)
    )
    sums = column_sums(stacked, columns, count)
    first_class = len(_SQUARES) + len(_PRODUCTS)
    last_class = first_class + len(CLASS_COUNTS)
    idle, octaves = _without_padding(sums[first_class : last_class + 1], blocks.octaves, sizes)
    estimated = torch.cat((sums[:last_class], idle, octaves, sums[last_class + 2 :])) * sizes.scale
    variances = ratio_variances(
        torch.cat((blocks.squares[-1:], blocks.products, blocks.classes[_rows("lost", "lost_visible")], active)),
        list(_RATIOS.values()),
        columns,
        sizes.blocks,
        sizes.population_blocks,
    )
    named = len(_SQUARES) + len(_PRODUCTS) + len(CLASS_COUNTS) + 1 + len(_HISTOGRAM)
    totals = torch.cat(
        (
            sizes.fixed,
            sums[last_class + 1 : last_class + 2],
            estimated[:named],
            variances.flatten(0, 1),
            estimated[named:],
        )
    )
    keys = BASE_STATISTICS + tuple(
        f"state_decrement_{kind}_sum/{name}" for name in blocks.decrements for kind in ("observed", "intended")
    )
    unknown = set(keys) - _KNOWN_WITHOUT_INTENT if bucket.intent.kind == "before-after" else set()
    if not bucket.knows_gradient:
        unknown |= {"gradient_squared_sum", "nonfinite_gradients"}
    if unknown:
        totals[[row for row, key in enumerate(keys) if key in unknown]] = torch.nan
    return keys, totals


def oracle_totals(followed: Followed, sizes: SampleSizes) -> Tensor:
    """Estimated totals of one oracle, fp64 [ORACLE_STATISTICS, its tensors]. No synchronisation."""
    oracle, layout = followed.oracle, followed.oracle.layout
    intended, effective, after = followed.rows
    ours = oracle.parameter - oracle.attached
    theirs = after - oracle.attached
    rows = torch.stack((oracle.displacement, intended, ours, theirs - ours, effective, theirs))
    leave_out(rows, followed.padding, followed.left_out)
    squares = squared_block_sums(rows[:4], layout.block)
    products = torch.cat(
        (edq_block_sums(rows[0], rows[4:5], layout.block), edq_block_sums(rows[2], rows[5:], layout.block))
    )
    columns = oracle.layout.columns
    count = len(oracle.members)
    sums = column_sums(torch.cat((squares, products, (squares[:1] > 0).double())), columns, count)
    variances = ratio_variances(
        torch.cat((squares[:1], products[:1])), [(1, 0)], columns, sizes.blocks, sizes.population_blocks
    )
    steps = torch.full_like(sizes.elements, float(oracle.steps))
    return torch.cat(
        (
            torch.stack((steps, sizes.sampled, sizes.elements)),
            sums[-1:],
            sums[:-1] * sizes.scale,
            variances.flatten(0, 1),
        )
    )


def _rows(*names: str) -> list[int]:
    return [CLASS_COUNTS.index(name) for name in names]


def _without_padding(classes: Tensor, octaves: Tensor, sizes: SampleSizes) -> tuple[Tensor, Tensor]:
    """Take padded slots out of `nonfinite`, in place; idle elements; and the histogram of non-idle elements.

    `classes` are the sums of the classes with the active elements as last row; u = 0 had been counted as
    underflow. Counts are whole numbers: the differences are exact.
    """
    nonfinite, active = classes[0], classes[-1]
    nonfinite -= sizes.slots - sizes.sampled
    idle = sizes.sampled - nonfinite - active
    octaves = octaves.clone()
    octaves[0] -= sizes.slots - active
    return idle.unsqueeze(0), octaves
