"""Residuals against exact fractions: zeros, fill and its histogram, what was dropped and what is left."""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collage_agent.stats.optimizer_state import measure_residuals, residual_block_sums, residuals_left
from collage_agent.stats.update_histogram import ulp_octave_counts

from collage_monitor.definitions import HISTOGRAM_LABELS
from tests.reference import diagnostics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_residual_sums_and_histogram_equal_the_exact_ones(dtype):
    generator = torch.Generator().manual_seed(6)
    exact = torch.randn(320, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(-18, 2, (320,))
    exact[:32] = (1.0 + 1e-4) * 2.0 ** torch.arange(-16, 16)
    values = exact.to(dtype)
    residual = (exact - values.double()).to(dtype).double()
    residual[40:60] = 0.0
    zero, fill, octaves = diagnostics.residuals(
        diagnostics.exact(residual), [float(x) for x in values.double()], dtype
    )
    taken = torch.zeros(320, dtype=torch.uint8)
    found = residual_block_sums(residual, values, dtype, taken, 32).sum(1)
    assert found[:2].tolist() == [320, zero]
    assert float(found[2]) == pytest.approx(float(fill), rel=1e-13)
    assert 0 < float(found[2]) <= 320 - zero
    counts = ulp_octave_counts(residual, values, dtype, torch.zeros(10, dtype=torch.int64), 1, 32, gaps=0.5)[:, 0]
    counts[0] -= zero
    assert counts.tolist() == octaves


def dropped(step):
    """By block, element by element: zeros where a residual should be; less what is left after unseen steps."""
    dtype, found = step.registered.dtype, []
    least = 32 * torch.finfo(dtype).smallest_normal
    rows = (step.residual, step.held, step.excluded, step.registered.double(), step.intended)
    for block in torch.stack([row.double() for row in rows]).view(len(rows), -1, 32).unbind(1):
        count = 0
        for residual, held, excluded, weight, u in block.t().tolist():
            if excluded or not held:
                continue
            quarters = 4 * Fraction(u) / diagnostics.neighbour_gap(weight, u > 0, dtype)
            usual = abs(weight) < least or (not step.adjacent and quarters.denominator == 1)
            count += not usual if residual == 0 else -(not step.adjacent)
        found.append(max(count, 0))
    return found


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_measured_of_residuals_equals_the_definitions(dtype, adjacent, finite):
    generator, info = torch.Generator().manual_seed(7), torch.finfo(dtype)
    sizes = info.smallest_normal * 2.0 ** torch.randint(3, 8, (320,), generator=generator)
    mantissas = torch.randint(0, 5, (320,), generator=generator) / 4
    registered = (sizes * (1.0 + mantissas).clamp(max=1.75)).to(dtype)
    gaps = torch.tensor([float(diagnostics.neighbour_gap(x, False, dtype)) for x in registered.tolist()]).double()
    residual = -torch.rand(320, generator=generator, dtype=torch.float64) * gaps / 2
    # Dropped nowhere in the first block, and everywhere in the last.
    residual[torch.rand(320, generator=generator) < torch.arange(10).repeat_interleave(32) / 9] = 0.0
    intended = gaps * torch.randint(-8, 0, (320,), generator=generator) / torch.tensor([4.0, 7.0]).repeat(160)
    excluded = (torch.arange(320) % 7 == 0).to(torch.uint8) * (not finite)
    residual[excluded.bool()] = torch.nan
    tensor_of_block = torch.tensor([0] * 4 + [1] * 6)
    step: Any = SimpleNamespace(
        registered=registered,
        registered_in_fp32=registered.float(),
        residual=residual,
        intended=intended,
        held=(torch.rand(320, generator=generator) < 0.8).to(torch.uint8),
        adjacent=adjacent,
        excluded=excluded,
        finite=finite,
        block=32,
        tensor_of_block=tensor_of_block,
        tensors=2,
        block_elements=torch.full((10,), 32.0, dtype=torch.float64),
    )
    sums = measure_residuals(step)
    found = {key: values.tolist() for key, values in sums.by_block.items()}
    taken, of_slot = excluded == 0, tensor_of_block.repeat_interleave(32)
    assert found["residual_nonfinite"] == excluded.view(10, 32).sum(1).tolist()
    assert found["residual_elements"] == taken.view(10, 32).sum(1).tolist()
    assert found["residual_dropped"] == dropped(step)
    assert min(found["residual_dropped"]) == 0 < max(found["residual_dropped"])
    for tensor in range(2):
        own = taken & (of_slot == tensor)
        zero, fill, octaves = diagnostics.residuals(
            diagnostics.exact(residual[own]), registered[own].tolist(), dtype
        )
        mine = tensor_of_block == tensor
        assert float(sums.by_block["residual_zero"][mine].sum()) == zero
        assert float(sums.by_block["residual_fill_sum"][mine].sum()) == pytest.approx(float(fill), rel=1e-12)
        histogram = [float(sums.by_tensor[f"residual_fill_histogram/{x}"][tensor]) for x in HISTOGRAM_LABELS]
        assert histogram == octaves


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_that_moves_a_weight_by_less_than_it_should_owes_a_residual(dtype, finite):
    generator = torch.Generator().manual_seed(10)
    visible, intended, missing = torch.randn(3, 320, generator=generator, dtype=torch.float64)
    visible = visible.to(dtype).double()
    residual = 2**-12 * visible * (torch.arange(320) % 2)
    # A 32nd of the update is what 16-bit arithmetic may lose.
    moved = residual + intended * (1.0 - missing.abs() / 32)
    moved[:64] = intended[40:80] = residual[40:80] = moved[40:80] = 0.0
    moved[300:] = residual[300:] + intended[300:]
    after = torch.where(torch.arange(320) % 3 > 0, 0.0, 1e-3).to(dtype)
    excluded = (torch.arange(320) % 7 == 0).to(torch.uint8) * (not finite)
    step: Any = SimpleNamespace(
        registered=visible.to(dtype),
        parameter=visible + residual,
        visible_parameter=visible,
        intended=intended,
        effective=moved,
        visible=moved,
        residual_after=after,
        excluded=excluded,
        finite=finite,
    )
    expected, least = [], Fraction(torch.finfo(dtype).smallest_normal) * Fraction(torch.finfo(dtype).eps)
    exact = [diagnostics.exact(row) for row in (step.parameter, visible, intended, moved, after)]
    for theta, value, u, e, left, out in zip(*exact, excluded.tolist(), strict=True):
        owed = abs(theta + u - value - e) - abs(u) / 32 >= least and e != 0
        expected.append(int((left != 0 or owed) and not out))
    left = residuals_left(step)
    assert left is not None
    assert left.tolist() == expected
    assert 0 < sum(expected) < 320
