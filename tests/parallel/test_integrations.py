"""Accelerate and the Hugging Face Trainer under DDP, two processes each."""

from __future__ import annotations

import pytest

from tests.integrations.identity import assert_same_training
from tests.parallel.integrations import ACCUMULATED, BATCHES
from tests.parallel.launch import launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("integration", "steps", "layers"),
    [pytest.param("accelerate", BATCHES // ACCUMULATED, 4, marks=pytest.mark.nightly), ("transformers", 8, None)],
)
def test_a_framework_s_ranks_report_their_replicas_to_one_run(integration, steps, layers, tmp_path):
    ranks = launch(f"integrations.{integration}", 2, tmp_path)
    assert ranks[0][True]["run"] == ranks[1][True]["run"]
    for rank, seen in enumerate(ranks):
        assert_same_training(seen[False]["training"], seen[True]["training"])
        told = seen[True]
        assert told["rank"] == told["stream"].rank == rank
        assert told["stream"].world_size == 2
        assert told["steps"] == [1, *range(2, steps + 1, 2)]
        assert layers is None or len(told["stream"].layers) == layers
        assert {layer.replica for layer in told["stream"].layers} == {rank}
        assert not any(layer.name.startswith("module.") for layer in told["stream"].layers)
        assert told["totals"] == ranks[0][True]["totals"]
        assert ("loss" in told["scalars"]) == (rank == 0)
