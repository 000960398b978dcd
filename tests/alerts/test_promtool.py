"""promtool accepts the rules and their unit tests pass: fires, does not fire, warm-up, stochastic left out."""

import math
from pathlib import Path

import pytest
from collage_server.alerts.condition_evaluation import quantile

from tests.alerts.promtool import promtool
from tests.alerts.traces import unit_tests
from tests.server.samples import report

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "server" / "prometheus"


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "collage.rules.yml"),
        pytest.param(("test", "rules", "collage.rules.test.yml"), marks=pytest.mark.nightly),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(arguments):
    promtool(*arguments, folder=FOLDER)


def test_the_committed_cases_are_those_of_the_traces():
    assert (FOLDER / "collage.rules.test.yml").read_text().endswith(unit_tests())


QUANTILES = """
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series: [{{ series: s, values: "{values}" }}]
    promql_expr_test:
"""
QUANTILE = """
      - expr: quantile_over_time({share}, s[1h]) == quantile_over_time({share}, s[1h])
        eval_time: 5m
        exp_samples: {expected}
"""


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "values", ["5 NaN 1 2 4 0.1", "NaN NaN 3 1 2 NaN", "Inf NaN 1 -Inf 2 3", "NaN NaN NaN NaN NaN NaN"]
)
def test_quantiles_are_those_of_prometheus(tmp_path, values):
    """NaN is the least; what equals itself is shown alone, so that a NaN is an empty answer."""
    cases = QUANTILES.format(values=values)
    for share in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0):
        value = quantile([float(entry) for entry in values.split()], share)
        expected = [] if math.isnan(value) else f"[{{ labels: '{{}}', value: {value!r} }}]"
        cases += QUANTILE.format(share=share, expected=str(expected).replace("inf", ".inf"))
    path = tmp_path / "quantiles.test.yml"
    path.write_text(cases)
    promtool("test", "rules", path)


@pytest.mark.prometheus
def test_promtool_finds_nothing_to_say_about_the_page(server, clock):
    server.filled()
    server.attempt(launch_id="again", first_step=20)
    server.reports([report(9, 90, scalars={"external_writes": 1.0, "skipped_steps": 1.0, "loss": 2.0})])
    promtool("check", "metrics", page=server.get("/metrics"))
