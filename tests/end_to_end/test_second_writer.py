"""An evaluator in a process of its own against a real server: late, resumed, two at once, after the end; killed."""

import textwrap

import collage_agent as collage
import pytest

from tests.forking import TRAINING, fork
from tests.waiting import until

pytestmark = pytest.mark.slow

EVALUATOR = textwrap.dedent(
    """
    import sys
    import collage_agent as collage
    url, folder, value, *steps = sys.argv[1:]
    collage.init(run_id="r1", role="evaluator", server_url=url, dir=folder)
    for step in steps:
        collage.log({"accuracy": float(value)}, step=int(step))
    collage.finish()
    """
)


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


def train(server, steps, **arguments):
    run = collage.init("p", run_id="r1", server_url=server.url, dir=server.folder, **arguments)
    for step in steps:
        collage.log({"loss": 1 / step}, step=step)
    until(lambda: run.reports_sent >= len(steps) - 1)


def curve(client, name="evaluator/accuracy"):
    points = client.series("r1", name, points=10_000)
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


def test_both_writers_lose_nothing_where_the_server_is_killed(server, client):
    run = collage.init("p", run_id="r1", server_url=server.url, dir=server.folder)
    script = textwrap.dedent(
        """
        import sys, time
        import collage_agent as collage
        run = collage.init(run_id="r1", role="evaluator", server_url=sys.argv[1], dir=sys.argv[2])
        for step in range(2000, 0, -1):
            collage.log({"accuracy": 1 / step}, step=step)
            time.sleep(0.002)
        while run.reports_spooled:
            time.sleep(0.05)
        collage.finish()
        print(run.reports_sent, run.reports_dropped)
        """
    )
    path = server.folder / "evaluate.py"
    path.write_text(script)
    process = fork(TRAINING, path, server.url, server.folder)
    for kill in range(3):
        before = run.reports_sent
        for step in range(1000 * kill + 1, 1000 * kill + 1001):
            collage.log({"loss": 1 / step}, step=step)
        until(lambda before=before: run.reports_sent > before)
        server.kill()
        server.start()
    until(lambda: run.reports_spooled == 0, "an empty spool")
    collage.finish()
    output, errors = process.communicate()
    assert process.returncode == 0, f"{output}{errors}"
    assert output.splitlines()[-1] == "2000 {}"
    assert curve(client) == {step: 1 / step for step in range(1, 2001)}
    assert curve(client, "loss") == {step: 1 / step for step in range(1, 3001)}
    assert {stream.attempt: stream.reports for stream in client.streams("r1").streams} == {1: 3000, -1: 2000}
