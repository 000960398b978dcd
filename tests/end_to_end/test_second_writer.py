"""Writers without a training's steps: an evaluator in a process of its own, late, resumed, two at once, after the
end; and runs that only log, which are kept when killed and hidden by nothing later."""

import collage_agent as collage
import pytest

from collage_monitor.local import read_token
from tests.forking import TRAINING, fork, run_command
from tests.waiting import until

pytestmark = pytest.mark.slow

EVALUATOR = """
import sys
import collage_agent as collage
url, folder, value, *steps = sys.argv[1:]
collage.init(run_id="r1", role="evaluator", server_url=url, dir=folder)
for step in steps:
    collage.log({"accuracy": float(value)}, step=int(step))
collage.finish()
"""
LOGS = """
import sys, time
import collage_agent as collage
collage.init("log", run_id="killed", mode="offline", dir=sys.argv[1])
for step in range(1, 100_000):
    collage.log({"loss": 1 / step}, step=step)
    print(step, flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def evaluate(server, tmp_path):
    """Starts an evaluator; what it returns waits for its end."""
    script = tmp_path / "evaluate.py"
    script.write_text(EVALUATOR)

    def begin(value, steps):
        process = fork(TRAINING, script, server.url, server.folder, value, *steps)

        def wait():
            output, errors = process.communicate()
            assert process.returncode == 0, f"{output}{errors}"
            return output

        return wait

    return begin


def begin(server, run_id, **arguments):
    return collage.init("p", run_id=run_id, server_url=server.url, dir=server.folder, **arguments)


def train(server, steps, **arguments):
    run = begin(server, "r1", **arguments)
    for step in steps:
        collage.log({"loss": 1 / step}, step=step)
    until(lambda: run.reports_sent >= len(steps) - 1)


def curve(client, name="evaluator/accuracy", run_id="r1"):
    points = client.series(run_id, name, points=10_000)
    return dict(zip(points.steps, points.values, strict=True))


def test_evaluators_beside_a_training_and_after_it(server, client, evaluate):
    train(server, range(1, 6001))
    late = evaluate(0.1, range(100, 1001, 100))
    other = evaluate(0.2, range(150, 1001, 100))
    late()
    assert "run r1" in other()
    expected = {**dict.fromkeys(range(100, 1001, 100), 0.1), **dict.fromkeys(range(150, 1001, 100), 0.2)}
    assert curve(client) == expected
    assert client.run("r1").state == "running"
    collage.finish()
    run = client.run("r1")
    assert (run.state, run.last_step) == ("finished", 6000)
    assert set(run.scalars) == {"loss", "evaluator/accuracy"}
    evaluate(0.3, (900, 1000, 1100))()
    assert curve(client) == {**expected, 900: 0.3, 1000: 0.3, 1100: 0.3}
    train(server, range(500, 801), resume="must")
    collage.finish()
    assert curve(client) == {**expected, 900: 0.3, 1000: 0.3, 1100: 0.3}
    assert sorted(curve(client, "loss")) == list(range(1, 801))
    run = client.run("r1")
    assert (run.state, run.last_step, [entry.attempt for entry in run.attempts]) == ("finished", 800, [1, 2])


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
    found = [*curve(client, "loss", "killed")]
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
    assert [*curve(client, "loss", "late")] == list(range(1, 21))
    assert [*curve(client, "accuracy", "late")] == [3, 5, 10]
    assert [*curve(client, "evaluation", "late")] == [1, 2, 3, 4, 5]
    assert client.run("late").last_step == 20
