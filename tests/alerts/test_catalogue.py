"""The alert catalogue: complete entries, conditions over gauges and metrics that exist, papers current."""

import re
from pathlib import Path

import pytest
import yaml
from collage_server.alert_documents import rules, runbook
from collage_server.exposition import MODEL_GAUGES, RUN_GAUGES, SCALAR_GAUGES

from collage_monitor.alerts import ALERTS, RECORDED, alert, duration, enabled_alerts
from collage_monitor.diagnosis import PROBLEMS
from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import METRICS, SCALARS
from collage_monitor.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
GAUGES = {*MODEL_GAUGES, *SCALAR_GAUGES, *RUN_GAUGES, "state_decrement_ratio", "lost_window_ratio"}
GAUGES |= {"worst_layer_edq_ratio", "finding", "server_reports_total", "server_alerts_evaluated_timestamp_seconds"}
GAUGES |= {"server_disk_left_ratio", "server_archive_away_seconds", "server_archive_damaged_files"}
GAUGES |= {"server_database_damaged_rows", "server_backup_age_seconds"}


def test_an_alert_is_found_by_its_name():
    assert alert("CollageEdqLow") is ALERTS["CollageEdqLow"]
    with pytest.raises(CatalogueError, match="'CollageEdqHigh'"):
        alert("CollageEdqHigh")


@pytest.mark.parametrize("entry", ALERTS.values(), ids=lambda entry: entry.name)
def test_every_alert_says_what_it_means_and_what_to_do(entry):
    assert entry.meaning.endswith(".")
    assert entry.first_step.endswith(".")
    assert entry.other_causes
    assert not entry.summary.endswith(".")
    assert entry.for_seconds > 0 or entry.keep_firing_seconds > 0
    assert entry.keep_firing_seconds >= 600
    assert entry.conditions
    assert set(re.findall(r"collage_(\w+)", entry.condition())) <= GAUGES
    assert "$" not in entry.condition()
    named = set(re.findall(r"\b[a-z]+_[a-z_]+\b", " ".join([entry.first_step, entry.meaning, *entry.other_causes])))
    assert named <= {*METRICS, *SCALARS}


def test_what_the_metric_catalogue_calls_exposed_is_exposed():
    assert {name for name, entry in METRICS.items() if entry.exposed} == {*MODEL_GAUGES, "state_decrement_ratio"}
    assert set(SCALAR_GAUGES) <= set(SCALARS)


def test_an_alert_on_a_problem_has_no_bound_of_its_own():
    """The judgement held 30 % dropped residuals against a run, the alert of that name asked for 40 %."""
    for problem in PROBLEMS:
        if problem.alert is not None:
            (condition,) = problem.alert.conditions
            assert condition.promql() == f'max without(layer) (collage_finding{{alert="{problem.alert.name}"}})'
            assert problem.alert is ALERTS[problem.alert.name]


def test_on_the_curve_of_a_stochastic_strategy_one_steps_share_has_no_threshold():
    (drawn,) = ALERTS["CollageUpdatesLost"].drawn
    assert (drawn.series, drawn.comparison, drawn.threshold) == ("collage_lost_update_ratio", ">", 0.25)
    for name, entry in STRATEGIES.items():
        assert drawn.matches([("strategy", name)]) != entry.stochastic


@pytest.mark.parametrize(
    ("seconds", "text"), [(3600, "1h"), (5400, "90m"), (90, "90s"), (1.5, "1500ms"), (0, "0ms"), (0.0004, "0ms")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_every_rule_leads_to_the_incidents_page_and_to_its_section_of_the_runbook():
    headings = {line.removeprefix("## ").lower() for line in runbook().splitlines() if line.startswith("## ")}
    parsed = yaml.safe_load(rules(dashboard_url="https://box.lan/"))["groups"][0]["rules"]
    assert {rule["record"] for rule in parsed if "record" in rule} == set(RECORDED)
    for rule in (rule for rule in parsed if "alert" in rule):
        run = "&run={{ $labels.run_id | urlquery }}" * (ALERTS[rule["alert"]].scope == "run")
        assert rule["annotations"]["page"] == f"https://box.lan/incident?alert={rule['alert']}{run}"
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (ROOT / path).is_file()
        assert anchor in headings


def test_a_time_scale_shortens_windows_and_waits():
    parsed = [rule for rule in yaml.safe_load(rules(0.001))["groups"][0]["rules"] if "alert" in rule]
    assert parsed[0]["for"] == "300ms"
    assert "[3600ms]" in parsed[0]["expr"]


def test_the_committed_papers_are_those_of_the_catalogue():
    assert (ROOT / "server/prometheus/collage.rules.yml").read_text() == rules()
    assert (ROOT / "docs/alerts.md").read_text() == runbook()


def test_a_few_are_on_by_default_and_the_others_by_severity():
    # Two more are about what a training asked for: watch(expect=…), and an average that is watched.
    asked_for = {"CollageExpectationBroken", "CollageAverageOff"}
    few = [entry.name for entry in enabled_alerts() if entry.name not in asked_for]
    assert 5 <= len(few) <= 10
    assert {entry.severity for entry in enabled_alerts()} == {"warning", "critical"}
    assert set(few) < {entry.name for entry in enabled_alerts("warning")} < set(ALERTS)
    assert enabled_alerts("info") == list(ALERTS.values())
