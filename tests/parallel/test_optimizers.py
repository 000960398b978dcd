"""Our optimizers under `fully_shard`: two processes hold together, bit for bit, what one process holds."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.parallel.launch import asked, launch
from tests.parallel.optimizers import MAKERS

pytestmark = pytest.mark.slow

ULP = 2.0**-7
BY_DAY = ("full, amsgrad", "split-master, stochastic", "kahan, Lion", "light-stochastic, storage")


def of_each(test, **only):
    """Some of the optimizers by day, which keep and round in all ways, and all at night."""
    names = [name for name in MAKERS if all((word in name) == wanted for word, wanted in only.items())]
    marked = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in names]
    return pytest.mark.parametrize("name", marked)(test)


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return launch("stepped_shards", 2, tmp_path_factory.mktemp("shards"), ASKED=asked(request, "name"))


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [key for key in expected if not torch.equal(found[key], expected[key])]


@partial(of_each, stochastic=False)
def test_shards_step_like_one_process(name, ranks):
    for seen, _, _ in ranks:
        shards, _, alone = seen[name]
        assert differing(shards, alone) == []


@of_each
def test_shards_resume_bit_for_bit(name, ranks):
    for seen, _, _ in ranks:
        shards, resumed, _ = seen[name]
        assert differing(resumed, shards) == []


@partial(of_each, stochastic=True)
def test_random_rounding_of_shards_stays_within_an_ulp_and_differs_between_ranks(name, ranks):
    for seen, _, _ in ranks:
        shards, _, alone = seen[name]
        for key in alone:
            if key[1] == "parameter":
                torch.testing.assert_close(shards[key].double(), alone[key].double(), rtol=ULP, atol=2.0**-14)
    assert [(of_shard, of_plain) for _, of_shard, of_plain in ranks] == [(0, 0), (1, 0)]
