"""Real Prometheus code and the server alone over the same pages of real trainings: the same alerts, and when.

promtool accepts the rules, and their unit tests pass. In the nightly lane healthy trainings wake nobody, and sick
ones the right alert.

A training's pages are taken every 30 seconds of its own time, as a scrape would; promtool puts the shipped rules to
them. Its clock begins at 0, and so does the training's.
"""

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from collage_server.alert_documents import rules
from collage_server.alerts.condition_evaluation import quantile

from collage_monitor.alerts import ALERTS
from tests.alerts.study import done, healthy_cases, sick_cases, training_of
from tests.alerts.traces import unit_tests
from tests.alerts.trainings import SICK, incidents_of, train
from tests.server.samples import report
from tests.system import is_content

pytestmark = pytest.mark.slow

ONCE = ("plain bf16 at a high rate", 1)
FOLDER = Path(__file__).parents[2] / "server" / "prometheus"

ROUND_SECONDS = 30
BEGAN = 3600.0
OF_THE_SERVER = "collage_server_"
"""Nobody scrapes the server of this test, nor does it evaluate on its own: what is told of it is left out."""


class Pages:
    """Samples of each round, as promtool reads series: a value a round, missing first, stale once gone."""

    def __init__(self):
        self.rounds = 0
        self._values: dict[tuple[str, Any], dict[int, float]] = defaultdict(dict)

    def __call__(self, now, samples):
        self.rounds = round(now / ROUND_SECONDS)
        for sample in samples:
            if not sample.name.startswith(OF_THE_SERVER):
                self._values[sample.name, sample.labels][self.rounds] = sample.value

    def series(self):
        for (name, labels), values in self._values.items():
            inner = ",".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in labels)
            yield {"series": f"{name}{{{inner}}}", "values": " ".join(self._listed(values))}

    def _listed(self, values):
        for place in range(self.rounds + 1):
            if place in values:
                yield _number(values[place])
            else:
                yield "stale" if place - 1 in values else "_"


def _number(value):
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")


def questions(incidents, rounds):
    """No incident is there two rounds before it began, each is a round after; and no other is, over all rounds."""
    began = defaultdict(list)
    for entry in incidents:
        began[entry.alert].append(round(entry.started_at / ROUND_SECONDS))
    for name, places in began.items():
        firing = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
        asked = [(min(places) - 2, 0), *((min(place + 1, rounds), 1) for place in places)]
        for place, count in asked:
            yield _question(firing, place, [{"labels": "{}", "value": count}])
    ever = f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{rounds * ROUND_SECONDS}s]))'
    yield _question(ever, rounds, [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in began])


def _question(expression, place, answer):
    return {"expr": expression, "eval_time": f"{place * ROUND_SECONDS}s", "exp_samples": answer}


def compare(folder, training, seed):
    """What both say fires; fails where they differ by more than a round."""
    pages = Pages()
    incidents = incidents_of(
        train(training, seed), training.seconds_a_step, began=BEGAN, round_seconds=ROUND_SECONDS, looked_at=pages
    )
    (folder / "rules.yml").write_text(rules())
    case = {
        "interval": f"{ROUND_SECONDS}s",
        "input_series": list(pages.series()),
        "promql_expr_test": list(questions(incidents, pages.rounds)),
    }
    told = {"rule_files": ["rules.yml"], "evaluation_interval": f"{ROUND_SECONDS}s", "tests": [case]}
    (folder / "test.yml").write_text(json.dumps(told))
    is_content("promtool", "test", "rules", "test.yml", cwd=folder)
    return incidents


def loud(incidents):
    return [entry.alert for entry in incidents if entry.severity != "info"]


@pytest.mark.prometheus
def test_a_resume_that_drops_the_residuals(tmp_path):
    """It wakes, and once."""
    _, _, training = SICK["residual dropped at a resume"]
    fired = loud(compare(tmp_path, replace(training, resume_at=204, steps=400), 10_200))
    assert fired.count("CollageResidualsOff") == 1


@pytest.mark.prometheus
@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "seed"), [*sick_cases(1), *healthy_cases(7)])
def test_both_agree(tmp_path, kind, seed):
    fired = loud(compare(tmp_path, training_of(kind, seed), seed))
    assert SICK[kind][0] in fired if kind in SICK else not fired


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "seed"), [ONCE, *sick_cases(5), *healthy_cases(300)])
def test_healthy_trainings_wake_nobody_and_sick_ones_the_right_alert(kind, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fired = done(kind, seed)["fired"]
    finally:
        torch.set_num_threads(before)
    if kind not in SICK:
        assert [entry for entry in fired if entry[1] != "info"] == []
        return
    names = [name for name, _, _ in fired]
    assert SICK[kind][0] in names, fired
    # What plain bf16 loses at a good EDQ wakes by default, and alone does.
    by_default = [name for name in names if ALERTS[name].on_by_default]
    assert (kind, seed) != ONCE or by_default == ["CollageUpdatesLost"]


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
    is_content("promtool", *arguments, cwd=FOLDER)


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
    is_content("promtool", "test", "rules", path)


@pytest.mark.prometheus
def test_promtool_finds_nothing_to_say_about_the_page(server, clock):
    server.filled()
    server.attempt(launch_id="again", first_step=20)
    server.reports([report(9, 90, scalars={"external_writes": 1.0, "skipped_steps": 1.0, "loss": 2.0})])
    is_content("promtool", "check", "metrics", input=server.get("/metrics"))
