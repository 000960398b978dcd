"""Two servers on one PostgreSQL: reports of one run to both, one killed, nothing lost, doubled or skipped."""

from concurrent.futures import ThreadPoolExecutor
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
from tests.waiting import beside, until

ASKED = ("latest", "streams", "series?metric=edq_ratio", "heatmap?metric=edq_ratio")
STEPS = 80


def findings(server):
    """/metrics without what each process says about itself."""
    return [line for line in server.get("/metrics").text.splitlines() if "collage_server_" not in line]


def answer(server, question):
    return server.get(f"/api/v1/runs/r1/{question}").json()


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
        with ThreadPoolExecutor(8) as pool:
            for worker in range(4):
                for start, client in ((0, first), (1, second)):
                    pool.submit(post_numbers, client, worker, range(start, 60, 2), acknowledged)
            until(lambda: len(acknowledged) >= 60, "sixty acknowledgements")
            victim.kill()
        with serving(tmp_path / "b", *flags) as (_, third, _):
            for worker in range(4):
                post_numbers(third, worker, range(60), acknowledged)
            for path in ASKED:
                assert answer(first, path) == answer(third, path), path
            # Newest values and judgements are written in the background, by either server, and read by both.
            until(lambda: findings(first) == findings(third), "the same findings from both servers")
            assert [stream["reports"] for stream in answer(first, "streams")["streams"]] == [60] * 4
            series = answer(first, "series?metric=edq_ratio&points=100")
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


def test_a_follower_that_asks_two_servers_in_turn_misses_nothing(database, tmp_path):
    """While reports come in on both and both seal."""
    with ExitStack() as stack:
        servers = []
        for name in "ab":
            settings = Settings(folder=tmp_path / name, database=database, no_auth=True)
            limits = FixedLimits(seal_interval_seconds=60.0)
            servers.append(stack.enter_context(running(settings, Clock(), limits=limits)))
            servers[-1].app.state.collage.store.sealing.limits = LIMITS
        servers[0].ranks(2)
        followers = [Follower(servers[0], {"metric": name}) for name in ("edq_ratio", "loss")]
        events: list[int] = []
        cursor, looks = 0, 0

        def send(rank):
            """Each report to the other server than the last."""
            for seq in range(STEPS):
                servers[(seq + rank) % 2].reports([report(seq, seq + 1, rank=rank)], f"s{rank}")

        def look(server):
            for follower in followers:
                follower.server = server
                follower.look()
            page = server.get(f"/runs/r1/events?cursor={cursor}", wire.EventPage)
            events.extend(event.event for event in page.events)
            return page.cursor

        with beside(lambda: [server.seal() for server in servers]), ThreadPoolExecutor(2) as pool:
            sent = [pool.submit(send, rank) for rank in range(2)]
            while not all(sender.done() for sender in sent) or looks % 2:
                cursor = look(servers[looks % 2])
                looks += 1
        look(servers[0])
        assert [sender.result() for sender in sent] == [None, None]
        for follower in followers:
            whole = servers[1].series(**follower.question, points=10_000)
            assert follower.steps == whole.steps == list(range(1, STEPS + 1))
            assert follower.values == whole.values
        assert events == list(range(1, len(events) + 1))
        assert looks > 3
