"""Real Prometheus code and the server alone over the same pages of real trainings: the same alerts, and when.

A training's pages are taken every 30 seconds of its own time, as a scrape would; promtool puts the shipped rules to
them. Its clock begins at 0, and so does the training's.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from collage_server.alert_documents import rules

from tests.alerts.promtool import promtool
from tests.alerts.study import healthy_cases, sick_cases, training_of
from tests.alerts.trainings import SICK, incidents_of, train

pytestmark = [pytest.mark.slow, pytest.mark.prometheus]

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
    promtool("test", "rules", "test.yml", folder=folder)
    return incidents


def loud(incidents):
    return [entry.alert for entry in incidents if entry.severity != "info"]


def test_a_resume_that_drops_the_residuals(tmp_path):
    """It wakes, and once."""
    _, _, training = SICK["residual dropped at a resume"]
    fired = loud(compare(tmp_path, replace(training, resume_at=204, steps=400), 10_200))
    assert fired.count("CollageResidualsOff") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "seed"), [*sick_cases(1), *healthy_cases(7)])
def test_all_of_them(tmp_path, kind, seed):
    fired = loud(compare(tmp_path, training_of(kind, seed), seed))
    assert SICK[kind][0] in fired if kind in SICK else not fired
