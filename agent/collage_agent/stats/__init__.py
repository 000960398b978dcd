"""Pure diagnostics: tensors in, totals out, still on the device. Nothing here reads a value back."""

from collage_agent.stats.classes import CLASS_COUNTS, class_codes, count_classes
from collage_agent.stats.counterfactual import COUNTERFACTUAL_SUMS, counterfactual_block_sums, fp8_scales
from collage_agent.stats.decay import decay_block_sums, decay_is_lost
from collage_agent.stats.edq import edq_block_sums, edq_products
from collage_agent.stats.finite import leave_out, nonfinite
from collage_agent.stats.histogram import ulp_octave_counts
from collage_agent.stats.norms import squared_block_sums
from collage_agent.stats.residuals import RESIDUAL_SUMS, residual_block_sums
from collage_agent.stats.segments import Columns, block_sums, on_host
from collage_agent.stats.states import state_decrement_block_sums
from collage_agent.stats.variance import population_factor, product_rows, ratio_variances
from collage_agent.stats.windows import WINDOW_SUMS, window_block_sums
from collage_agent.stats.zeros import zero_block_counts

__all__ = [
    "CLASS_COUNTS",
    "COUNTERFACTUAL_SUMS",
    "Columns",
    "RESIDUAL_SUMS",
    "WINDOW_SUMS",
    "block_sums",
    "class_codes",
    "count_classes",
    "counterfactual_block_sums",
    "decay_block_sums",
    "decay_is_lost",
    "edq_block_sums",
    "edq_products",
    "fp8_scales",
    "leave_out",
    "nonfinite",
    "on_host",
    "population_factor",
    "product_rows",
    "ratio_variances",
    "residual_block_sums",
    "squared_block_sums",
    "state_decrement_block_sums",
    "ulp_octave_counts",
    "window_block_sums",
    "zero_block_counts",
]
