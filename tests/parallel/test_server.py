"""Ranks of one launch through the real server: one run, one attempt, shards added, replicas taken once.

Replicas are silent while their bits agree, and the layer is named when one bit of one rank flips.
"""

import functools
import sqlite3
from contextlib import closing

import collage_agent as collage
import pytest
import torch
from collage_optim import CollageAdamW
from torch import distributed

from collage_monitor.client import Client
from collage_monitor.local import read_token
from collage_monitor.wire import from_number
from tests.end_to_end.servers import KillableServer
from tests.parallel.launch import launch
from tests.parallel.measuring import STEPS, train
from tests.parallel.models import SPREAD, adamw, injected, replicated
from tests.waiting import until

pytestmark = pytest.mark.slow

PROCESSES = 2
LOOK_SECONDS = 0.2
WAYS = ("ddp", "fsdp2", "zero")
STOCHASTIC = functools.partial(CollageAdamW, lr=2**-9, strategy="stochastic")
FLIPPED = "parts.3.weight"
"""The tensor of which one rank loses a bit after the step before FLIPPED_STEP."""
FLIPPED_STEP = 3


def report(folder):
    """Runs that are reported to the server that the environment names; their ids.

    One for each way to spread a model, replicated ones that stay in step, and last one in which rank 1 suffers a
    flipped bit.
    """
    ways = {
        "replicas": replicated(torch.bfloat16),
        "fp32 replicas": replicated(torch.float32),
        "stochastic replicas": replicated(torch.bfloat16, None, STOCHASTIC),
        "unsharded replicas": SPREAD["fsdp1 unsharded"](torch.bfloat16),
        "flipped": replicated(torch.bfloat16),
    }
    reported = {name: _report(name, *SPREAD[name](torch.bfloat16)) for name in WAYS}
    return reported | {name: _replicated_run(name, *way) for name, way in ways.items()}


def report_alone(folder):
    """A run by one process."""
    model = injected(torch.bfloat16)
    return _report("alone", model, adamw(model.parameters()))


def _report(name, model, optimizer):
    run = collage.init("parallel", name)
    collage.watch(model, optimizer, every=1, sample="all", oracle=True)
    train(model, optimizer, STEPS)
    _finish(run)
    assert (run.reports_sent, run.reports_dropped) == (STEPS, {})
    return run.run_id


def _replicated_run(name, model, optimizer):
    run = collage.init("parallel", name)
    collage.watch(model, optimizer, every=1, sample="all" if name == "flipped" else 64, budget=None)
    train(model, optimizer, FLIPPED_STEP - 1)
    if name == "flipped" and distributed.get_rank() == 1:
        with torch.no_grad():
            model.module.get_parameter(FLIPPED).view(torch.int16)[0, 0, 0] ^= 1
    train(model, optimizer, STEPS)
    _finish(run)
    return run.run_id


def _finish(run):
    """Once the server knows every rank: one that comes later sets the run running again."""
    until(lambda: run.reports_sent, "an acknowledged report")
    distributed.barrier()
    collage.finish()
    distributed.barrier()


def mismatches(client, run_id):
    return [event for event in client.events(run_id).events if event.kind == "replica_mismatch"]


def journal_rows(folder):
    with closing(sqlite3.connect(f"file:{folder / 'collage.sqlite'}?mode=ro", uri=True)) as connection:
        return connection.execute("SELECT count(*) FROM report").fetchone()[0]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """(client, {run: id}) of two ranks and of one process alone.

    The server has found the flipped bit, and has looked at the other runs as well.
    """
    folder = tmp_path_factory.mktemp("server")
    server = KillableServer(folder / "data", folder / "server.log")
    server.start(seal_interval_seconds=LOOK_SECONDS)
    where = {"COLLAGE_SERVER_URL": server.url, "COLLAGE_DIR": str(server.folder)}
    try:
        (alone,) = launch("test_server.report_alone", 1, folder, **where)
        ranks = launch("test_server.report", PROCESSES, folder, **where)
        assert all(rank == ranks[0] for rank in ranks)
        with Client(server.url, read_token(server.folder)) as client:
            until(lambda: mismatches(client, ranks[0]["flipped"]), "the flipped bit")
            until(lambda: journal_rows(server.folder) == 0, "the sealing of all runs, which compares them first")
            yield client, ranks[0] | {"alone": alone}
    finally:
        server.kill()


def finished(client, run_id):
    return {
        key: None if value is None else from_number(value) for key, value in client.latest(run_id).model.items()
    }


@pytest.mark.parametrize("name", WAYS)
def test_the_server_s_totals_are_those_of_one_process(name, reported):
    client, runs = reported
    single = runs["alone"]
    found, wanted = finished(client, runs[name]), finished(client, single)
    assert found.keys() == wanted.keys()
    assert wanted["edq_ratio"] is not None
    for key, value in wanted.items():
        if value is None:
            assert found[key] is None, key
        elif "_noise_ratio" in key:
            # A sum of squares over blocks, which are cut from each shard.
            assert found[key] == pytest.approx(value, rel=0.1), key
        else:
            assert found[key] == pytest.approx(value, rel=1e-12), key
    layers = {layer.name for layer in client.layers(single).layers}
    assert {layer.name for layer in client.layers(runs[name]).layers} == layers
    for layer in sorted(layers):
        mine, alone = (client.series(run, "edq_ratio", layer=layer).values for run in (runs[name], single))
        assert mine == pytest.approx(alone, rel=1e-12), layer


@pytest.mark.parametrize("name", WAYS)
def test_ranks_share_run_and_attempt_and_each_has_a_stream(name, reported):
    client, runs = reported
    streams = client.streams(runs[name]).streams
    assert sorted(stream.rank for stream in streams) == list(range(PROCESSES))
    assert {stream.attempt for stream in streams} == {1}
    assert {stream.world_size for stream in streams} == {PROCESSES}
    assert [attempt.first_step for attempt in client.run(runs[name]).attempts] == [1]


@pytest.mark.parametrize("name", ["replicas", "fp32 replicas", "stochastic replicas", "unsharded replicas"])
def test_replicas_in_step_are_silent(name, reported):
    client, runs = reported
    assert [event.kind for event in client.events(runs[name]).events] == ["attempt"]
    layers = {layer.name for layer in client.layers(runs[name]).layers}
    assert FLIPPED in layers
    assert {stream.rank for stream in client.streams(runs[name]).streams} == {0, 1}


def test_one_flipped_bit_is_found_at_its_step_and_in_its_layer(reported):
    client, runs = reported
    first = mismatches(client, runs["flipped"])[0]
    assert (first.step, first.layers) == (FLIPPED_STEP, [FLIPPED])
    assert "replica 1 of attempt 1" in first.text
