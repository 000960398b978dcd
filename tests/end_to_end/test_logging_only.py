"""Runs that only log, against a real server: seen while they run, kept when killed, not hidden later."""

import collage_agent as collage
import pytest

from collage_monitor.local import read_token
from tests.forking import TRAINING, fork, run_command

pytestmark = pytest.mark.slow

LOGS = """
import sys, time
import collage_agent as collage
collage.init("log", run_id="killed", mode="offline", dir=sys.argv[1])
for step in range(1, 100_000):
    collage.log({"loss": 1 / step}, step=step)
    print(step, flush=True)
    time.sleep(0.02)
"""


def begin(server, run_id, **arguments):
    return collage.init("log", run_id=run_id, server_url=server.url, dir=server.folder, **arguments)


def steps(client, run_id, name="loss"):
    return client.series(run_id, name, points=5000).steps


def test_a_killed_offline_run_that_only_logged_is_replayed(server, client, tmp_path):
    script = tmp_path / "logs.py"
    script.write_text(LOGS)
    offline = tmp_path / "offline"
    process = fork(TRAINING, script, offline)
    logged = [int(process.stdout.readline()) for _ in range(200)]
    process.kill()
    process.communicate()
    given = ("--server-url", server.url, "--token", read_token(server.folder))
    replayed = run_command(TRAINING, "sync", *given, "--dir", offline)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    found = steps(client, "killed")
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= len(logged) // 2


def test_a_late_evaluation_hides_nothing(server, client):
    begin(server, "late")
    for step in range(1, 21):
        collage.log({"loss": 1 / step}, step=step)
    for step in (5, 10, 3):
        collage.log({"accuracy": float(step)}, step=step)
    collage.finish()
    begin(server, "late", resume="must")
    for step in range(1, 6):
        collage.log({"evaluation": 5.0 + step}, step=step)
    collage.finish()
    assert steps(client, "late") == list(range(1, 21))
    assert steps(client, "late", "accuracy") == [3, 5, 10]
    assert steps(client, "late", "evaluation") == [1, 2, 3, 4, 5]
    assert client.run("late").last_step == 20
