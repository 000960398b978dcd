"""Series, heatmap, histogram, compare, latest: against totals merged here, independently."""

import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from collage_server.api import store_reads
from collage_server.queries.layer_answers import worst_order
from collage_server.store.reading import run_view

from collage_monitor import wire
from tests.server.samples import LAYERS, STATISTICS, block, report, report_of_totals, stream_create
from tests.server.statements import statements_on
from tests.server.store.contract import LIMITS

STEPS = range(10, 60, 10)


def total(name, steps=STEPS, ranks=(0,), layers=slice(None)):
    """Exact sum of a statistic over steps, ranks and layers."""
    row = STATISTICS.index(name)
    numbers = [block(step, rank)[row][layers] for step in steps for rank in ranks]
    return float(sum(Fraction(float(value)) for part in numbers for value in np.atleast_1d(part)))


def edq_ratio(**more):
    return total("intended_effective_sum", **more) / total("intended_squared_sum", **more)


def same(found, expected, rel):
    """Two answers, but for the last bits of their numbers: how long an array is decides how numpy rounds."""
    for name, held in msgspec.structs.asdict(expected).items():
        known = pytest.approx(held, rel=rel, nan_ok=True) if isinstance(held, list) else held
        assert getattr(found, name) == known, name


def long_run(server):
    """Of so many steps that, sealed, it is answered from coarse points."""
    server.store.sealing.limits = LIMITS
    server.filled(steps=range(1, 4 * LIMITS.points + 1))


def test_a_point_a_step_and_one_that_merges_the_whole_run(filled):
    series = filled.series("edq_ratio")
    assert series.steps == series.first_steps == list(STEPS)
    assert series.values == pytest.approx([edq_ratio(steps=[step]) for step in STEPS])
    assert series.ranks == [1] * 5
    assert all(low < value < high for low, value, high in zip(series.low, series.values, series.high, strict=True))
    whole = filled.series("edq_ratio", points=1)
    assert (whole.first_steps, whole.steps) == ([10], [50])
    assert whole.values == pytest.approx([edq_ratio()])
    assert whole.minimum == pytest.approx([min(series.values)])
    assert whole.maximum == pytest.approx([max(series.values)])


@pytest.mark.slow
def test_of_a_layer_a_pattern_and_a_module_type(filled):
    for chosen, layers in (
        ({"layer": LAYERS[1]}, 1),
        ({"pattern": "blocks.*"}, slice(1, 3)),
        ({"module_type": "Linear"}, slice(1, 3)),
        ({"module_type": "Linear", "pattern": "*.1.*"}, 2),
    ):
        series = filled.series("edq_ratio", points=1, **chosen)
        assert series.values == pytest.approx([edq_ratio(layers=layers)]), chosen
    assert filled.series("edq_ratio", module_type="Linear").layer == "Linear"
    heatmap = filled.get("/runs/r1/heatmap?metric=edq_ratio&module_type=Linear&points=2", wire.Heatmap)
    assert heatmap.layers == LAYERS[1:]
    last = [edq_ratio(steps=[40, 50], layers=layer) for layer in (1, 2)]
    assert [row[-1] for row in heatmap.values] == pytest.approx(last)
    worst = filled.get("/runs/r1/worst?module_type=Embedding", list[wire.WorstLayer])
    assert [entry.layer for entry in worst] == [LAYERS[0]]


def test_a_module_type_that_is_not_there(filled):
    for route in ("series?metric=edq_ratio", "heatmap?metric=edq_ratio", "worst?k=1"):
        error = filled.get(f"/runs/r1/{route}&module_type=LayerNorm", status=404)
        assert error.field == "module_type"
        assert "Embedding, Linear" in error.message
    for query, status, field in (
        ("edq_ratio&layer=x", 422, "module_type"),
        ("loss", 422, "layer"),
        ("edq_ratio&pattern=embedding*", 404, "pattern"),
    ):
        error = filled.get(f"/runs/r1/series?metric={query}&module_type=Linear", status=status)
        assert error.field == field


