"""GET /correlation: what stands at the end of each run, and coefficients against exact references."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from collage_server.queries.correlation import _mean_ranks, _pearson

from collage_monitor import wire
from tests.server.samples import LAYERS, STATISTICS, block, report


def exact_pearson(x, y):
    """In fractions, rounded once at the end."""
    x, y = [Fraction(value) for value in x], [Fraction(value) for value in y]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    xy = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    xx, yy = sum((a - x_mean) ** 2 for a in x), sum((b - y_mean) ** 2 for b in y)
    return math.copysign(math.sqrt(xy * xy / (xx * yy)), xy)


@pytest.mark.parametrize("seed", range(5))
def test_pearson_against_fractions(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=7) + 1e6
    y = 0.3 * x + rng.normal(size=7)
    assert _pearson(x, y) == pytest.approx(exact_pearson(x.tolist(), y.tolist()), rel=1e-6)


def test_coefficients_at_the_edges():
    line = np.array([1.0, 2.0, 3.0])
    assert _pearson(line, -line) == pytest.approx(-1.0)
    assert _pearson(line * 5e307, line * 1e-308) == pytest.approx(1.0)
    assert _pearson(line[:2], line[:2]) is None
    assert _pearson(line, np.ones(3)) is None
    assert _mean_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def lossy(step, share):
    values = block(step)
    values[STATISTICS.index("intended_effective_sum")] = share * values[STATISTICS.index("intended_squared_sum")]
    return values


def fill(server, run_id, shares, losses):
    server.run(run_id)
    server.attempt(run_id)
    server.stream(run_id, stream_id=f"{run_id}-s")
    reports = [
        report(i, 10 * (i + 1), values=lossy(10, share), scalars={} if loss is None else {"validation_loss": loss})
        for i, (share, loss) in enumerate(zip(shares, losses, strict=True))
    ]
    server.reports(reports, f"{run_id}-s")


def ask(server, runs, x="edq_ratio", y="validation_loss", **more):
    query = "&".join([f"run={run}" for run in runs] + [f"{name}={value}" for name, value in more.items()])
    return server.get(f"/correlation?x={x}&y={y}&{query}", wire.Correlation)


def test_the_last_tenth_of_each_run_counts(server):
    final = {"a": (0.5, 3.0), "b": (0.75, 2.5), "c": (1.0, 2.25)}
    for run_id, (share, loss) in final.items():
        fill(server, run_id, [0.0] * 18 + [share - 0.25, share + 0.25], [9.0] * 18 + [loss - 1, loss + 1])
    found = ask(server, final)
    assert {run.run_id: (run.x, run.y) for run in found.runs} == {
        run_id: (pytest.approx(share), pytest.approx(loss)) for run_id, (share, loss) in final.items()
    }
    assert (found.n, found.missing, found.window) == (3, [], 0.1)
    assert found.pearson == pytest.approx(exact_pearson(*zip(*final.values(), strict=True)), rel=1e-9)
    assert found.spearman == pytest.approx(-1.0)
    whole = ask(server, final, window=1.0)
    assert whole.runs[0].x == pytest.approx((0.25 + 0.75) / 20)
    assert whole.runs[0].y == pytest.approx((18 * 9 + 6) / 20)


def test_missing_values_are_named_and_left_out(server):
    fill(server, "a", [0.5] * 4, [1.0] * 4)
    fill(server, "b", [0.6] * 4, [math.nan] * 4)
    fill(server, "c", [0.7] * 4, [None] * 4)
    server.run("empty")
    found = ask(server, ["a", "b", "c", "empty", "a"])
    assert [run.run_id for run in found.runs] == ["a", "b", "c", "empty"]
    assert {(entry.run_id, entry.key, entry.reason) for entry in found.missing} == {
        ("b", "validation_loss", "not finite"),
        ("c", "validation_loss", "not reported"),
        ("empty", "edq_ratio", "not reported"),
        ("empty", "validation_loss", "not reported"),
    }
    assert (found.n, found.pearson, found.spearman) == (1, None, None)
    assert [entry.reason for entry in ask(server, ["a"], x="edq_oracle_ratio").missing] == ["not reported"]


def test_metrics_of_some_layers(server):
    server.filled()
    for more in ({"layer": LAYERS[1]}, {"pattern": "blocks.*"}, {"module_type": "Linear"}):
        [run] = ask(server, ["r1"], y="loss", window=1.0, **more).runs
        assert run.x == server.series("edq_ratio", points=1, **more).values[0]
    assert run.x != server.series("edq_ratio", points=1).values[0]
    assert server.get("/correlation?x=edq_ratio&y=loss&run=r1&pattern=zz", status=404).field == "pattern"


def test_a_ratio_without_a_denominator_is_undefined(server):
    server.filled()
    nothing = block(60)
    nothing[STATISTICS.index("intended_squared_sum")] = 0.0
    server.reports([report(9, 60, values=nothing)])
    found = ask(server, ["r1"], y="loss")
    assert [(entry.key, entry.reason) for entry in found.missing] == [("edq_ratio", "undefined")]
    assert (found.runs[0].x, found.runs[0].y) == (None, pytest.approx(3.4))


def test_refusals(server):
    fill(server, "a", [0.5], [1.0])
    for query, field in (
        ("x=nonsense&y=loss&run=a", "metric"),
        ("x=edq_ratio/label&y=loss&run=a", "metric"),
        ("x=edq_ratio&y=loss&run=a&window=0", "window"),
        ("x=edq_ratio&y=loss", "run"),
        ("x=edq_ratio&run=a", "y"),
    ):
        assert server.get(f"/correlation?{query}", status=422).field == field, query
    assert server.get("/correlation?x=edq_ratio&y=loss&run=zz", status=404).field == "run_id"
