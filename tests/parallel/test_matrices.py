"""Rules for whole matrices on spread ones: u from the rank that has a matrix whole, else what changed and why."""

import functools
from typing import Any

import pytest
import pytorch_optimizer
import torch

from tests.parallel.launch import launch
from tests.parallel.measuring import STEPS, assert_equal_totals, measured, train
from tests.parallel.models import Exact, Row, fsdp2, replicated, zero
from tests.parallel.test_optimizers import whole

pytestmark = pytest.mark.slow

SHAPES = ((24, 16), (12, 20), (9, 7), (16, 16))


def _muon_of_groups(parameters, **options):
    return pytorch_optimizer.Muon([{"params": list(parameters), "use_muon": True}], **options)


MAKERS: dict[str, Any] = {
    "torch": functools.partial(torch.optim.Muon, lr=2**-9, weight_decay=2**-4),
    "pytorch_optimizer": functools.partial(_muon_of_groups, lr=2**-9),
    "Lamb": functools.partial(pytorch_optimizer.Lamb, lr=2**-9),
}
SPREAD: dict[str, Any] = {"zero": zero, "fsdp2": fsdp2, "ddp": replicated}

NOT_TOGETHER = {
    ("zero", "pytorch_optimizer"): "ZeroRedundancyOptimizer makes its inner optimizer without groups",
    ("fsdp2", "Lamb"): "its step asks distributed tensors for what they cannot do",
}


def matrices():
    generators = [torch.Generator().manual_seed(index) for index in range(len(SHAPES))]
    starts = [torch.randn(shape, generator=own) / 8 for shape, own in zip(SHAPES, generators, strict=True)]
    return Row(Exact(index, start) for index, start in enumerate(starts)).to(torch.bfloat16)


def spread_matrices(folder):
    """What each way to spread them shows, and the weights with the agent and without."""
    seen = {}
    for way, spread in SPREAD.items():
        for maker, make in MAKERS.items():
            if (way, maker) in NOT_TOGETHER:
                continue
            model, optimizer = spread(torch.bfloat16, matrices(), make)
            found = measured(model, optimizer)
            other, unwatched = spread(torch.bfloat16, matrices(), make)
            train(other, unwatched, STEPS)
            found["identical"] = all(
                torch.equal(whole(one.detach()), whole(two.detach()))
                for one, two in zip(model.parameters(), other.parameters(), strict=True)
            )
            seen[way, maker] = found
    return seen


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"matrices{request.param}")
    return launch("test_matrices.spread_matrices", request.param, folder)


@pytest.fixture(scope="module")
def single():
    """What one process measures, by maker."""
    models = {maker: matrices() for maker in MAKERS}
    return {maker: measured(model, MAKERS[maker](model.parameters())) for maker, model in models.items()}


def test_the_agent_changes_no_weight(ranks):
    assert [key for rank in ranks for key, found in rank.items() if not found["identical"]] == []


@pytest.mark.parametrize(
    ("way", "maker"), [("zero", "torch"), ("zero", "Lamb"), ("ddp", "torch"), ("ddp", "pytorch_optimizer")]
)
def test_the_owner_of_a_matrix_knows_its_step(way, maker, ranks, single):
    found = [rank[way, maker] for rank in ranks]
    assert {rank["info"].intent for rank in found} == {"whole-tensor"}
    assert_equal_totals(found, single[maker], STEPS)


@pytest.mark.parametrize("maker", ["torch", "pytorch_optimizer"])
def test_parts_of_a_matrix_have_what_changed_and_the_reason(maker, ranks):
    for rank in ranks:
        info, model = rank["fsdp2", maker]["info"], rank["fsdp2", maker]["summary"]["model"]
        assert info.intent == "before-after"
        assert "in parts on several ranks, and no rank can step its part alone" in info.intent_reason
        assert model["edq_ratio"] is None
        assert model["effective_norm"] > 0
