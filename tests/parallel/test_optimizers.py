"""Our optimizers under `fully_shard`: two processes hold together, bit for bit, what one process holds."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.launch import launch
from tests.parallel.optimizers import MAKERS

pytestmark = pytest.mark.slow

ULP = 2.0**-7


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("stepped_shards", 2, tmp_path_factory.mktemp("shards"))


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [key for key in expected if not torch.equal(found[key], expected[key])]


@pytest.mark.parametrize("name", [name for name in MAKERS if "stochastic" not in name])
def test_shards_step_like_one_process(name, ranks):
    for seen, _, _ in ranks:
        shards, _, alone = seen[name]
        assert differing(shards, alone) == []


@pytest.mark.parametrize("name", MAKERS)
def test_shards_resume_bit_for_bit(name, ranks):
    for seen, _, _ in ranks:
        shards, resumed, _ = seen[name]
        assert differing(resumed, shards) == []


@pytest.mark.parametrize("name", [name for name in MAKERS if "stochastic" in name])
def test_random_rounding_of_shards_stays_within_an_ulp_and_differs_between_ranks(name, ranks):
    for seen, _, _ in ranks:
        shards, _, alone = seen[name]
        for key in alone:
            if key[1] == "parameter":
                torch.testing.assert_close(shards[key].double(), alone[key].double(), rtol=ULP, atol=2.0**-14)
    assert [(of_shard, of_plain) for _, of_shard, of_plain in ranks] == [(0, 0), (1, 0)]
