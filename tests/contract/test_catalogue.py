"""The catalogues: keys, labels, merge rules, and that every metric is made from the statistics that it declares."""

import dataclasses

import numpy as np
import pytest
from collage_dashboard.descriptions import state_key

from collage_monitor.alerts import ALERTS
from collage_monitor.alerts import catalogue_of as alerts_of
from collage_monitor.definitions import Definition, Interval, Metric, Statistic, ratio
from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import METRICS, SCALARS, STATISTICS, metric, preferred_state, split_key, statistic
from collage_monitor.statistics import finish, interval, metric_keys, statistics_for
from collage_monitor.statistics.catalogue import DEFINITIONS, catalogue_of
from collage_monitor.strategies import strategy
from tests.contract.labels import LABELS, key_of

UNITS = {"ratio", "share", "elements", "weight", "gradient", "octaves", "factor", "steps", "bytes"}


def test_no_name_means_two_things():
    names = [*METRICS, *SCALARS]
    assert len(names) == len(set(names))
    for name in set(METRICS) & set(STATISTICS):
        assert METRICS[name].formula in (f"Σ {name}", name)


EACH_METRIC = pytest.mark.parametrize("entry", METRICS.values(), ids=lambda entry: entry.name)


@EACH_METRIC
def test_every_metric_says_what_it_is(entry):
    assert entry.title
    assert entry.formula
    assert entry.help.endswith(".")
    assert entry.unit in UNITS
    assert entry.described()["interval"] is (entry.interval is not None)


class Recording(dict):
    """Totals that claim to hold every statistic and note which are read."""

    def __init__(self):
        super().__init__()
        self.read = set()

    def __contains__(self, key):
        return True

    def __getitem__(self, key):
        self.read.add(key)
        return np.full(1, 2.0 + len(self.read))

    def get(self, key, default=None):
        return self[key]


@EACH_METRIC
def test_the_statistics_that_a_metric_declares_are_those_that_finishing_reads(entry):
    key, totals = key_of(entry), Recording()
    assert finish(key, totals).shape == (1,)
    assert set(statistics_for(key, intervals=False)) == totals.read
    if entry.interval is not None:
        interval(key, totals)
        assert set(statistics_for(key)) == totals.read


@EACH_METRIC
def test_each_declared_statistic_changes_the_metric(entry):
    octaves = np.linspace(1.0, 3.0, 34)[:, None]
    amounts = [
        octaves if STATISTICS[need].label == "octave" else np.array([float(10**i)])
        for i, need in enumerate(entry.needs, start=1)
    ]
    unreported = [np.full_like(amounts[0], np.nan)] * len(entry.optional)
    label = {"label": LABELS[entry.label]} if entry.finish_takes_label else {}
    whole = entry.finish(*amounts, *unreported, **label)
    for index, values in enumerate(amounts):
        other = values * (np.arange(1, 35)[:, None] if values is octaves else 1.5)
        changed = [*amounts[:index], other, *amounts[index + 1 :]]
        assert entry.finish(*changed, *unreported, **label) != whole, entry.needs[index]


def added(name="kurtosis", statistics=(), metrics=()):
    return {name: Definition(tuple(statistics), tuple(metrics))}


FOURTH = Statistic("intended_fourth_sum", "sum", "sum", "weight⁴", "Σ u⁴", needs=("intended",))
KURTOSIS = Metric("kurtosis", "Kurtosis", "ratio", "Σ u⁴", "Tails.", ("intended_fourth_sum", "elements"), ratio)


def test_another_package_adds_a_definition_behind_our_own():
    statistics, metrics = catalogue_of(DEFINITIONS, added(statistics=[FOURTH], metrics=[KURTOSIS]))
    assert list(statistics)[:-1] == list(STATISTICS)
    assert list(statistics)[-1] == "intended_fourth_sum"
    assert list(metrics)[-1] == "kurtosis"


@pytest.mark.parametrize(
    ("extension", "words"),
    [
        ({"kurtosis": object()}, "must be a Definition"),
        (added("edq"), "under a name of its own"),
        (added(statistics=[STATISTICS["lost"]]), "'kurtosis' adds 'lost'"),
        (added(metrics=[METRICS["edq_ratio"]]), "fixed"),
        (added(metrics=[METRICS["edq"]]), "'kurtosis' adds 'edq'"),
        (added(metrics=[KURTOSIS]), "'intended_fourth_sum', which no definition sends"),
        (added(statistics=[dataclasses.replace(FOURTH, name="a/b")]), "slash"),
    ],
)
def test_a_definition_that_does_not_fit_is_named(extension, words):
    with pytest.raises(CatalogueError, match=words):
        catalogue_of(DEFINITIONS, extension)


def test_an_interval_names_totals_that_exist():
    pairs = [entry.interval for entry in METRICS.values() if entry.interval is not None]
    assert len(pairs) == 5
    for pair in pairs:
        assert isinstance(pair, Interval)
        assert {pair.numerator, *pair.sample} <= set(STATISTICS)
        assert pair.denominator == "active" or pair.denominator in STATISTICS


def test_another_package_adds_an_alert_under_a_name_of_its_own():
    lost = ALERTS["CollageUpdatesLost"]
    entry = dataclasses.replace(lost, name="OurOwn")
    assert list(alerts_of(list(ALERTS.values()), {"mine": entry}))[-1] == "OurOwn"
    with pytest.raises(CatalogueError, match="'CollageUpdatesLost', which is taken"):
        alerts_of(list(ALERTS.values()), {"mine": lost})
    with pytest.raises(CatalogueError, match="must be an Alert, not str"):
        alerts_of(list(ALERTS.values()), {"mine": "alert"})


def test_all_statistics_together_make_all_metrics():
    made = metric_keys([key_of(entry) for entry in STATISTICS.values()])
    assert {metric(key).name for key in made} == {split_key(key)[0] for key in made} == set(METRICS)


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
        ("cast_changed_ratio/mxfp8>bf16", "formats of copies are"),
        ("cast_route_ratio/mxfp8/nvfp4", "two routes to one format"),
        ("cast_route_ratio/mxfp8", "two routes to one format"),
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
    with pytest.raises(CatalogueError, match=r"'collage'.*choose one of"):
        strategy("collage")


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        (["exp_avg", "exp_avg_sq"], "exp_avg_sq"),
        (["square_avg", "grad_avg"], "grad_avg"),
        (["grad_avg", "square_avg"], "grad_avg"),
    ],
)
def test_the_state_that_stands_for_a_run_is_exp_avg_sq_or_the_first_by_name(states, chosen):
    """One choice for every page, gauge and table; without any there is none."""
    name = "state_decrement_ratio"
    keys = ["edq_ratio", *(f"{name}/{state}" for state in states)]
    assert preferred_state(keys) == state_key(keys) == f"{name}/{chosen}"
    assert preferred_state(["edq_ratio", name]) is None
