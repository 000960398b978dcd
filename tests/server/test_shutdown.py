"""A real process ends, whatever its clients do meanwhile: what was acknowledged is stored.

Each time something would hold it up for ever, so that it ends at all shows that it keeps a deadline.
"""

from __future__ import annotations

import signal
import socket
import sqlite3
import threading
from contextlib import closing
from urllib.parse import urlsplit

import httpx
import pytest

from collage_monitor import wire
from collage_monitor.local import read_token
from tests.server.samples import report
from tests.server.test_process import prepare, send, serving
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 4.0


def post(url, worker, acknowledged, refused, stop):
    """Send reports one by one until told to stop; note what was acknowledged and which statuses refused."""
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False) as client:
        while not stop.is_set():
            batch = wire.ReportBatch(reports=[report(acknowledged[worker], acknowledged[worker] + 1)])
            try:
                send(client, f"/streams/s{worker}/reports", batch, wire.encode_batch)
                acknowledged[worker] += 1
            except httpx.HTTPStatusError as error:
                refused.append(error.response.status_code)
            except httpx.HTTPError:
                return


def test_a_server_under_load_drains_and_closes_within_its_deadline(tmp_path):
    refused: list[int] = []
    acknowledged, stop = [0] * 4, threading.Event()
    with serving(tmp_path, "--no-auth", shutdown_seconds=DEADLINE_SECONDS) as (process, client, ready):
        prepare(client)
        senders = [
            threading.Thread(target=post, args=(ready["server_url"], i, acknowledged, refused, stop))
            for i in range(4)
        ]
        address = urlsplit(ready["server_url"])
        with closing(socket.create_connection((address.hostname, address.port))) as stalled:
            # A client that announces a body and never sends it must not hold the server up.
            head = "POST /api/v1/streams/s0/reports HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\nx"
            stalled.sendall(head.encode())
            for sender in senders:
                sender.start()
            until(lambda: sum(acknowledged) >= 40, "forty acknowledgements")
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)
        stop.set()
        for sender in senders:
            sender.join(PATIENCE_SECONDS)
            assert not sender.is_alive()
    assert set(refused) <= {503}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"collage.sqlite", "collage.sqlite-ballast", "collage.sqlite-was-here"}, (
        "the log was folded into the database"
    )
    with serving(tmp_path, "--no-auth") as (_, client, _):
        streams = client.get("/api/v1/runs/r1/streams").json()["streams"]
        stored = {entry["stream_id"]: entry["reports"] for entry in streams}
    for worker, count in enumerate(acknowledged):
        assert count <= stored[f"s{worker}"] <= count + 1


def test_a_database_that_another_program_locks_does_not_hold_it_up(tmp_path):
    with serving(tmp_path, shutdown_seconds=2.0) as (process, client, _):
        client.headers["Authorization"] = f"Bearer {read_token(tmp_path)}"
        token = {"name": "n", "role": "read", "projects": None}
        used = {"Authorization": f"Bearer {client.post('/api/v1/tokens', json=token).json()['secret']}"}
        assert client.get("/api/v1/runs", headers=used).status_code == 200
        # After a change the next request reads the tokens again, and then notes the use of the first one.
        assert client.post("/api/v1/tokens", json=token).status_code == 201
        with closing(sqlite3.connect(tmp_path / "collage.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert client.get("/api/v1/runs", headers=used).status_code == 200
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)