def test_the_undefined_is_null_scalars_keep_what_is_not_finite_and_tokens_are_the_last_logged(server):
    server.filled(steps=())
    tokens = {20: {"tokens": 64.0}, 40: {"tokens": 128.0}}
    server.reports([report(i, step, scalars=tokens.get(step, {})) for i, step in enumerate(STEPS)])
    assert server.series("edq_ratio", axis="tokens").positions == [None, 64.0, 64.0, 128.0, 128.0]
    values = block(60)
    values[STATISTICS.index("intended_squared_sum")] = 0.0
    server.reports([report(5, 60, values=values, scalars={})])
    assert server.series("edq_ratio").values[-1] is None
    undefined = server.series("edq_oracle_ratio")
    assert (undefined.values, undefined.low) == ([None] * 6, None)
    logged = [1.0, float("nan"), float("inf"), float("-inf")]
    sent = [report(i, 10 * i, scalars={"loss": value}, measured=False) for i, value in enumerate(logged, 7)]
    server.reports(sent)
    assert server.series("loss").values == [1.0, "NaN", "Infinity", "-Infinity"]
    assert server.get("/runs/r1", wire.Run).scalars["loss"].value == "-Infinity"


@pytest.mark.slow
def test_a_logged_name_that_begins_as_a_metric_does_is_a_scalar(server):
    server.filled()
    scalars = {"grad_norm/encoder": 7.0, "lost_window_ratio": 2.0, "grad_norm": 3.0}
    server.reports([report(9, 60, scalars=scalars)])
    for name in ("grad_norm/encoder", "lost_window_ratio"):
        assert server.series(name).values == [scalars[name]]
        assert server.series(name, cursor="").steps == [60]
        [run] = server.compare("r1", metric=name)
        assert run.series.values == [scalars[name]]
        assert server.get(f"/runs/r1/series?metric={name}&layer={LAYERS[0]}", status=422).field == "layer"
        assert server.get(f"/runs/r1/heatmap?metric={name}", status=422).field == "metric"
    assert server.series("grad_norm").steps == [10, 20, 30, 40, 50, 60], "the metric, not what was logged"
    for unknown in ("grad_norm/decoder", "state_decrement_ratio"):
        refused = server.get(f"/runs/r1/series?metric={unknown}", status=422)
        assert (refused.field, unknown.partition("/")[0] in refused.message) == ("metric", True)


def test_scalar_buckets_are_means_with_extremes(filled):
    series = filled.series("loss", points=2)
    logged = [4.0 - 0.01 * step for step in STEPS]
    assert series.values == pytest.approx([sum(logged[:3]) / 3, sum(logged[3:]) / 2])
    assert series.minimum == pytest.approx([logged[2], logged[4]])
    assert series.maximum == pytest.approx([logged[0], logged[3]])


def test_heatmaps_of_all_and_of_some_layers_over_some_steps(filled):
    answer = filled.get("/runs/r1/heatmap?metric=edq_ratio&points=2", wire.Heatmap)
    assert answer.layers == LAYERS
    assert answer.steps == [30, 50]
    for index, row in enumerate(answer.values):
        expected = [edq_ratio(steps=steps, layers=index) for steps in ([10, 20, 30], [40, 50])]
        assert row == pytest.approx(expected)
    worst = filled.get("/runs/r1/heatmap?metric=edq_ratio&order=worst", wire.Heatmap)
    assert worst.layers == LAYERS[::-1]
    asked = "metric=edq_ratio&pattern=blocks.*&from=20&to=40&points=2&axis=tokens"
    answer = filled.get(f"/runs/r1/heatmap?{asked}", wire.Heatmap)
    assert answer.layers == LAYERS[1:]
    assert (answer.first_steps, answer.steps) == ([20, 40], [30, 40])
    assert (answer.axis, answer.positions) == ("tokens", [3000.0, 4000.0])
    for index, row in enumerate(answer.values, start=1):
        assert row == pytest.approx([edq_ratio(steps=steps, layers=index) for steps in ([20, 30], [40])])
    plain = filled.get("/runs/r1/heatmap?metric=edq_ratio", wire.Heatmap)
    assert (plain.axis, plain.positions) == ("step", [float(step) for step in STEPS])
    empty = filled.get("/runs/r1/heatmap?metric=edq_ratio&from=60&axis=time", wire.Heatmap)
    assert (empty.steps, empty.positions) == ([], [])


