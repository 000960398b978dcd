"""The catalogues: keys, labels, merge rules, and that every metric is made from statistics that exist."""

import pytest

from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import METRICS, SCALARS, STATISTICS, metric, split_key, statistic
from collage_monitor.statistics import INTERVAL_PAIRS, finish, metric_keys
from collage_monitor.statistics.finish import _FINISHERS, _NEEDS
from collage_monitor.strategies import STRATEGIES, strategy

UNITS = {"ratio", "elements", "weight", "gradient", "octaves", "factor", "steps"}


def all_statistic_keys():
    labels = {"octave": "-3", "state": "exp_avg_sq", "metric": "edq_ratio", "steps": "64"}
    labels["method/dtype"] = "light/bf16"
    for name, entry in STATISTICS.items():
        yield f"{name}/{labels[entry.label]}" if entry.label else name


def test_no_name_means_two_things():
    names = [*METRICS, *SCALARS]
    assert len(names) == len(set(names))
    for name in set(METRICS) & set(STATISTICS):
        assert METRICS[name].formula in (f"Σ {name}", name)


@pytest.mark.parametrize("entry", METRICS.values(), ids=lambda entry: entry.name)
def test_every_metric_says_what_it_is(entry):
    assert entry.title
    assert entry.formula
    assert entry.help.endswith(".")
    assert entry.unit in UNITS
    assert entry.interval == (entry.name in INTERVAL_PAIRS)


def test_every_metric_has_a_finishing_function_over_statistics_that_exist():
    assert set(_FINISHERS) == set(METRICS)
    assert set(_NEEDS) <= set(METRICS)
    needed = {need for names in _NEEDS.values() for need in names}
    needed |= set(METRICS) - set(_NEEDS)
    assert needed <= set(STATISTICS)


def test_all_statistics_together_make_all_metrics():
    made = {split_key(key)[0] for key in metric_keys(all_statistic_keys())}
    assert made == set(METRICS)


@pytest.mark.parametrize(
    "key", ["edq", "state_decrement_ratio/exp_avg_sq", "edq_window_ratio/64", "counterfactual_edq_ratio/light/bf16"]
)
def test_known_metric_keys(key):
    assert metric(key).name == key.partition("/")[0]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("edq_rato", "'edq_rato'"),
        ("edq_ratio/x", "no label"),
        ("state_decrement_ratio", "a label"),
        ("state_decrement_ratio/", "a label"),
        ("counterfactual_edq_ratio/light", "a method and a dtype"),
        ("counterfactual_edq_ratio/light/", "a method and a dtype"),
        ("edq_window_ratio/long", "length in steps, edq_window_ratio/64"),
    ],
)
def test_wrong_metric_keys_are_named(key, words):
    with pytest.raises(CatalogueError, match=words):
        metric(key)
    with pytest.raises(CatalogueError):
        finish(key, {})


def test_histogram_labels_are_octaves():
    assert statistic("update_ulp_histogram/-24").over_steps == "sum"
    with pytest.raises(CatalogueError, match="octaves run from -24 to 7"):
        statistic("update_ulp_histogram/8")


def test_strategies():
    assert strategy("plus").bytes_per_parameter == 12
    assert {name for name, entry in STRATEGIES.items() if entry.stochastic} == {"stochastic", "light-stochastic"}
    with pytest.raises(CatalogueError, match=r"'collage'.*choose one of"):
        strategy("collage")
