"""Low-precision formats, error-free transformations and expansions: the arithmetic all else rests on."""

from collage_optim.numerics.expansions import (
    add_expansions,
    compare_expansions,
    grow,
    join,
    multiply_expansions,
    renormalise,
    scale_expansion,
    split,
)
from collage_optim.numerics.formats import gap_towards, neighbour, round_to, stochastic_round, ulp
from collage_optim.numerics.transformations import fast_two_sum, two_product, two_sum

__all__ = [
    "add_expansions",
    "compare_expansions",
    "fast_two_sum",
    "gap_towards",
    "grow",
    "join",
    "multiply_expansions",
    "neighbour",
    "renormalise",
    "round_to",
    "scale_expansion",
    "split",
    "stochastic_round",
    "two_product",
    "two_sum",
    "ulp",
]
