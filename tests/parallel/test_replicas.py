"""Replicas of real ranks: silent while their bits agree, and the layer named when one bit of one rank flips."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from collage_monitor.client import Client
from collage_monitor.local import read_token
from tests.end_to_end.servers import KillableServer
from tests.parallel.jobs import FLIPPED, FLIPPED_STEP
from tests.parallel.launch import launch
from tests.waiting import until

pytestmark = pytest.mark.slow

LOOK_SECONDS = 0.2


def mismatches(client, run_id):
    return [event for event in client.events(run_id).events if event.kind == "replica_mismatch"]


def journal_rows(folder):
    with closing(sqlite3.connect(f"file:{folder / 'collage.sqlite'}?mode=ro", uri=True)) as connection:
        return connection.execute("SELECT count(*) FROM report").fetchone()[0]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """(client, {run: id}) once the server has found the flipped bit, and has looked at the others as well."""
    folder = tmp_path_factory.mktemp("replicas")
    server = KillableServer(folder / "data", folder / "server.log")
    server.start(seal_interval_seconds=LOOK_SECONDS)
    try:
        where = {"COLLAGE_SERVER_URL": server.url, "COLLAGE_DIR": str(server.folder)}
        runs, _ = launch("replicas", 2, folder, **where)
        with Client(server.url, read_token(server.folder)) as client:
            until(lambda: mismatches(client, runs["flipped"]), "the flipped bit")
            until(lambda: journal_rows(server.folder) == 0, "the sealing of all runs, which compares them first")
            yield client, runs
    finally:
        server.kill()


@pytest.mark.parametrize("name", ["ddp", "ddp fp32", "stochastic", "unsharded"])
def test_replicas_in_step_are_silent(name, compared):
    client, runs = compared
    assert [event.kind for event in client.events(runs[name]).events] == ["attempt"]
    layers = {layer.name for layer in client.layers(runs[name]).layers}
    assert FLIPPED in layers
    assert {stream.rank for stream in client.streams(runs[name]).streams} == {0, 1}


def test_one_flipped_bit_is_found_at_its_step_and_in_its_layer(compared):
    client, runs = compared
    first = mismatches(client, runs["flipped"])[0]
    assert (first.step, first.layers) == (FLIPPED_STEP, [FLIPPED])
    assert "replica 1 of attempt 1" in first.text