@pytest.mark.parametrize(
    ("metric", "values", "worst_first"),
    [
        ("edq_ratio", [0.9, 1.2, float("nan"), -1.0], [3, 0, 1, 2]),
        ("edq_oracle_ratio", [0.9, 1.2, float("nan"), 1.0], [1, 0, 3, 2]),
        ("lost_update_ratio", [0.0, 0.5, float("nan"), 0.1], [1, 3, 0, 2]),
        ("half_ulp_margin", [3.0, -2.0, float("nan"), 0.5], [1, 3, 0, 2]),
        ("edq", [3.0, -2.0, float("nan"), 0.5], [1, 3, 0, 2]),
        ("half_ulp_lr_factor", [0.5, 4.0, float("nan"), 1.0], [1, 3, 0, 2]),
    ],
)
def test_which_layer_is_worse(metric, values, worst_first):
    assert worst_order(metric, np.array(values)).tolist() == worst_first


def test_worst_of_some_layers_at_an_earlier_step(server):
    server.filled()
    higher = block(30)
    higher[STATISTICS.index("intended_effective_sum")] *= 2.0
    server.reports([report(9, 35, values=higher)])
    for step, factor in ((34, 1.0), (39, 2.0)):
        worst = server.get(f"/runs/r1/worst?pattern=*.weight&step={step}&k=2", list[wire.WorstLayer])
        assert [entry.layer for entry in worst] == LAYERS[:0:-1]
        assert [entry.value for entry in worst] == pytest.approx([0.7 * factor, 0.8 * factor])


@pytest.mark.slow
def test_histograms_of_layers_ranks_and_steps(server):
    server.filled()
    server.stream(stream_id="s1", rank=1, world_size=2)
    server.reports([report(i, step, rank=1) for i, step in enumerate(STEPS)], "s1")

    def mass(query):
        return sum(server.get(f"/runs/r1/histogram?{query}", wire.Histogram).counts)

    assert mass("") == 2 * 5 * 3 * 120.0
    assert mass("rank=1") == 5 * 3 * 120.0
    assert mass("rank=1&step=35") == 3 * 120.0
    assert mass("from=20&to=30") == 2 * 2 * 3 * 120.0
    assert mass("module_type=Linear&pattern=blocks.*") == 2 * 5 * 2 * 120.0
    assert server.get("/runs/r1/histogram?pattern=blocks.*", wire.Histogram).layer == "blocks.*"
    whole = server.get("/runs/r1/histogram", wire.Histogram)
    counts = dict(zip(whole.labels, whole.counts, strict=True))
    assert (counts["-3"], counts["0"], counts["overflow"]) == (10.0 * 2 * 3 * 5, 110.0 * 2 * 3 * 5, 0.0)
    at = server.get(f"/runs/r1/histogram?step=35&layer={LAYERS[0]}", wire.Histogram)
    assert (at.first_step, at.step, sum(at.counts)) == (30, 30, 2 * 120.0)


