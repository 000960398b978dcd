"""Training spread over processes is bit for bit the same with and without the agent."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.jobs import IDENTITY_STEPS
from tests.parallel.launch import launch

pytestmark = pytest.mark.slow

WAYS = ["ddp", "fsdp2", "fsdp1 original", "fsdp1 flat", "zero"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return launch("identity", 2, tmp_path_factory.mktemp("identity"))


@pytest.mark.parametrize("name", WAYS)
def test_steps_are_bit_identical_with_and_without_the_agent(name, seen):
    for rank in seen:
        plain, watched = rank[name, False], rank[name, True]
        assert len(plain["losses"]) == IDENTITY_STEPS
        assert len(set(plain["losses"])) > IDENTITY_STEPS // 2
        assert plain["losses"] == watched["losses"]
        assert plain["random"] == watched["random"]
        for kind in ("weights", "states"):
            assert plain[kind].keys() == watched[kind].keys()
            for key, value in plain[kind].items():
                assert torch.equal(value, watched[kind][key]), (kind, key)
        assert watched["measured"] == IDENTITY_STEPS
