"""Conditions of `check`, and the JUnit that they end in."""

import xml.etree.ElementTree as ElementTree

import click
import msgspec
import pytest

from collage_monitor import wire
from collage_monitor.command.conditions import Facts, Outcome, parse_condition, write_junit
from collage_monitor.diagnosis import Evidence, judge
from collage_monitor.forecast import Forecast, StrategyForecast
from tests.contract.test_client import RUN

SICK = {"edq_ratio": 0.8, "lost_update_ratio": 0.6, "lost": 60.0, "faithful": 40.0, "sampled": 100.0}
FORECAST = Forecast(20, 100, "", (StrategyForecast("plain", 40, 30, 50, 1e-3, 0.7, None, None, ""),))


def facts(model, strategy="plain", forecast=None):
    watch = wire.WatchInfo(optimizer="AdamW", strategy=strategy, observed_strategy=strategy, dtype="bfloat16")
    judged = judge(Evidence(model, {}, watch, 1, 20))
    overview = wire.Overview(**msgspec.structs.asdict(judged), run_id="r", numbers=model)
    return Facts(msgspec.convert({**RUN, "watch": msgspec.to_builtins(watch)}, wire.Run), overview, forecast)


def outcome(text, found):
    return parse_condition(text).held_against(found)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("losing-updates", "failed"),
        ("problem", "failed"),
        ("not-finite", "passed"),
        ("edq<0.9", "failed"),
        ("edq < 0.7", "passed"),
        ("edq>=0.8", "failed"),
        ("lost>0.25", "failed"),
        ("lost<=0.5", "passed"),
        ("lost_update_ratio>0.25", "failed"),
        ("forecast-lost>0.25", "failed"),
        ("forecast-onset<0.3", "passed"),
        ("forecast-onset<0.5", "failed"),
        ("state_decrement_ratio/exp_avg_sq<0.5", "error"),
    ],
)
def test_a_condition_that_is_met_fails_and_what_is_not_known_is_an_error(text, status):
    assert outcome(text, facts(SICK, forecast=FORECAST)).status == status


@pytest.mark.parametrize("text", ["problem", "edq<0.9", "forecast-lost>0.1"])
def test_nothing_measured_passes_no_condition(text):
    assert outcome(text, facts({})).status == "error"


@pytest.mark.parametrize(("strategy", "status"), [("stochastic", "passed"), ("plain", "failed")])
def test_what_rounds_at_random_is_held_against_what_it_loses_in_the_mean(strategy, status):
    assert outcome("lost>0.25", facts({**SICK, "edq_ratio": 0.99}, strategy)).status == status


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("losing", "losing-updates"),
        ("speed<3", "is no number of a run"),
        ("edq<low", "no number"),
        ("edq<nan", "nan"),
    ],
)
def test_what_is_no_condition_is_refused_with_what_to_write(text, said):
    with pytest.raises(click.BadParameter, match=said):
        parse_condition(text)


def test_junit_counts_and_names_what_failed(tmp_path):
    path = tmp_path / "junit.xml"
    outcomes = [
        Outcome("a\x00 run", "edq<0.9", "failed", "edq is 0.8"),
        Outcome("a run", "problem", "passed", "healthy"),
        Outcome("train.py", "program", "error", "status 3"),
    ]
    write_junit(path, outcomes, "said <of> it\x1b", 1.25)
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    named = [suite.get(key) for key in ("name", "tests", "failures", "errors")]
    assert named == ["collage-monitor check", "3", "1", "1"]
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == ["edq<0.9", "problem", "program"]
    assert [[child.tag for child in case] for case in cases] == [["failure"], [], ["error"]]
    assert [case.get("message") for case in cases[0]] == ["edq is 0.8"]
    assert suite.findtext("system-out") == "said <of> it�"
    with pytest.raises(click.ClickException, match="another --junit"):
        write_junit(tmp_path / "none" / "junit.xml", outcomes, "", 0.0)
