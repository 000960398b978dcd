"""Accelerate and the Hugging Face Trainer under DDP, two processes each."""

import os
import warnings

import pytest
from collage_agent.integrations.accelerate import CollageTracker
from collage_agent.integrations.transformers import CollageCallback
from collage_agent.transport import MemoryTransport

from collage_monitor.wire import StreamCreate
from tests.integrations import test_accelerate, test_transformers
from tests.integrations.trainings import assert_same_training, scalars_of, steps_of
from tests.parallel.launch import launch

pytestmark = pytest.mark.slow


def accelerate(folder):
    """An Accelerate loop with accumulation, without the agent and with it."""
    return {watched: _accelerated(watched) for watched in (False, True)}


def _accelerated(watched):
    transport = MemoryTransport()
    tracker = CollageTracker("doors", run_options={"transport": transport}) if watched else None
    _, training = test_accelerate.trained(tracker, watched=watched, accumulated=2)
    return {"training": training, **_told(transport)}


def transformers(folder):
    """A Hugging Face Trainer, without the agent and with it."""
    # It warns about its own use of other libraries.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {watched: _trained(folder / str(os.getpid()), watched) for watched in (False, True)}


def _trained(folder, watched):
    transport = MemoryTransport()
    callback = CollageCallback("doors", run_options={"transport": transport}, every=2, sample=512)
    training = test_transformers.trained(folder, callback if watched else None, max_steps=8)
    return {"training": training, **_told(transport)}


def _told(transport):
    streams = [message for message in transport.messages if isinstance(message, StreamCreate)]
    return {
        "steps": steps_of(transport),
        "scalars": scalars_of(transport),
        "rank": int(os.environ["RANK"]),
        "stream": streams[-1] if streams else None,
        "run": transport.envelopes[0].run_id if streams else None,
        "totals": [report.statistics for report in transport.reports if report.statistics is not None],
    }


@pytest.mark.parametrize(
    ("integration", "steps", "layers"),
    [pytest.param("accelerate", [1, 4, 8], 4, marks=pytest.mark.nightly), ("transformers", [1, 2, 4, 6, 8], None)],
)
def test_a_framework_s_ranks_report_their_replicas_to_one_run(integration, steps, layers, tmp_path):
    ranks = launch(f"test_integrations.{integration}", 2, tmp_path)
    assert ranks[0][True]["run"] == ranks[1][True]["run"]
    for rank, seen in enumerate(ranks):
        assert_same_training(seen[False]["training"], seen[True]["training"])
        told = seen[True]
        assert told["rank"] == told["stream"].rank == rank
        assert told["stream"].world_size == 2
        assert told["steps"] == steps
        assert layers is None or len(told["stream"].layers) == layers
        assert {layer.replica for layer in told["stream"].layers} == {rank}
        assert not any(layer.name.startswith("module.") for layer in told["stream"].layers)
        assert told["totals"] == ranks[0][True]["totals"]
        assert ("loss" in told["scalars"]) == (rank == 0)
