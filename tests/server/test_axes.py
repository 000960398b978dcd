"""Series and compare on every axis, before and after sealing: places, values, minimum and maximum stay the same."""

import pytest
from collage_server.settings import FixedLimits, Settings

from collage_monitor import wire
from tests.server.conftest import Clock, running
from tests.server.migrated import put_migrated
from tests.server.samples import LAYERS, block, layer, report

pytestmark = pytest.mark.slow

STEPS = range(1, 601)


def fill(server):
    """A run of 600 measured steps on two ranks, one second a step."""
    server.ranks(2)
    for rank in range(2):
        reports = [report(step - 1, step, rank=rank, scalars=scalars_of(step, rank)) for step in STEPS]
        server.reports(reports, f"s{rank}")


def scalars_of(step, rank):
    if rank:
        return {}
    return {"loss": 4.0 - 0.001 * step} | ({"tokens": 64.0 * step} if step % 10 == 0 else {})


AXES = ("step", "tokens", "time")


def every_answer(server):
    """Series of metrics, scalars, ranks and layers on every axis, fine and merged whole, and comparisons."""
    found: dict[object, wire.Series] = {}
    for axis in AXES:
        for points in (1000, 1):
            asked = {"axis": axis, "points": points}
            for metric in ("edq_ratio", "loss"):
                found[axis, points, metric] = server.series(metric, **asked)
                found[axis, points, metric, "rank"] = server.series(metric, **asked, rank=0)
            found[axis, points, "layer"] = server.series("edq_ratio", **asked, layer="blocks.0.weight")
            compare = f"/compare?run=r1&metric=edq_ratio&axis={axis}&points={points}"
            found[axis, points, "compare"] = server.get(compare, wire.Comparison).runs[0].series
    return found | {"a rank": server.series("grad_norm", rank=1)}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    """(a server whose run is sealed, every answer from before that)."""
    folder = tmp_path_factory.mktemp("sealed")
    put_migrated(folder)
    limits = FixedLimits(seal_interval_seconds=1e6)
    with running(Settings(folder=folder, no_auth=True), Clock(), limits=limits) as server:
        fill(server)
        before = every_answer(server)
        server.seal()
        yield server, before


def test_no_axis_and_no_rank_depends_on_sealing(sealed):
    server, before = sealed
    after = every_answer(server)
    for place, series in after.items():
        assert_same(series, before[place])
        for low, value, high in zip(series.minimum, series.values, series.maximum, strict=True):
            assert low - 1e-12 <= value <= high + 1e-12
    by_step, by_tokens, by_time = (after[axis, 1000, "edq_ratio"] for axis in AXES)
    assert by_step.positions == list(STEPS)
    assert by_tokens.positions == [None] * 9 + [64.0 * (step // 10 * 10) for step in STEPS[9:]]
    assert by_time.positions == [step - 1.0 for step in STEPS]
    assert set(by_time.ranks) == {2}
    assert after["a rank"].values != server.series("grad_norm", rank=0).values
    assert server.get("/runs/r1/series?metric=grad_norm&rank=7", status=404).field == "rank"


def assert_same(after, before):
    for name in ("first_steps", "steps", "positions", "ranks", "world_size", "axis"):
        assert getattr(after, name) == getattr(before, name), name
    for name in ("values", "minimum", "maximum", "low", "high"):
        found, wanted = getattr(after, name), getattr(before, name)
        assert (found is None) == (wanted is None), name
        assert found is None or found == pytest.approx(wanted, rel=1e-12), name


def test_coarse_points_keep_the_extremes_of_single_steps(sealed):
    server, before = sealed
    single = dict(zip(STEPS, before["step", 1000, "edq_ratio"].values, strict=True))
    for axis in AXES:
        series = server.series("edq_ratio", axis=axis, points=7)
        assert 4 <= len(series.steps) <= 7
        assert series.first_steps == [1, *(step + 1 for step in series.steps[:-1])]
        for low, high, lowest, highest in extremes(series, single):
            assert (low, high) == (lowest, highest)
        ends = {"step": series.steps, "tokens": [64.0 * (step // 10 * 10) for step in series.steps]}
        assert series.positions == ends.get(axis, [step - 1.0 for step in series.steps])


def extremes(series, single):
    """Of each point: its minimum and maximum, and those over its single steps."""
    spans = zip(series.first_steps, series.steps, series.minimum, series.maximum, strict=True)
    for first, last, low, high in spans:
        inside = [single[step] for step in range(first, last + 1)]
        yield low, high, pytest.approx(min(inside)), pytest.approx(max(inside))


def test_extremes_are_those_of_single_steps_or_unknown(server):
    fill(server)
    metrics = ("edq_ratio", "edq_cosine", "grad_norm")
    parts: list[dict[str, str]] = [{}, {"layer": "blocks.1.weight"}, {"pattern": "blocks.*"}]
    asked = [{"metric": metric, **part} for metric in metrics for part in parts]
    single = [dict(zip(STEPS, server.series(**question).values, strict=True)) for question in asked]
    server.seal()
    for question, values in zip(asked, single, strict=True):
        for low, high, lowest, highest in extremes(server.series(**question, points=7), values):
            assert (low, high) == (lowest, highest), question
    server.store.retention.expire("r1", {1: server.clock() + 1e9})
    for question, values in zip(asked, single, strict=True):
        kept = len(question) == 1 or (question["metric"] != "edq_cosine" and "layer" in question)
        for low, high, lowest, highest in [*extremes(server.series(**question, points=7), values)][:2]:
            assert (low, high) == ((lowest, highest) if kept else (None, None)), question


def test_the_only_layer_is_the_model_at_every_level(server):
    server.run()
    server.attempt()
    server.stream(layers=[layer(LAYERS[0])])
    server.reports([report(step - 1, step, values=block(step, step % 5, layers=1)) for step in STEPS])
    server.seal()
    for points in (1000, 100, 7, 1):
        model, only = (server.series("edq_ratio", points=points, **more) for more in ({}, {"layer": LAYERS[0]}))
        assert None not in model.low
        for name in ("steps", "values", "minimum", "maximum", "low", "high"):
            assert getattr(only, name) == pytest.approx(getattr(model, name), rel=1e-12), name
