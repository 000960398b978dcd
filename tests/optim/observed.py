"""Totals of a measured step against their definitions."""

import pytest
from collage_agent.optim import STEP_TOTALS

COUNTS = STEP_TOTALS[:10]


def check(row, expected, tolerance=1e-5):
    """Counts exact, sums within the tolerance."""
    found = dict(zip(STEP_TOTALS, row.tolist(), strict=True))
    assert {name: found[name] for name in COUNTS} == {name: expected[name] for name in COUNTS}
    for name in STEP_TOTALS[10:]:
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=1e-30), name
