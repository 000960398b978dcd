"""Every pair of finite bfloat16 and float16 numbers through two_sum and fast_two_sum.

Run as `python -m tests.numerics.exhaustive`; about ten minutes on one core. Exactness is decided in fp64: a sum
of two 16-bit numbers is the unique pair (RN(a + b), rest) that fp64's own two_sum gives, and s + e must have the
same pair. Ends with 1 on a failure inside the stated domain.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

import torch
from collage_optim.numerics import fast_two_sum, two_sum, ulp
from torch import Tensor

from tests.numerics.bits import finite_patterns

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = 8


@dataclass
class Count:
    """What became of all pairs of one format. `wrong_finite`: a finite sum with a wrong error term."""

    dtype: str
    pairs: int = 0
    overflowing: int = 0
    two_sum_wrong_finite: int = 0
    two_sum_wrong_in_domain: int = 0
    ordered_pairs: int = 0
    fast_two_sum_wrong: int = 0
    too_large_errors: int = 0
    cpu_seconds: float = 0.0


def same_sum(a: Tensor, b: Tensor, s: Tensor, e: Tensor) -> Tensor:
    """Where a + b = s + e exactly (all fp64)."""
    left, right = two_sum(a, b), two_sum(s, e)
    return (left[0] == right[0]) & (left[1] == right[1])


def count_rows(found: Count, a: Tensor, b: Tensor, largest: float) -> None:
    """Add the pairs of a few numbers (a column) with all numbers (a row)."""
    wide_a, wide_b = a.double(), b.double()
    s, e = two_sum(a, b)
    finite = torch.isfinite(s)
    exact = same_sum(wide_a, wide_b, s.double(), e.double())
    wrong = finite & ~exact
    # The stated exception: b is the largest number, a has the opposite sign, and an intermediate overflows.
    excepted = (wide_b.abs() == largest) & (torch.sign(wide_a) == -torch.sign(wide_b))
    found.pairs += s.numel()
    found.overflowing += int((~finite).sum())
    found.two_sum_wrong_finite += int(wrong.sum())
    found.two_sum_wrong_in_domain += int((wrong & ~excepted).sum())
    found.too_large_errors += int((finite & exact & (2 * e.double().abs() > ulp(s).double())).sum())
    ordered = (wide_a.abs() >= wide_b.abs()) & finite
    fast_s, fast_e = fast_two_sum(a, b)
    found.ordered_pairs += int(ordered.sum())
    found.fast_two_sum_wrong += int((ordered & ~same_sum(wide_a, wide_b, fast_s.double(), fast_e.double())).sum())


def count_all(name: str, rows: int | None) -> Count:
    """All pairs of one format, or those of the first `rows` numbers with all."""
    started = time.process_time()
    numbers = finite_patterns(DTYPES[name])
    largest = float(numbers.double().max())
    found = Count(name)
    for start in range(0, rows or numbers.numel(), ROWS):
        count_rows(found, numbers[start : start + ROWS, None], numbers[None, :], largest)
    found.cpu_seconds = time.process_time() - started
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="only the pairs of the first so many numbers with all others")
    rows, failed = parser.parse_args().rows, 0
    torch.set_num_threads(1)
    for name in DTYPES:
        found = count_all(name, rows)
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        sys.stdout.flush()
        failed += found.two_sum_wrong_in_domain + found.fast_two_sum_wrong + found.too_large_errors
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
