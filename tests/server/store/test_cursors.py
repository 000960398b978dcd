"""Cursors on two servers of one PostgreSQL, while reports come in on both and both seal: nothing is skipped."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from collage_server.app import create_app
from collage_server.settings import FixedLimits, Settings
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Clock, Server
from tests.server.samples import report
from tests.server.store.contract import LIMITS
from tests.server.test_following import Follower

pytestmark = pytest.mark.slow

STEPS = 80


def send(servers, rank):
    """A rank's reports in order, each to the other server than the last."""
    for seq in range(STEPS):
        servers[(seq + rank) % 2].reports([report(seq, seq + 1, rank=rank)], f"s{rank}")


def seal(servers, done):
    while not done.wait(0.01):
        for server in servers:
            server.app.state.collage.store.sealing.seal("r1", server.clock.now)


def event_numbers(server, cursor):
    page = server.get(f"/runs/r1/events?cursor={cursor}", wire.EventPage)
    return [event.event for event in page.events], page.cursor


def test_a_follower_that_asks_two_servers_in_turn_misses_nothing(database, tmp_path):
    with ExitStack() as stack:
        servers = []
        for name in "ab":
            settings = Settings(folder=tmp_path / name, database=database, no_auth=True)
            clock = Clock()
            app = create_app(settings, clock=clock, limits=FixedLimits(seal_interval_seconds=60.0))
            app.state.collage.store.sealing.limits = LIMITS
            client = stack.enter_context(TestClient(app, base_url="http://127.0.0.1"))
            servers.append(Server(client, clock, app))
        servers[0].run()
        servers[0].attempt()
        for rank in range(2):
            servers[rank].stream(stream_id=f"s{rank}", rank=rank, world_size=2)
        done = threading.Event()
        threads = [threading.Thread(target=send, args=(servers, rank)) for rank in range(2)]
        sealer = threading.Thread(target=seal, args=(servers, done))
        followers = [Follower(servers[0], {"metric": name}) for name in ("edq_ratio", "loss")]
        events: list[int] = []
        cursor, looks = 0, 0
        for thread in (*threads, sealer):
            thread.start()
        while any(thread.is_alive() for thread in threads) or looks % 2:
            for follower in followers:
                follower.server = servers[looks % 2]
                follower.look()
            more, cursor = event_numbers(servers[looks % 2], cursor)
            events += more
            looks += 1
        done.set()
        sealer.join()
        for follower in followers:
            follower.look()
            whole = servers[1].series(**follower.question, points=10_000)
            assert follower.steps == whole.steps == list(range(1, STEPS + 1))
            assert follower.values == whole.values
        events += event_numbers(servers[0], cursor)[0]
        assert events == list(range(1, len(events) + 1))
        assert looks > 3
