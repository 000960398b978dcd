"""A real server process: says where it listens, ends cleanly, and loses nothing acknowledged when killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import contextmanager

import httpx
import pytest
from collage_server.store import SqliteStore

from collage_monitor import wire
from tests.forking import SERVER, command, fork, run_command
from tests.server.limited import limits_and_variables
from tests.server.samples import report, stream_create
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

SERVES = ("serve", "--json")
SERVE = command(*SERVES)


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


def post_until_it_dies(url, worker, acknowledged):
    """Send reports one by one from where the last server died; each is counted only after its answer has come."""
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False) as client:
        for seq in range(acknowledged[worker], 100_000):
            batch = wire.ReportBatch(reports=[report(seq, seq + 1)])
            try:
                send(client, f"/streams/s{worker}/reports", batch, wire.encode_batch)
            except httpx.HTTPError:
                return
            acknowledged[worker] = seq + 1


def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path):
    acknowledged = [0] * 4
    enough = 25
    for _ in range(2):
        with serving(tmp_path, "--no-auth") as (process, client, ready):
            prepare(client)
            start = sum(acknowledged)
            senders = [
                threading.Thread(target=post_until_it_dies, args=(ready["server_url"], i, acknowledged))
                for i in range(4)
            ]
            for sender in senders:
                sender.start()
            until(lambda wanted=start + enough: sum(acknowledged) >= wanted, "acknowledgements")
            process.send_signal(signal.SIGKILL)
            for sender in senders:
                sender.join()
    with serving(tmp_path, "--no-auth") as (_, client, _):
        streams = client.get("/api/v1/runs/r1/streams").json()["streams"]
        stored = {entry["stream_id"]: entry["reports"] for entry in streams}
        for worker, count in enumerate(acknowledged):
            assert count <= stored[f"s{worker}"] <= count + 1, (
                "acknowledged is stored; at most one more was in flight"
            )
        steps = client.get("/api/v1/runs/r1/series", params={"metric": "lost", "points": 10_000}).json()["steps"]
        assert steps == list(range(1, max(stored.values()) + 1))


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
    assert {path.name for path in tmp_path.iterdir()} == {
        "collage.sqlite",
        "collage.sqlite-ballast",
        "collage.sqlite-was-here",
        "token",
    }


def test_print_settings_masks_the_token(tmp_path):
    done = run_command(SERVER, *SERVES, "--dir", tmp_path, "--print-settings")
    printed = json.loads(done.stdout)
    assert printed["token"] == "***"
    assert printed["port"] == 7420
    assert (tmp_path / "token").read_text(encoding="ascii").strip() not in done.stdout


def test_a_missing_token_file_is_a_sentence(tmp_path):
    done = run_command(SERVER, *SERVES, "--dir", tmp_path, "--token-file", tmp_path / "none")
    assert done.returncode != 0
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flags", [[], ["--no-auth"]])
def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path, flags):
    (tmp_path / "file").write_text("")
    done = run_command(SERVER, *SERVES, "--dir", tmp_path / "file" / "data", *flags)
    assert done.returncode == 1
    assert f"{tmp_path / 'file' / 'data'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_of_a_newer_server_is_refused_with_a_sentence(tmp_path):
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store.close()
    done = run_command(SERVER, *SERVES, "--dir", tmp_path, "--no-auth", "--port", 0)
    assert done.returncode == 1
    assert "schema revision '9999', which this server does not know: a newer server made it" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
