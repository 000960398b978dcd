"""Ranks of one launch through the real server: one run, one attempt, shards added, replicas taken once."""

from __future__ import annotations

import pytest

from collage_monitor.client import Client
from collage_monitor.local import read_token
from collage_monitor.wire import from_number
from tests.end_to_end.servers import KillableServer
from tests.parallel.launch import launch

pytestmark = pytest.mark.slow

PROCESSES = 2


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """(client, {way: run id}) after a run of each way: two ranks reporting, and one process alone."""
    folder = tmp_path_factory.mktemp("server")
    server = KillableServer(folder / "data", folder / "server.log")
    server.start()
    where = {"COLLAGE_SERVER_URL": server.url, "COLLAGE_DIR": str(server.folder)}
    try:
        ranks = launch("reported", PROCESSES, folder, **where)
        (single,) = launch("reported_alone", 1, folder, **where)
        assert all(rank == ranks[0] for rank in ranks)
        with Client(server.url, read_token(server.folder)) as client:
            yield client, ranks[0], single
    finally:
        server.kill()


def finished(client, run_id):
    return {
        key: None if value is None else from_number(value) for key, value in client.latest(run_id).model.items()
    }


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero"])
def test_the_server_s_totals_are_those_of_one_process(name, reported):
    client, runs, single = reported
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


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero"])
def test_ranks_share_run_and_attempt_and_each_has_a_stream(name, reported):
    client, runs, _ = reported
    streams = client.streams(runs[name]).streams
    assert sorted(stream.rank for stream in streams) == list(range(PROCESSES))
    assert {stream.attempt for stream in streams} == {1}
    assert {stream.world_size for stream in streams} == {PROCESSES}
    assert [attempt.first_step for attempt in client.run(runs[name]).attempts] == [1]
