"""Two server processes on one PostgreSQL: reports of one run to both, one killed, nothing lost or doubled."""

from __future__ import annotations

import threading

import pytest
from collage_server.store import PostgresqlStore

from collage_monitor import wire
from tests.server.samples import report
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
    store = PostgresqlStore(empty_database, stale_after_seconds=600.0)
    store.migrate()
    with serving(tmp_path, "--no-auth", "--database", empty_database) as (_, client, _):
        assert client.get("/readyz").status_code == 200
