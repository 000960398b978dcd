"""The strategies page: what it recommends and why, its pictures, and the same steps kept otherwise."""

import msgspec
import pytest
from collage_dashboard.figures.style import STRATEGY_COLOURS
from collage_dashboard.figures.tradeoff import tradeoff
from collage_dashboard.pages.comparison_content import figure, lines_of
from collage_dashboard.pages.strategies_content import (
    STRATEGY_COLUMNS,
    _mean,
    counterfactual_table,
    strategy_table,
)
from collage_dashboard.view import View, read_address

from collage_monitor.recommendation import recommendation
from collage_monitor.seeds import Estimate
from collage_monitor.strategies import strategy_title
from collage_monitor.strategy_results import StrategyResult, results_by_strategy, run_results
from tests.dashboard.fake_server import FakeServer
from tests.dashboard.generated import DEMO, GeneratedRun
from tests.dashboard.walk import by_id, text


@pytest.fixture
def seeds(server):
    """Two seeds of plain and of the reference, as rows and side by side."""
    names = {"plain": "bfloat16", "reference": "float32"}
    ids = [f"{name}-{seed}" for name in names for seed in (1, 2)]
    for run_id in ids:
        name, _, seed = run_id.partition("-")
        server.runs[run_id] = GeneratedRun(f"{name} {seed}", "plain", names[name], run_id=run_id)
    found = server.client().run_table(run_ids=ids).rows
    return [msgspec.structs.replace(row, seed=int(row.run_id[-1])) for row in found], ids


@pytest.mark.slow
def test_the_page_opens_with_its_recommendation_and_a_row_a_strategy_be_runs_named_or_not(server, shown):
    page = shown("/compare?" + "&".join(f"run={run}" for run in DEMO))
    said = text(by_id(page, "compare-advice"))
    assert said.count("Use Collage plus · bfloat16: ") == 1
    assert "Collage light · bfloat16: 10 bytes a parameter, loss +0.009 (+0.4 %), exp_avg_sq is stuck" in said
    table = text(by_id(page, "compare-strategies"))
    assert [table.count(name) for name in ("Plain · bfloat16", "Plain · float32", "Collage plus")] == [1, 1, 1]
    for column in STRATEGY_COLUMNS:
        assert column.title in table
    assert "Losses are the validation losses at step 200." in table
    assert len(server.asked) == 1
    assert "Use Collage plus" in text(by_id(shown("/compare"), "compare-advice"))


@pytest.mark.slow
def test_the_picture_has_a_point_a_strategy_in_its_colour_and_marks_the_chosen(server):
    results = results_by_strategy(run_results(server.client().run_table(run_ids=DEMO).rows))
    by_bytes = tradeoff(results, chosen=recommendation(results).chosen)
    names = ["Collage plus", "Plain · bfloat16", "Collage light", "fp32 master weights", "Plain · float32"]
    assert [trace.name for trace in by_bytes.data] == names
    assert [trace.x[0] for trace in by_bytes.data] == [12.0, 8.0, 10.0, 16.0, 16.0]
    assert by_bytes.data[1].y[0] == pytest.approx(2.55 - 2.415)
    assert by_bytes.data[-1].y[0] == 0.0
    marked = [trace.name for trace in by_bytes.data if trace.marker.line.width]
    assert marked == ["Collage plus"]
    hollow = [trace.name for trace in by_bytes.data if trace.marker.symbol.endswith("-open")]
    assert hollow == ["Plain · bfloat16", "Collage light"], "what something speaks against"
    near = [(trace.x[0], trace.textposition) for trace in by_bytes.data if trace.x[0] == 16]
    assert len(set(near)) == 2, "labels of near points keep apart"


def result(strategy, dtype, gap, cost):
    """A strategy of one run, at this cost."""
    told: dict = {"runs": (), "tokens_per_second": None, "loss": Estimate(2.4 + gap, 1), "gap": Estimate(gap, 1)}
    told |= {"bytes_per_parameter": Estimate(cost, 1), "is_reference": dtype == "float32"}
    return StrategyResult(strategy=strategy, dtype=dtype, **told)


def measured(costs):
    """The demo's strategies at these costs."""
    gaps = {"plain": 0.0928, "light": -0.0003, "plus": -0.001, "master-weights": -0.0008}
    found = [*((strategy, "bfloat16", gap) for strategy, gap in gaps.items()), ("plain", "float32", 0.0)]
    return [result(*told, cost) for told, cost in zip(found, costs, strict=True)]