def test_compare_merges_over_everything(server):
    server.filled()
    server.filled("r2", "s1", steps=range(10, 30, 10))
    first, second = server.compare("r1", "r2", metric="edq_ratio")
    assert first.merged["edq_ratio"] == pytest.approx(edq_ratio())
    assert first.merged["edq_ratio_low"] < first.merged["edq_ratio"] < first.merged["edq_ratio_high"]
    assert second.merged["edq_ratio"] == pytest.approx(edq_ratio(steps=[10, 20]))
    assert (first.reports, second.reports) == (5, 2)
    assert first.mean_scalars["loss"] == pytest.approx(4.0 - 0.01 * 30)
    assert first.strategy == "plain"
    assert second.series.steps == [10, 20]
    server.filled("r3", "s3", steps=())
    server.reports([report(i, i + 1, measured=False, scalars={"loss": float(i)}) for i in range(50)], "s3")
    [third] = server.compare("r3", metric="loss")
    assert third.mean_scalars["loss"] == sum(range(30, 50)) / 20, "of the last twenty"


def test_latest_names_the_worst_layers(filled):
    answer = filled.get("/runs/r1/latest", wire.Latest)
    assert answer.step == 50
    assert answer.model["edq_ratio"] == pytest.approx(edq_ratio(steps=[50]))
    assert [entry.layer for entry in answer.worst] == LAYERS[::-1]
    assert answer.scalars["loss"].step == 50
    top = filled.get("/runs/r1/worst?metric=lost_update_ratio&k=1", list[wire.WorstLayer])
    assert [entry.layer for entry in top] == [LAYERS[2]]


def test_two_ranks_are_one_process(server):
    server.ranks(2)
    for rank in range(2):
        server.reports([report(i, step, rank=rank) for i, step in enumerate(STEPS)], f"s{rank}")
    merged = server.series("edq_ratio", points=1)
    assert merged.values == pytest.approx([edq_ratio(ranks=(0, 1))])
    assert (merged.ranks, merged.world_size) == ([2], 2)
    assert server.series("elements").values == [2.0 * 3 * 128] * 5
    alone = server.series("edq_ratio", points=1, rank=1)
    assert alone.values == pytest.approx([edq_ratio(ranks=(1,))])
    layer = server.series("grad_norm", layer=LAYERS[1], points=1)
    squares = total("gradient_squared_sum", ranks=(0, 1), layers=1)
    assert layer.values == pytest.approx([math.sqrt(squares / len(STEPS))])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_point_lacks_ranks_of_its_own_attempt_only(server, before, after):
    server.run()
    for launch, (ranks, first_step) in enumerate([(before, 1), (after, 45)], start=1):
        server.attempt(launch_id=f"launch-{launch}", first_step=first_step)
        for rank in range(ranks):
            stream_id = f"s{launch}-{rank}"
            server.stream(stream_id=stream_id, launch_id=f"launch-{launch}", rank=rank, world_size=ranks)
            steps = [step for step in range(10, 90, 10) if (step < 60) == (launch == 1)]
            steps = steps[:-1] if rank == 1 else steps
            server.reports([report(i, step, rank=rank) for i, step in enumerate(steps)], stream_id)
    series = server.series("edq_ratio")
    assert series.steps == [10, 20, 30, 40, 60, 70, 80]
    assert series.expected_ranks == [before] * 4 + [after] * 3
    assert series.world_size == after
    assert series.ranks == [before] * 4 + [after] * 2 + [1]
    [run] = server.compare("r1", metric="edq_ratio", to=70)
    assert run.series.expected_ranks == [before] * 4 + [after] * 2
    for more, expected in (({"to": 70}, [1]), ({}, [after])):
        merged = server.series("edq_ratio", points=1, **more)
        assert (merged.ranks, merged.expected_ranks) == ([1], expected), "up to 70 no step lacks a rank"
    assert server.series("edq_ratio", layer=LAYERS[0]).expected_ranks == series.expected_ranks


def test_replicas_beside_shards_of_one_rank(server):
    server.run()
    server.attempt()
    for rank in range(2):
        layers = list(stream_create(replica=0).layers)
        layers[0] = stream_create(replica=rank).layers[0]
        server.stream(stream_id=f"s{rank}", rank=rank, world_size=2, layers=layers)
        server.reports([report(0, 10)], f"s{rank}")
    assert server.series("elements").values == [128.0 + 2 * 2 * 128]
    assert server.get("/runs/r1/latest", wire.Latest).model["elements"] == 128.0 + 2 * 2 * 128


