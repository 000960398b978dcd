"""Several steps together: the sums of windows of steps, and the oracle's step and displacement beside ours.

`step/windows.py` and `step/oracle.py` keep what these compare. Names, merge rules and metrics are defined in
`collage_monitor/statistics/several_steps.py`, and both files change together.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from collage_agent.stats.block_sums import block_sums, nonfinite, sum_is_finite, zero_excluded
from collage_agent.stats.edq import squared_block_sums, squared_difference
from collage_agent.stats.step_view import named
from collage_monitor.totals_table import Table

__all__ = ["ORACLE_SUMS", "WINDOW_SUMS", "oracle_block_sums", "window_block_sums"]

WINDOW_SUMS: Final = (
    "window_intended_squared_sum",
    "window_intended_effective_sum",
    "window_effective_squared_sum",
    "window_intended_visible_sum",
    "window_visible_squared_sum",
    "window_active",
    "window_lost",
    "window_lost_visible",
    "window_rounding_variance",
)
"""Rows of `window_block_sums`."""
_SQUARES: Final = (
    "oracle_squared_sum",
    "oracle_intended_squared_sum",
    "oracle_displacement_squared_sum",
    "oracle_drift_squared_sum",
)
_PRODUCTS: Final = ("oracle_effective_sum", "oracle_displacement_effective_sum")
ORACLE_SUMS: Final = (*_SQUARES, *_PRODUCTS, "oracle_rounding_variance")


def window_block_sums(intended: Tensor, effective: Tensor, visible: Tensor, block: int) -> Table[Tensor]:
    """Σ U², U·E, E², U·Eᵛ, Eᵛ², elements with U ≠ 0, of those E = 0, Eᵛ = 0, and (Σ U·E − Σ U²)², by block.

    U = Σ u over the window, E = θ now − θ at its start and Eᵛ: fp64 [slots]. Returns fp64 [9, blocks]; sums in
    weight². No synchronisation.
    """
    active = intended.ne(0)
    rows = (
        intended * intended,
        intended * effective,
        effective * effective,
        intended * visible,
        visible * visible,
        active.to(torch.float64),
        (active & effective.eq(0)).to(torch.float64),
        (active & visible.eq(0)).to(torch.float64),
    )
    sums = block_sums(torch.stack(rows), block)
    return named(WINDOW_SUMS, torch.cat((sums, squared_difference(sums[1:2], sums[0]))))


def oracle_block_sums(rows: Tensor, excluded: Tensor | None, padding: Tensor, block: int) -> Table[Tensor]:
    """Σ x² of o, u, O, E − O, then Σ o·e, Σ E·O and (Σ o·e − Σ o²)² by block, of rows o, u, O, E − O, e, E: fp64
    [6, slots], weight.

    `excluded` uint8 [slots]: elements that no sum includes, like those that are not finite; `padding` lists the
    empty slots among them. None, on the host only: e is finite, and only the padding is left out. Writes to `rows`.
    No synchronisation.
    """
    squares = None
    if excluded is None:
        squares = squared_block_sums(rows.index_fill_(1, padding, 0.0)[:4], block)
    if squares is None or not sum_is_finite(squares):
        missing = nonfinite(rows.sum(0))
        zero_excluded(rows, missing if excluded is None else missing.bitwise_or_(excluded))
        squares = squared_block_sums(rows[:4], block)
    products = torch.stack((rows[0] * rows[4], rows[2] * rows[5]))
    products = block_sums(products, block)
    return named(ORACLE_SUMS, torch.cat((squares, products, squared_difference(products[:1], squares[0]))))
