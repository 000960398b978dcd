"""A real server process: says where it listens, ends whatever holds it up, keeps what was acknowledged."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from collage_server.background import BackgroundThread
from collage_server.settings import FixedLimits
from collage_server.store import SqliteStore

from collage_monitor import wire
from collage_monitor.local import read_token
from tests.forking import SERVER, command, fork, run_command
from tests.server.conftest import running
from tests.server.limited import limits_and_variables
from tests.server.samples import report, stream_create
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

SERVES = ("serve", "--json")
SERVE = command(*SERVES)
LEFT = {"collage.sqlite", "collage.sqlite-ballast", "collage.sqlite-was-here"}
IMPORTS = """
import logging, sys, threading
before = threading.active_count(), len(logging.root.handlers)
import collage_server.app, collage_server.command.serve, collage_server.exposition
assert (threading.active_count(), len(logging.root.handlers)) == before
assert "torch" not in sys.modules and "dash" not in sys.modules
assert not {"authlib", "cryptography", "httpx2", "joserfc"} & set(sys.modules)  # A server without a provider.
import prometheus_client
names = [family.name for family in prometheus_client.REGISTRY.collect()]
assert not [name for name in names if name.startswith("collage")], names
import gc, socket, sqlite3
assert not [o for o in gc.get_objects() if isinstance(o, (socket.socket, sqlite3.Connection))]
"""


@contextmanager
def serving(folder, *flags, stderr=None, **settings):
    """(process, client, ready line) of a server on a free port, with these settings and fixed limits.

    stderr: an open file for its standard error, which is told at its end otherwise.
    """
    limits, variables = limits_and_variables(settings)
    words = ["-m", "tests.server.limited", limits, *SERVES, "--dir", str(folder), "--port", "0", *flags]
    environment = {**os.environ, **variables}
    if stderr is None:
        process = fork(SERVER, *words, environment=environment)
        output = process.stdout
    else:
        read, write = os.pipe()
        output = os.fdopen(read)
        with os.fdopen(write, "w") as theirs:
            process = fork(SERVER, *words, environment=environment, output=(theirs, stderr))
    try:
        ready = json.loads(output.readline())
        with httpx.Client(base_url=ready["server_url"], timeout=PATIENCE_SECONDS, trust_env=False) as client:
            yield process, client, ready
    finally:
        process.kill()
        process.wait()
        output.close()


def send(client, path, message, encode=wire.encode_message):
    headers = {"Content-Type": wire.MSGPACK}
    return client.post("/api/v1" + path, content=encode(message), headers=headers).raise_for_status()


def prepare(client):
    send(client, "/projects/p/runs", wire.RunCreate(run_id="r1"))
    send(client, "/runs/r1/attempts", wire.AttemptCreate(launch_id="launch-1", first_step=1))
    for worker in range(4):
        send(client, "/runs/r1/streams", stream_create(f"s{worker}", rank=worker, world_size=4))


@contextmanager
def sending(url, acknowledged, refused):
    """Clients that send reports one by one from where they were, until the server is gone or the block ends.

    A report is counted as acknowledged only after its answer has come; of what is refused the status is noted.
    """
    stop = threading.Event()

    def work(worker):
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

    senders = [threading.Thread(target=work, args=[worker]) for worker in range(len(acknowledged))]
    for sender in senders:
        sender.start()
    try:
        yield
    finally:
        stop.set()
        for sender in senders:
            sender.join(PATIENCE_SECONDS)
            assert not sender.is_alive()


def stored_of(client, acknowledged):
    """The reports of each stream: what was acknowledged, and at most one more that was in flight."""
    streams = client.get("/api/v1/runs/r1/streams").json()["streams"]
    stored = {entry["stream_id"]: entry["reports"] for entry in streams}
    for worker, count in enumerate(acknowledged):
        assert count <= stored[f"s{worker}"] <= count + 1
    return stored


def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path):
    refused: list[int] = []
    acknowledged = [0] * 4
    for _ in range(2):
        with serving(tmp_path, "--no-auth") as (process, client, ready):
            prepare(client)
            wanted = sum(acknowledged) + 25
            with sending(ready["server_url"], acknowledged, refused):
                until(lambda wanted=wanted: sum(acknowledged) >= wanted, "acknowledgements")
                process.send_signal(signal.SIGKILL)
                process.wait(PATIENCE_SECONDS)
    assert refused == []
    with serving(tmp_path, "--no-auth") as (_, client, _):
        stored = stored_of(client, acknowledged)
        steps = client.get("/api/v1/runs/r1/series", params={"metric": "lost", "points": 10_000}).json()["steps"]
        assert steps == list(range(1, max(stored.values()) + 1))


def test_a_server_under_load_drains_and_closes_within_its_deadline(tmp_path):
    """Something would hold it up for ever, so that it ends at all shows that it keeps a deadline."""
    refused: list[int] = []
    acknowledged = [0] * 4
    with serving(tmp_path, "--no-auth", shutdown_seconds=4.0) as (process, client, ready):
        prepare(client)
        address = urlsplit(ready["server_url"])
        with closing(socket.create_connection((address.hostname, address.port))) as stalled:
            # A client that announces a body and never sends it must not hold the server up.
            head = "POST /api/v1/streams/s0/reports HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\nx"
            stalled.sendall(head.encode())
            with sending(ready["server_url"], acknowledged, refused):
                until(lambda: sum(acknowledged) >= 40, "forty acknowledgements")
                process.send_signal(signal.SIGTERM)
                process.wait(PATIENCE_SECONDS)
    assert set(refused) <= {503}
    assert {path.name for path in tmp_path.iterdir()} == LEFT, "the log was folded into the database"
    with serving(tmp_path, "--no-auth") as (_, client, _):
        stored_of(client, acknowledged)


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


class HangingMessages(BackgroundThread):
    """An alert thread whose webhook answers only once `answered` is set."""

    def __init__(self):
        super().__init__("hanging", interval_seconds=0.001)
        self.asked = threading.Event()
        self.answered = threading.Event()

    def do_due_work(self):
        self.asked.set()
        self.answered.wait()


def test_a_webhook_that_hangs_takes_no_time_from_what_waits_to_be_committed(settings, monkeypatch):
    hanging, left = HangingMessages(), []

    async def recorded(deadline_seconds):
        left.append(deadline_seconds)
        await stop(deadline_seconds)

    try:
        with running(settings, limits=FixedLimits(shutdown_seconds=0.5)) as server:
            stop = server.state.writer.stop
            monkeypatch.setattr(server.state.writer, "stop", recorded)
            server.app.state.alert_threads.append(hanging)
            hanging.start()
            assert hanging.asked.wait(60)
        assert left[0] > 0.0
    finally:
        hanging.answered.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_with_its_log_folded_into_the_database(tmp_path, number):
    with serving(tmp_path) as (process, client, ready):
        token = (tmp_path / "token").read_text(encoding="ascii").strip()
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        assert ready["dir"] == str(tmp_path)
        assert client.get("/api/v1/runs").status_code == 401
        answer = client.get("/api/v1/runs", headers={"Authorization": f"Bearer {token}"})
        assert answer.json() == {"runs": [], "cursor": None, "damaged": []}
        process.send_signal(number)
        process.wait(PATIENCE_SECONDS)
    assert {path.name for path in tmp_path.iterdir()} == LEFT | {"token"}


@pytest.mark.parametrize(
    ("folder", "flags", "said"),
    [
        ("data", ["--token-file", "none"], "cannot be read"),
        ("file/data", [], "file/data"),
        ("file/data", ["--no-auth"], "file/data"),
        ("newer", ["--no-auth"], "schema revision '9999', which this server does not know: a newer server made it"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_sentence(tmp_path, folder, flags, said):
    (tmp_path / "file").write_text("")
    (tmp_path / "newer").mkdir()
    store = SqliteStore(tmp_path / "newer" / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store.close()
    done = run_command(SERVER, *SERVES, "--dir", tmp_path / folder, "--port", 0, *flags)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert said in line


def test_importing_it_opens_starts_and_configures_nothing(tmp_path):
    """And the contract alone never pulls it in."""
    given = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": PATIENCE_SECONDS}
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTS], **given)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