def test_reports_of_one_step_merge(server):
    """Two watched optimizers in one process, each with its own layers."""
    server.filled(steps=())
    first, second = block(10), block(10)
    first[:, 1:] = np.nan
    second[:, :1] = np.nan
    server.reports([report(0, 10, values=first), report(1, 10, values=second, scalars={})])
    assert server.series("elements").values == [3.0 * 128]
    assert server.series("edq_ratio").values == pytest.approx([edq_ratio(steps=[10])])
    assert server.series("edq_ratio").ranks == [1]
    assert server.get("/runs/r1/latest", wire.Latest).model["elements"] == 3.0 * 128


@pytest.mark.slow
def test_a_layer_and_a_pattern_from_points_that_are_merged_already(server, monkeypatch):
    """Long runs answer from coarse levels: a layer's extremes are those over its single steps.

    Of very many steps no single one is read: 60,000 steps of 20,000 layers kept a server busy for five minutes.
    """
    long_run(server)
    server.seal()
    lost = server.series("lost_update_ratio", layer=LAYERS[1], points=4)
    assert lost.minimum == lost.maximum == pytest.approx(lost.values)
    both = server.series("edq_ratio", pattern="blocks.*", points=4)
    assert both.values == pytest.approx([edq_ratio(layers=slice(1, 3), steps=[1])] * 4)
    each = server.series("edq_ratio", pattern="blocks.*", points=1)
    assert each.minimum[0] is not None
    monkeypatch.setattr(store_reads, "_MOST_NUMBERS", 100)
    monkeypatch.setattr(store_reads, "_NUMBERS_AT_ONCE", 100)
    whole, pieces = (server.series("edq_ratio", pattern="blocks.*", points=n, **{"from": 0}) for n in (1, 12))
    assert whole.values == pytest.approx(each.values, rel=1e-9)
    assert 4 < len(pieces.values) <= 12
    for coarse in (whole, pieces):
        assert (coarse.first_steps[0], coarse.steps[-1]) == (each.first_steps[0], each.steps[-1])
        assert coarse.minimum[0] is None


def test_many_names_of_layers_are_looked_up_once_a_question(server, monkeypatch):
    """They were sent to the database again for each few steps that were read."""
    monkeypatch.setattr(run_view, "_MOST_NAMES", 1)
    monkeypatch.setattr(store_reads, "_STEPS_AT_ONCE", 2)
    server.filled(steps=range(1, 9))
    with statements_on(server.store.engine) as asked:
        server.series("edq_ratio", pattern="blocks.*", points=2)
    assert sum("layer.name" in statement for statement in asked) == 2, "to match the pattern, and to find them"


@pytest.mark.slow
@pytest.mark.parametrize("together", [50, 4096])
def test_layers_together_keep_extremes_and_interval_when_they_are_sealed(server, monkeypatch, together):
    monkeypatch.setattr(store_reads, "_STEPS_AT_ONCE", together)
    long_run(server)
    layers: list[dict[str, Any]] = [{"pattern": "blocks.*"}, {"module_type": "Linear"}, {"pattern": "*"}]
    ranges: list[dict[str, Any]] = [{}, {"from": 9, "to": 120}]
    metrics = ("edq_ratio", "intended_norm")
    asked = [{"metric": metric, **more, **some} for metric in metrics for more in layers for some in ranges]
    before = [server.series(points=4, **question) for question in asked]
    server.seal()
    server.reports([report(4 * LIMITS.points, 4 * LIMITS.points, measured=False)])
    for held, question in zip(before, asked, strict=True):
        after = server.series(points=4, **question)
        assert max(held.maximum) > min(held.minimum)
        same(after, held, rel=1e-12)


