"""Two servers on one PostgreSQL: reports of one run to both, one killed, nothing lost, doubled or skipped."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from collage_server.settings import FixedLimits, Settings
from collage_server.store import PostgresqlStore

from collage_monitor import wire
from tests.server.conftest import Clock, running
from tests.server.samples import report
from tests.server.store.stores import LIMITS
from tests.server.test_following import Follower
from tests.server.test_process import prepare, send, serving
from tests.waiting import until

pytestmark = pytest.mark.slow

ASKED = (
    "/runs/r1/latest",
    "/runs/r1/streams",
    "/runs/r1/series?metric=edq_ratio",
    "/runs/r1/heatmap?metric=edq_ratio",
)


def without_time(text):
    """/metrics without what each process says about itself."""
    return [line for line in text.splitlines() if "collage_server_" not in line]


def post_numbers(client, worker, numbers, acknowledged):
    """Send reports one by one; a number is noted only after its answer has come."""
    for seq in numbers:
        batch = wire.ReportBatch(reports=[report(seq, seq + 1, rank=worker)])
        try:
            send(client, f"/streams/s{worker}/reports", batch, wire.encode_batch)
        except Exception:
            return
        acknowledged.append((worker, seq))


def test_one_of_two_servers_is_killed(tmp_path, database):
    flags = ("--no-auth", "--database", database)
    acknowledged: list[tuple[int, int]] = []
    with serving(tmp_path / "a", *flags) as (_, first, _), serving(tmp_path / "b", *flags) as (victim, second, _):
        prepare(first)
        senders = [
            threading.Thread(target=post_numbers, args=(client, worker, range(start, 60, 2), acknowledged))
            for worker in range(4)
            for start, client in ((0, first), (1, second))
        ]
        for sender in senders:
            sender.start()
        until(lambda: len(acknowledged) >= 60, "sixty acknowledgements")
        victim.kill()
        for sender in senders:
            sender.join()
        with serving(tmp_path / "b", *flags) as (_, third, _):
            for worker in range(4):
                post_numbers(third, worker, range(60), acknowledged)
            for path in ASKED:
                assert first.get("/api/v1" + path).json() == third.get("/api/v1" + path).json(), path
            # Newest values and judgements are written in the background, by either server, and read by both.
            until(
                lambda: without_time(first.get("/metrics").text) == without_time(third.get("/metrics").text),
                "the same findings from both servers",
            )
            streams = first.get("/api/v1/runs/r1/streams").json()["streams"]
            assert [stream["reports"] for stream in streams] == [60] * 4
            series = first.get("/api/v1/runs/r1/series?metric=edq_ratio&points=100").json()
            assert series["steps"] == list(range(1, 61))
            assert series["ranks"] == [4] * 60


def test_serve_refuses_a_database_that_is_not_migrated(tmp_path, empty_database):
    with (
        pytest.raises(ValueError, match="Expecting value"),
        serving(tmp_path, "--no-auth", "--database", empty_database),
    ):
        pytest.fail("it listens")
    PostgresqlStore(empty_database, stale_after_seconds=600.0).migrate()
    with serving(tmp_path, "--no-auth", "--database", empty_database) as (_, client, _):
        assert client.get("/readyz").status_code == 200


STEPS = 80


def report_in_turn(servers, rank):
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
    """While reports come in on both and both seal."""
    with ExitStack() as stack:
        servers = []
        for name in "ab":
            settings = Settings(folder=tmp_path / name, database=database, no_auth=True)
            limits = FixedLimits(seal_interval_seconds=60.0)
            servers.append(stack.enter_context(running(settings, Clock(), limits=limits)))
            servers[-1].app.state.collage.store.sealing.limits = LIMITS
        servers[0].run()
        servers[0].attempt()
        for rank in range(2):
            servers[rank].stream(stream_id=f"s{rank}", rank=rank, world_size=2)
        done = threading.Event()
        threads = [threading.Thread(target=report_in_turn, args=(servers, rank)) for rank in range(2)]
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
