"""Ranks that fall silent: the head says so, and what they hold is not known, on the server as in a terminal."""

import math

import msgspec
import numpy as np
import pytest

from collage_monitor import wire
from collage_monitor.diagnosis import SilentRanks, silent_ranks
from tests.dashboard.generated import GeneratedRun

RANKS = 4


def train(server, steps_of, replicas=False):
    """A healthy run of four ranks, each of which measures its steps; each holds a quarter of all, or a copy."""
    made = GeneratedRun("sharded", "master-weights", steps=1000)
    server.run("r1")
    server.attempt("r1")
    statistics = list(made.totals(10))
    share = np.full((len(statistics), 1), 1.0 if replicas else 1 / RANKS)
    share[statistics.index("measured_steps")] = 1.0
    held = [(layer, [layer.elements], int(layer.elements * share.min())) for layer in made.layers]
    for rank, steps in steps_of.items():
        own = [
            msgspec.structs.replace(layer, shape=shape, elements=elements, replica=rank if replicas else 0)
            for layer, shape, elements in held
        ]
        told = {"layers": own, "statistics": statistics, "watch": made.watch()}
        server.stream("r1", stream_id=f"s{rank}", rank=rank, world_size=RANKS, **told)
        server.reports([of_rank(made, seq, step, share) for seq, step in enumerate(steps)], f"s{rank}")
    server.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"), wire.Run)
    return server.get("/runs/r1/overview", wire.Overview)


def of_rank(made, seq, step, share):
    """What a rank that holds this share of each total reports of a step."""
    by_layer, model = made.totals(step), made.model_totals(step)
    return wire.Report(
        seq=seq,
        step=step,
        time=1_700_000_000.0 + step,
        statistic_count=len(by_layer),
        layer_count=len(made.layers),
        statistics=wire.array_to_bytes(np.stack(list(by_layer.values())) * share),
        model=wire.array_to_bytes(np.array([float(model[key]) for key in by_layer]) * share[:, 0]),
    )


ALL, HALF = range(20, 1001, 20), range(20, 500, 20)
HALVES = {0: ALL, 1: ALL, 2: HALF, 3: HALF}


@pytest.mark.parametrize(
    ("steps_of", "replicas", "health", "said"),
    [
        (HALVES, False, "unknown", "2 of 4 ranks report since step 500: what the others"),
        (HALVES, True, "healthy", "; 2 of 4 ranks report since step 500."),
        ({0: ALL, 1: ALL}, False, "unknown", "2 of 4 ranks report since step 20"),
        ({0: ALL, 1: ALL}, True, "healthy", "2 of 4 ranks report since step 20"),
    ],
    ids=["shards", "copies", "shards that never spoke", "copies that never spoke"],
)
def test_what_silent_ranks_hold_is_not_known_unless_others_hold_copies(served, steps_of, replicas, health, said):
    """The head says so, and the terminal the same."""
    server, client = served
    found = train(server, steps_of, replicas=replicas)
    assert found.health == health, found.text
    assert said in found.headline
    assert ("50.0 % of the elements" in found.text) == (not replicas)
    read = client.overview("r1", fresh=True)
    assert (read.health, read.text) == (found.health, found.text)


def test_a_report_that_is_on_its_way_is_no_silence():
    whole, torn = [4] * 20, [4] * 13 + [2] * 7
    steps, ones = list(range(20)), [1.0] * 20
    assert silent_ranks(steps, ones, torn, whole, ones) is None
    found = silent_ranks(steps, ones, [4] * 12 + [2] * 8, whole, ones)
    assert found == SilentRanks(reporting=2, expected=4, since=12, held=1.0)
    assert silent_ranks(steps, ones, whole, whole, ones) is None
    alone = [1], [1.0], [1], [2], [1.0]
    assert silent_ranks(*alone) is None
    assert silent_ranks(*alone, is_over=True) == SilentRanks(reporting=1, expected=2, since=1, held=None)


@pytest.mark.parametrize(
    ("elements", "whole", "held"),
    [
        ([4.0] * 12 + [2.0] * 8, 0.0, 0.5),
        ([4.0] * 12 + [6.0] * 8, 0.0, 1.0),
        ([2.0] * 8, 8.0, 0.25),
        ([2.0] * 8, 0.0, None),
        ([4.0] * 12 + [math.inf] * 8, 0.0, None),
    ],
)
def test_the_others_hold_a_share_of_what_all_held(elements, whole, held):
    steps = list(range(len(elements)))
    ranks, expected = [4] * (len(steps) - 8) + [2] * 8, [4] * len(steps)
    found = silent_ranks(steps, [1.0] * len(steps), ranks, expected, elements, whole)
    assert found == SilentRanks(reporting=2, expected=4, since=len(steps) - 8, held=held)