@pytest.mark.slow
def test_runs_compared_together_are_what_each_is_alone(server):
    """Other lengths, other statistics, nothing measured: one pass over all runs gives what a run alone gives."""
    server.filled()
    server.filled("r2", "s1", steps=range(10, 330, 10))
    server.run("r3")
    server.run("r4")
    server.attempt("r4")
    few = ["measured_steps", "intended_squared_sum", "intended_effective_sum"]
    server.stream("r4", stream_id="s4", statistics=few)
    places = [STATISTICS.index(name) for name in few]
    server.reports([report_of_totals(seq, step, block(step)[places]) for seq, step in enumerate((10, 20))], "s4")
    runs = ["r1", "r2", "r3", "r4"]
    by_layer = (f"&layer={LAYERS[1]}", "&pattern=blocks.*", "&module_type=Linear&pattern=*1*")
    for more in ("", "&axis=time", "&from=20&to=40", "&rank=0&from=20", *by_layer):
        asked = [run for run in runs if run != "r3"] if more in by_layer else runs
        compared = server.compare(*asked, metric=f"edq_ratio&points=4{more}")
        assert [run.run_id for run in compared] == asked
        for run in compared:
            alone = server.get(f"/runs/{run.run_id}/series?metric=edq_ratio&points=4{more}", wire.Series)
            same(run.series, alone, rel=1e-14)
    merged = {run.run_id: run.merged for run in compared}
    assert "lost_update_ratio" in merged["r1"]
    assert "lost_update_ratio" not in merged["r4"]


def test_a_scalar_has_no_layers_in_a_comparison_and_an_answer_about_one_metric_says_nothing_of_more(filled):
    for more in (f"layer={LAYERS[0]}", "pattern=*", "module_type=Linear"):
        assert filled.get(f"/compare?run=r1&metric=loss&{more}", status=422).field == "layer"
    [run] = filled.compare("r1", metric="loss", **{"from": 20, "to": 40})
    assert run.series.steps == [20, 30, 40]
    assert filled.get("/compare?run=r1&metric=edq_ratio&rank=7", status=404).field == "rank"
    assert b'"more"' not in filled.get("/runs/r1/series?metric=edq_ratio").encode()
    refused = filled.get("/runs/r1/series?metric=edq_ratio&metric=loss&cursor=", status=422)
    assert (refused.code, refused.field) == ("unprocessable", "metric")


@pytest.mark.slow
def test_several_metrics_are_answered_together_as_each_alone(server):
    server.store.sealing.limits = LIMITS
    steps = range(1, 70)
    server.filled("r1", "s1", steps=steps)
    server.filled("r2", "s2", steps=steps)
    server.seal()
    several = ["edq_ratio", "loss", "grad_norm", "state_decrement_ratio/exp_avg_sq"]
    for chosen in ("", "&layer=blocks.0.weight", "&points=2", "&rank=0", "&axis=tokens&from=20"):
        check_together(server, [metric for metric in several if metric != "loss" or "layer" not in chosen], chosen)


def check_together(server, metrics, chosen):
    asked = "&metric=".join(metrics)
    alone = {metric: server.get(f"/runs/r1/series?metric={metric}{chosen}", wire.Series) for metric in metrics}
    together = server.get(f"/runs/r1/series?metric={asked}{chosen}", wire.Series)
    first, *others = metrics
    assert list(together.more) == others
    assert together.more == {metric: alone[metric] for metric in others}
    assert msgspec.structs.replace(together, more=msgspec.UNSET) == alone[first]
    compared = server.compare("r1", "r2", metric=f"{asked}{chosen}")
    assert [run.run_id for run in compared] == ["r1", "r2"]
    [beside] = server.compare("r1", metric=f"{first}{chosen}")
    assert msgspec.structs.replace(compared[0].series, more=msgspec.UNSET) == beside.series
    assert compared[0].series.more.keys() == set(others)
