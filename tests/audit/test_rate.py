"""What a learning rate loses, beside exact rational arithmetic on every element."""

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from collage_agent.audit import audit_checkpoint
from collage_agent.audit.checkpoint_audit import SAFE_LOST_RATIO, add_lost, lost_at_rate
from collage_agent.audit.checkpoint_parameters import CheckpointParameter
from collage_optim import CollageAdamW

from tests.audit.checkpoints import saved, trained


def bfloat16_of(bits):
    return Fraction(struct.unpack(">f", struct.pack(">I", bits << 16))[0])


def half_gap(value, direction):
    """Half the distance from a bfloat16 value to its neighbour in a direction, by its bit pattern."""
    bits = struct.unpack(">I", struct.pack(">f", value))[0] >> 16
    magnitude, negative = bits & 0x7FFF, bits >> 15
    outwards = magnitude == 0 or direction == 0 or (direction < 0) == bool(negative)
    neighbour = magnitude + 1 if outwards else magnitude - 1
    return abs(bfloat16_of(neighbour) - bfloat16_of(magnitude)) / 2


def weights_on_many_scales():
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(400, generator=generator) * torch.exp2(torch.randint(-12, 4, (400,), generator=generator))
    values[:4] = torch.tensor([0.0, 1.0, -2.0, 0.5])
    return values.bfloat16()


@pytest.mark.parametrize("learning_rate", [1e-6, 2.0**-10, 1e-3, 0.1])
def test_shares_are_those_of_exact_arithmetic(learning_rate):
    weight = weights_on_many_scales()
    loss = lost_at_rate(CheckpointParameter("w", weight), learning_rate)
    assert loss is not None
    gaps = [half_gap(value, 0) for value in weight.tolist()]
    assert loss.lost == sum(gap > Fraction(learning_rate) for gap in gaps)
    assert loss.elements == 400
    safe = loss.smallest_safe_learning_rate
    assert safe is not None
    allowed = SAFE_LOST_RATIO * len(gaps)
    assert sum(gap > Fraction(safe) for gap in gaps) <= allowed
    assert sum(gap > Fraction(safe) / 2 for gap in gaps) > allowed


def test_the_gap_is_the_one_in_the_direction_of_the_update():
    weight = torch.tensor([1.0, 1.0, -1.0, -1.0]).bfloat16()
    moments = {"exp_avg": torch.tensor([1.0, -1.0, 1.0, -1.0]), "exp_avg_sq": torch.ones(4)}
    loss = lost_at_rate(CheckpointParameter("w", weight, averages=moments), 2.0**-9 * 1.1)
    # Towards zero half a gap of 1 is 2**-9, away from it 2**-8; the update goes against the moment.
    assert loss is not None
    assert loss.lost == 2
    assert loss.estimated == 2


def test_estimates_are_those_of_the_next_step():
    model, optimizer = trained(lambda model: CollageAdamW(model.parameters(), lr=1e-4, strategy="plain"))
    parameter = next(model.parameters())
    state = optimizer.state[parameter]
    averages = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    group = optimizer.param_groups[0]
    loss = lost_at_rate(CheckpointParameter("w", parameter.detach(), group, True, 12, averages=averages), 1e-4)
    lost = of = 0
    for value, m, v in zip(
        parameter.flatten().tolist(), *(a.flatten().tolist() for a in averages.values()), strict=True
    ):
        size = 1e-4 * abs(m / (1 - 0.9**12)) / (math.sqrt(v / (1 - 0.999**12)) + 1e-8)
        of += size > 0
        lost += 0 < size < half_gap(value, -m)
    assert loss is not None
    assert (loss.estimated, loss.estimated_of) == (lost, of)
    assert 0 < lost < of


def test_pairs_and_masters_are_judged_by_their_finer_grid(tmp_path):
    lost: dict[str, Any] = {}
    for strategy in ("plain", "light", "master-weights"):
        optimized = trained(lambda model, s=strategy: CollageAdamW(model.parameters(), lr=1e-3, strategy=s))
        audit = audit_checkpoint(saved(tmp_path / f"{strategy}.pt", *optimized), 1e-5)
        assert audit.total is not None
        lost[strategy] = audit.total.lost_ratio
    assert 0 == lost["master-weights"] <= lost["light"] < 0.01 < 0.8 < lost["plain"]


def test_stochastic_rounding_loses_nothing_in_the_mean(tmp_path):
    optimized = trained(lambda model: CollageAdamW(model.parameters(), lr=1e-3, strategy="stochastic"))
    audit = audit_checkpoint(saved(tmp_path / "a.pt", *optimized), 1e-6)
    assert audit.total is None
    assert any("lost in the mean" in note for note in audit.notes)


def test_parts_add_up():
    weight = weights_on_many_scales()
    whole = lost_at_rate(CheckpointParameter("w", weight), 1e-3)
    one, other = (lost_at_rate(CheckpointParameter("w", part), 1e-3) for part in (weight[:150], weight[150:]))
    assert one is not None
    assert other is not None
    assert add_lost(one, other) == whole


def test_formats_that_are_not_known_are_left_out():
    assert lost_at_rate(CheckpointParameter("w", torch.ones(4, dtype=torch.float64)), 1e-3) is None


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_learning_rate_that_is_none_is_refused(tmp_path, rate):
    with pytest.raises(ValueError, match="pass a number above 0"):
        audit_checkpoint(tmp_path, rate)
