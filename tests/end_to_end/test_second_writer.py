"""An evaluator in a process of its own against a real server: late, resumed, two at once, after the end."""

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
