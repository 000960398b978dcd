"""Rules for whole matrices on spread ones: u from the rank that has a matrix whole, else what changed and why."""

from __future__ import annotations

import pytest

from tests.parallel.jobs import STEPS
from tests.parallel.launch import launch
from tests.parallel.matrices import alone
from tests.parallel.merged import assert_equal_totals

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"matrices{request.param}")
    return launch("matrices.spread_matrices", request.param, folder)


@pytest.fixture(scope="module")
def single():
    return alone()


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
