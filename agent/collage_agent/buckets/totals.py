"""From a bucket's block totals to estimated totals of its tensors, in the catalogue's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from collage_agent.buckets.bucket import Bucket, Followed
from collage_agent.buckets.chunk import BlockTotals
from collage_agent.sample.gather import BlockLayout
from collage_agent.sample.sampling import TensorSample
from collage_agent.stats import (
    CLASS_COUNTS,
    RESIDUAL_SUMS,
    Columns,
    edq_block_sums,
    leave_out,
    nonfinite,
    on_host,
    population_factor,
    product_rows,
    ratio_variances,
    squared_block_sums,
)
from collage_monitor.metrics import HISTOGRAM_LABELS, split_key

__all__ = ["BASE_STATISTICS", "ORACLE_STATISTICS", "SampleSizes", "bucket_totals", "oracle_totals"]

_SQUARES: Final = (
    "parameter_squared_sum",
    "gradient_squared_sum",
    "effective_squared_sum",
    "visible_squared_sum",
    "intended_squared_sum",
)
_PRODUCTS: Final = ("intended_effective_sum", "intended_visible_sum")
_RATIOS: Final = ("edq_ratio", "edq_visible_ratio", "lost_update_ratio", "lost_visible_ratio")
"""Metrics with an interval: two over Σ u², two over the active elements, in the order of the block totals."""
_UPDATES: Final = len(_SQUARES)
_CLASSES: Final = _UPDATES + len(_PRODUCTS)
_NONFINITE: Final = len(_SQUARES) + len(_PRODUCTS) + CLASS_COUNTS.index("nonfinite")
_HISTOGRAM: Final = tuple(f"update_ulp_histogram/{label}" for label in HISTOGRAM_LABELS)
_FILLS: Final = tuple(f"residual_fill_histogram/{label}" for label in HISTOGRAM_LABELS)
_KNOWN_WITHOUT_INTENT: Final = frozenset(
    {
        *("measured_steps", "elements", "sampled", "parameter_squared_sum", "gradient_squared_sum"),
        *("effective_squared_sum", "visible_squared_sum", "nonfinite", "unchanged"),
        *("nonfinite_gradients", "nonfinite_parameters", "decay_kept_sum", "decay_squared_sum"),
        *(*RESIDUAL_SUMS, "residual_nonfinite", "residual_fill_histogram"),
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
    *_variance_keys(_RATIOS),
)
ORACLE_STATISTICS: Final = (
    *("oracle_steps", "oracle_sampled", "oracle_elements", "oracle_active_blocks"),
    *("oracle_squared_sum", "oracle_intended_squared_sum", "oracle_displacement_squared_sum"),
    "oracle_drift_squared_sum",
    *("oracle_effective_sum", "oracle_displacement_effective_sum"),
    *_variance_keys(("edq_oracle_ratio",)),
)


class SampleSizes:
    """Sizes of a layout's samples, fp64 [tensors] on its device: made once, so that no step copies them there."""

    def __init__(self, samples: Sequence[TensorSample], layout: BlockLayout) -> None:
        device = layout.device

        def vector(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(device)

        self.columns = Columns(layout.columns, len(samples))
        self.elements = vector([sample.elements for sample in samples])
        self.sampled = vector([sample.sampled for sample in samples])
        self.blocks = vector([sample.blocks for sample in samples])
        self.factor = population_factor(self.blocks, vector([sample.population_blocks for sample in samples]))
        self.slots = self.blocks * samples[0].block
        self.scale = self.elements / self.sampled
        self.fixed = torch.stack((torch.ones_like(self.elements), self.elements, self.sampled))


def bucket_totals(bucket: Bucket, sizes: SampleSizes, blocks: BlockTotals) -> tuple[tuple[str, ...], Tensor]:
    """Keys, and estimated totals fp64 [keys, tensors], of one measured step.

    Sums and counts are multiplied by elements / sampled; `sampled` and `active_blocks` are raw. Without an
    intended update everything that needs it is NaN. No synchronisation.
    """
    lost, _, distorted, faithful = blocks.classes[:4]
    active = (lost + distorted).add_(faithful).unsqueeze(0)
    further = tuple(key for keys, _ in blocks.further for key in keys)
    some = active.clamp(max=1.0)
    numerators = torch.stack((blocks.products, blocks.classes[:2]))
    denominators = torch.cat((blocks.squares[-1:], active))
    products = product_rows(numerators, denominators)
    sums = sizes.columns.sums(
        torch.cat(
            (
                products,
                blocks.squares,
                blocks.products,
                blocks.classes,
                active,
                some,
                *(rows for _, rows in blocks.further),
            )
        )
    )
    products, sums = sums[: len(products)], sums[len(products) :]
    named = len(_SQUARES) + len(_PRODUCTS) + len(CLASS_COUNTS)
    # nonfinite is corrected in place, in rows that the variances do not use.
    idle, octaves = _without_padding(sums[:named], sums[named], blocks.octaves, sizes)
    variances = ratio_variances(
        products,
        torch.stack((sums[_UPDATES:_CLASSES], sums[_CLASSES : _CLASSES + 2])),
        torch.stack((sums[_UPDATES - 1], sums[named])),
        sizes.blocks,
        sizes.factor,
    )
    _finish_further(further, sums[named + 2 :], sums[_NONFINITE], sizes)
    fills = _fills(further, sums[named + 2 :], blocks.fills, sizes)
    estimated = torch.cat((sums[:named], idle, octaves, sums[named + 2 :], *fills)) * sizes.scale
    first_further = named + 1 + len(_HISTOGRAM)
    totals = torch.cat(
        (
            sizes.fixed,
            sums[named + 1 : named + 2],
            estimated[:first_further],
            variances.flatten(0, 1),
            estimated[first_further:],
        )
    )
    keys = BASE_STATISTICS + further + (_FILLS if fills else ())
    for row in _unknown(bucket, keys):
        totals[row].fill_(torch.nan)
    return keys, totals


def _unknown(bucket: Bucket, keys: Sequence[str]) -> list[int]:
    """Rows that a bucket without u, or without a gradient, cannot know."""
    without_intent = bucket.intent.kind == "before-after"
    if bucket.knows_gradient and not without_intent:
        return []
    unknown = set() if bucket.knows_gradient else {"gradient_squared_sum", "nonfinite_gradients"}
    if without_intent:
        unknown |= {key for key in keys if split_key(key)[0] not in _KNOWN_WITHOUT_INTENT}
    return [row for row, key in enumerate(keys) if key in unknown]


def oracle_totals(followed: Followed, sizes: SampleSizes) -> Tensor:
    """Estimated totals of one oracle, fp64 [ORACLE_STATISTICS, its tensors]. No synchronisation."""
    oracle = followed.oracle
    intended, effective, after = followed.rows
    ours = oracle.parameter - oracle.attached
    theirs = after - oracle.attached
    rows = torch.stack((oracle.displacement, intended, ours, theirs - ours, effective, theirs))
    squares, products = _oracle_block_sums(followed, rows)
    pairs = product_rows(products[:1].unsqueeze(0), squares[:1])
    sums = sizes.columns.sums(torch.cat((pairs, squares, products, (squares[:1] > 0).double())))
    pairs, sums = sums[:3], sums[3:]
    numerators, denominators = sums[len(squares) : len(squares) + 1].unsqueeze(0), sums[:1]
    variances = ratio_variances(pairs, numerators, denominators, sizes.blocks, sizes.factor)
    steps = torch.full_like(sizes.elements, float(oracle.steps))
    return torch.cat(
        (
            torch.stack((steps, sizes.sampled, sizes.elements)),
            sums[-1:],
            sums[:-1] * sizes.scale,
            variances.flatten(0, 1),
        )
    )


def _oracle_block_sums(followed: Followed, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Σ x² of o, u, E, E − O, and Σ o·e, Σ E·O, by block, of rows o, u, O, E − O, e, E; not finite: left out."""
    block, padding = followed.oracle.layout.block, followed.padding
    if len(padding):
        rows.index_fill_(1, padding, 0.0)
    squares, products = _squares_and_products(rows, block)
    # Where the host can see that all is finite and nothing was left out, nothing needs to be looked for.
    if (
        on_host(rows)
        and np.isfinite(squares.numpy().sum() + products.numpy().sum())
        and np.count_nonzero(followed.left_out.numpy()) == len(padding)
    ):
        return squares, products
    left_out = nonfinite(rows.sum(0)).bitwise_or_(followed.left_out).index_fill_(0, padding, 1)
    leave_out(rows, left_out)
    return _squares_and_products(rows, block)


def _squares_and_products(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    products = torch.stack((rows[0] * rows[4], rows[2] * rows[5]))
    return squared_block_sums(rows[:4], block), edq_block_sums(products, block)


def _without_padding(sums: Tensor, active: Tensor, octaves: Tensor, sizes: SampleSizes) -> tuple[Tensor, Tensor]:
    """Take padded slots out of `nonfinite`, in place; idle elements; and the histogram of non-idle elements.

    u = 0 had been counted as underflow. Counts are whole numbers: the differences are exact.
    """
    nonfinite = sums[_NONFINITE]
    nonfinite -= sizes.slots - sizes.sampled
    idle = sizes.sampled - nonfinite - active
    octaves = octaves.clone()
    octaves[0] -= sizes.slots - active
    return idle.unsqueeze(0), octaves


def _finish_further(keys: Sequence[str], sums: Tensor, nonfinite: Tensor, sizes: SampleSizes) -> None:
    """Elements with g ≠ 0 from those with g = 0, in place."""
    if "gradient_nonzero" in keys:
        row = sums[keys.index("gradient_nonzero")]
        torch.sub(sizes.sampled - nonfinite, row, out=row)


def _fills(keys: Sequence[str], sums: Tensor, fills: Tensor, sizes: SampleSizes) -> list[Tensor]:
    """The histogram of residuals that are not zero, which had been counted as underflow; none without residuals."""
    if "residual_zero" not in keys:
        return []
    filled = sums[keys.index("residual_elements")] - sums[keys.index("residual_zero")]
    corrected = fills.clone()
    corrected[0] -= sizes.slots - filled
    return [corrected]
