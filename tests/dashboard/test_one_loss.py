"""One number for one thing: what a run loses, and its loss, are alike on each page, or name their steps."""

import re

import msgspec
import pytest
from collage_dashboard.components import over_steps
from collage_dashboard.descriptions import in_few_words
from collage_dashboard.html_report import report
from collage_dashboard.pages.comparison_content import (
    COLUMNS,
    comparison_table,
    runs_with_throughput,
    throughput_of,
)
from collage_dashboard.pages.run_content import panel
from collage_dashboard.pages.runs_content import columns, rows
from collage_dashboard.pages.strategies_content import counterfactual_table, strategy_table
from collage_dashboard.view import View

from collage_monitor.diagnosis import percent
from collage_monitor.number_text import number, value_text
from collage_monitor.strategy_results import results_by_strategy, run_results
from tests.dashboard.figures.answers import series
from tests.dashboard.walk import by_id, components, text

RUN = "run-plain"
RECENT = "recent past"


@pytest.fixture
def row(server):
    return server.client().run_table(run_ids=[RUN]).rows[0]


@pytest.fixture
def compared(server):
    """The run, whose last twenty losses have another mean than the newest."""
    [run] = server.client().compare([RUN], "loss").runs
    return msgspec.structs.replace(run, mean_scalars=run.mean_scalars | {"loss": 9.87654})


def cell(run, title):
    """What the table of compared runs says under this title: a value, and its small print."""
    return next(column for column in COLUMNS if column.title == title).cell(run)


def test_each_page_says_the_share_of_one_window_and_names_it(shown, reader, row, compared):
    share = row.overview.numbers["lost_update_ratio"]
    words = percent(share)
    assert words in in_few_words(row.overview)
    assert words in row.overview.headline
    assert rows([row])[0]["lost_update_ratio"] == share
    window = over_steps(row.overview)
    page = shown(f"/run/{RUN}")
    [card] = [part for part in components(page) if getattr(part, "data-metric", "") == "lost_update_ratio"]
    assert words in text(card)
    assert window in text(by_id(page, "run-summary"))
    table = text(comparison_table([compared], {RUN: row.overview}))
    assert percent(share) in table
    assert window.removeprefix("over ") in table
    whole = report(reader, [RUN])
    assert f"Loses {words}" in whole
    assert re.search(window, whole, re.IGNORECASE)
    told = {column["field"]: column.get("headerTooltip") for column in columns(View())}
    for field in ("lost_update_ratio", "edq_ratio", "state_decrement_ratio"):
        assert RECENT in str(told[field]), field


def test_strategies_say_what_their_numbers_are_over_in_the_page_and_in_the_report(reader, row):
    results = results_by_strategy(run_results([row]))
    table = text(strategy_table(results))
    assert percent(row.overview.numbers["lost_update_ratio"]) in table
    assert RECENT in table
    whole = report(reader, [RUN, "run-plus"])
    strategies, runs = (
        whole.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0] for title in ("Strategies", "Runs")
    )
    assert RECENT in strategies
    assert ">Over</th>" in runs
    assert "validation losses at step 200" in strategies


def test_what_is_not_over_the_recent_past_says_so(server, row, compared):
    measured = msgspec.structs.replace(compared, merged={"counterfactual_edq_ratio/plain/bf16": 0.8})
    assert "over the whole run" in text(counterfactual_table([measured]))
    elements = text(panel(View(page="run", runs=(RUN,), tab="classes"), server.client().run(RUN)))
    assert "Shares are of all elements" in elements


def test_a_runs_training_loss_is_its_newest_on_every_page(reader, row, compared):
    """The table of compared runs had the mean of the last twenty under the same title."""
    newest = row.scalars["loss"]
    assert rows([row])[0]["loss"] == newest.value
    assert cell(compared, "Training loss") == (number(newest.value), f"step {newest.step:,}")


def test_a_runs_throughput_is_its_newest_in_every_table(row, compared):
    """The strategies ranked by the last logged value first, and by a mean once the curves were drawn."""
    newest = row.scalars["tokens_per_second"]
    of_mean = compared.mean_scalars | {"tokens_per_second": 2 * newest.value}
    compared = msgspec.structs.replace(compared, mean_scalars=of_mean)
    assert rows([row])[0]["tokens_per_second"] == newest.value
    assert cell(compared, "Tokens/s")[0] == value_text("tokens_per_second", newest.value)
    for curves in ((), [compared]):
        [result] = results_by_strategy(run_results([row], curves))
        assert result.tokens_per_second is not None
        assert result.tokens_per_second.value == newest.value


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [([100.0, 250.0, 500.0], 400 / 20), ([None, 100.0, "NaN", 300.0], 200 / 20), ([100.0], None), ([], None)],
)
def test_a_throughput_is_the_slope_between_the_first_and_the_last_defined_point(tokens, rate):
    assert throughput_of(series(tokens, "tokens", axis="time")) == (rate and pytest.approx(rate))


@pytest.mark.slow
def test_only_a_throughput_that_was_not_logged_is_filled_in(server, reader):
    compared = server.client().compare([RUN, "run-plus"], "edq_ratio")
    logged, other = compared.runs
    kept = {name: value for name, value in other.mean_scalars.items() if name != "tokens_per_second"}
    silent = msgspec.structs.replace(other, mean_scalars=kept)
    assert runs_with_throughput(reader, compared) is compared.runs
    assert runs_with_throughput(reader, "refused") is None
    filled = runs_with_throughput(reader, msgspec.structs.replace(compared, runs=[logged, silent]))
    assert filled is not None
    assert filled[0] == logged
    assert filled[1].mean_scalars["tokens_per_second"] == pytest.approx(2048 / 0.5)