def test_every_point_of_the_demo_has_its_label_where_it_does_not_seem_to_be_anothers():
    """Two points nearly touch, and one label is as long as a third of the chart."""
    for costs in ((8.0, 10.0, 12.0, 16.0, 16.0), (11_330.0, 11_630.0, 11_650.0, 12_180.0, 10_450.0)):
        results = measured(costs)
        drawn = tradeoff(results, chosen=results[2])
        assert [trace.name for trace in drawn.data if "text" not in trace.mode] == []
    places = {trace.name: trace.textposition for trace in drawn.data}
    assert (places["Collage light"], places["Collage plus"]) == ("top left", "top right")
    results = measured((2_320.0, 1_438.0, 1_440.0, 1_250.0, 2_110.0))
    places = {trace.name: trace.textposition for trace in tradeoff(results, chosen=results[2]).data}
    assert places["Collage plus"] == "top right"
    assert places["Collage light"] == "bottom center", "to its left stands another point"
    assert places["fp32 master weights"] in {"top center", "top left", "top right"}


def test_where_points_crowd_a_label_without_room_is_told_on_hover():
    """Eight strategies of the same cost and nearly the same loss, and one far away that makes them a heap."""
    names = [name for name in STRATEGY_COLOURS if name != "unknown"][:9]
    rows = [(names[0], 8.0, 0.5)] + [(name, 16.0, 0.001 * place) for place, name in enumerate(names[1:])]
    drawn = tradeoff([result(name, "bfloat16", gap, size) for name, size, gap in rows])
    assert 0 < sum("text" in trace.mode for trace in drawn.data) < len(drawn.data)
    for trace, (name, *_) in zip(drawn.data, rows, strict=True):
        assert strategy_title(name, "bfloat16") in trace.customdata[0]


@pytest.mark.parametrize(
    ("key", "mean", "spread", "told"),
    [
        ("edq_ratio", 1.0, 0.0004, ("1.000", "")),
        ("edq_ratio", 0.9996, 0.0002, ("1.000", "± 0.00020")),
        ("loss", 2.915, 0.0012, ("2.915", "± 0.0012")),
        ("lost_update_ratio", 0.662, 0.021, ("66.2 %", "± 2.1 %")),
        ("bytes_per_parameter", 12.0, 0.0, ("12", "")),
        ("edq_ratio", 0.9, None, ("0.900", "")),
    ],
)
def test_a_spread_below_the_last_digit_is_left_out(key, mean, spread, told):
    assert _mean(Estimate(mean, 3, spread=spread), key) == told


@pytest.mark.slow
def test_intervals_over_seeds_are_drawn_and_do_not_squeeze_the_points():
    def row(name, seed, loss, size):
        run = GeneratedRun(f"{name}{seed}", "plain", name, run_id=f"{name}-{seed}")
        [found] = FakeServer([run]).client().run_table().rows
        scalars = dict(found.scalars)
        for key, value in (("validation_loss", loss), ("bytes_per_parameter", size)):
            scalars[key] = msgspec.structs.replace(scalars[key], value=value)
        return msgspec.structs.replace(found, seed=seed, scalars=scalars)

    found = [row("float32", seed, 2.0 + seed / 10, 100.0 * seed) for seed in (1, 2)]
    found += [row("bfloat16", seed, 2.5 + seed / 9, 110.0 * seed) for seed in (1, 2)]
    results = results_by_strategy(run_results(found))
    by_bytes = tradeoff(results, chosen=recommendation(results).chosen)
    bars = {trace.name: trace.error_y.array for trace in by_bytes.data}
    assert bars["Plain · bfloat16"][0] == pytest.approx(12.706 * (1 / 90) / 2, rel=1e-3)
    assert bars["Plain · float32"] is None, "the reference differs from itself by nothing"
    low, high = by_bytes.layout.xaxis.range
    assert high - low < 10 * 15
    assert "12.7" not in text(strategy_table(results))
    assert "paired" in text(strategy_table(results))


@pytest.mark.slow
def test_seeds_make_a_curve_a_strategy_unless_the_reader_wants_each_run(server, seeds):
    found, ids = seeds
    assert lines_of(View(page="compare"), found) == "strategy"
    assert lines_of(read_address("/compare", "?lines=run"), found) == "run"
    compared = server.client().compare(ids, ["edq_ratio", "validation_loss"])
    drawn = figure(compared, 0.0, results=results_by_strategy(run_results(found, compared.runs)))
    curves = [trace.name for trace in drawn.data if trace.showlegend is not False]
    assert curves == ["Plain · bfloat16 (2 runs)", "Plain · float32 (2 runs)"]
    assert any("95 % interval" in trace.name for trace in drawn.data)
    alone = [msgspec.structs.replace(row, seed=None) for row in found]
    assert lines_of(View(page="compare"), alone) == "run"


def test_what_other_storage_would_have_kept_shows_only_what_was_measured(server):
    [run] = server.client().compare(["run-fp32-reference"], "edq_ratio").runs
    assert counterfactual_table([run]) is None
    merged = run.merged | {
        "counterfactual_edq_ratio/plain/bf16": 0.91,
        "counterfactual_edq_ratio/stochastic/bf16": 1.0,
        "counterfactual_variance_ratio/stochastic/bf16": 0.53,
    }
    said = text(counterfactual_table([msgspec.structs.replace(run, merged=merged)]))
    for words in ("Plain, bf16", "0.910", "noise 0.530"):
        assert words in said
    assert "fp8" not in said
