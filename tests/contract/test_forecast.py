"""Forecasts against what really happens to numbers that are rounded, and schedules against their formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest

from collage_monitor.definitions import HISTOGRAM_OCTAVES, Strategy
from collage_monitor.forecast import ForecastError, GridRecord, forecast_strategies, record_of, trained_dtype
from collage_monitor.schedule import parse_schedule, schedule_of
from collage_monitor.strategies import STRATEGIES, more_exact
from collage_monitor.wire import Layer

ELEMENTS = 4000
EDGES = [-np.inf, *HISTOGRAM_OCTAVES, HISTOGRAM_OCTAVES[-1] + 1, np.inf]
SCHEDULES = ("cosine:1e-3:50:2000", "linear:1e-3:50:2000", "wsd:1e-3:50:2000:400")
COSINE = parse_schedule(SCHEDULES[0])
FIRST = range(10, 401, 10)
"""The measured steps, where no others are named."""


def layer(name, kind, dtype="bfloat16", elements=ELEMENTS):
    return Layer(name=name, shape=[elements], dtype=dtype, elements=elements, module_type=kind)


def gap(value, bits=8):
    """Of a format with so many significant bits, at a value that is no power of two."""
    return 2.0 ** (np.floor(np.log2(np.abs(value))) + 1 - bits)


class Weights:
    """Weights, what an optimizer moves them by at rate 1, and what that becomes of at a step."""

    def __init__(self, seed=0, drift=0.0, scale=1.0):
        random = np.random.default_rng(seed)
        self.random, self.drift = random, drift
        self.values = 2.0 ** random.uniform(-8, -3, ELEMENTS)
        self.moves = scale * random.normal(size=ELEMENTS)
        self.residuals = random.uniform(-0.5, 0.5, ELEMENTS) * gap(self.values)

    def updates(self, schedule, step):
        return self.moves * schedule.rates[step - 1] * 2.0 ** (self.drift * math.log2(step))

    def counts(self, schedule, step):
        sizes = np.abs(self.updates(schedule, step)) / gap(self.values)
        return np.histogram(np.log2(sizes[sizes > 0]), EDGES)[0].astype(float)

    def lost(self, schedule, step, strategy):
        """By rounding itself: whether anything is left of the update where the strategy rounds."""
        at = self.values if strategy in ("plain", "master-weights") else self.residuals
        grid = gap(at, 24 if strategy == "master-weights" else 8)
        return float((np.round(np.abs(self.updates(schedule, step)) / grid) == 0).mean())

    def record(self, schedule, steps=FIRST):
        counts = np.stack([self.counts(schedule, step) for step in steps], 1)[:, :, None]
        return record_of(steps, counts, [layer("block.weight", "torch.nn.Linear")], "plain")

    def onset(self, schedule, strategy):
        above = [self.lost(schedule, step, strategy) > 0.25 for step in range(1, schedule.steps + 1)]
        return None if not above[-1] else schedule.steps - above[::-1].index(False) + 1


def foretold(schedule, weights=None, steps=FIRST, *strategies):
    """The forecast, and what it says of the first of these strategies, of plain storage where none is asked for."""
    record = (weights or Weights()).record(schedule, steps)
    forecast = forecast_strategies(record, schedule, *([strategies] if strategies else []))
    return forecast, next(own for own in forecast.strategies if own.strategy == (*strategies, "plain")[0])


@pytest.mark.slow
@pytest.mark.parametrize("text", SCHEDULES)
@pytest.mark.parametrize("strategy", ["plain", "kahan", "master-weights"])
def test_the_onset_is_that_of_the_rounding_itself(text, strategy):
    schedule, weights = parse_schedule(text), Weights()
    _, found = foretold(schedule, weights, FIRST, strategy)
    came = weights.onset(schedule, strategy)
    assert (found.onset is None) == (came is None)
    if came is not None:
        assert abs(found.onset - came) <= 0.02 * schedule.steps
        assert found.earliest <= came <= (found.latest or schedule.steps)
        assert found.rate == schedule.rates[found.onset - 1]
        assert found.first_in == "Linear.weight"


def test_each_step_of_a_warm_up_counts_by_its_own_rate():
    weights = Weights()
    _, found = foretold(COSINE, weights, range(1, 7))
    assert abs(found.onset - weights.onset(COSINE, "plain")) <= 0.01 * COSINE.steps


def test_noise_of_single_steps_is_no_drift_and_its_mean_is_known_better():
    weights = Weights()
    noise = 2.0 ** np.random.default_rng(1).normal(0, 0.4, COSINE.steps)
    forecast = forecast_strategies(weights.record(replace(COSINE, rates=COSINE.rates * noise)), COSINE)
    assert "without a drift" in forecast.assumes
    found = forecast.strategies[0]
    assert found.earliest is not None
    assert found.latest is not None
    assert found.earliest <= weights.onset(COSINE, "plain") <= found.latest <= found.earliest + 200


def test_a_step_without_an_update_ends_no_loss():
    record = Weights().record(COSINE)
    stopped = replace(COSINE, rates=np.where(np.arange(2000) % 100 == 99, 0.0, COSINE.rates))
    onsets = [forecast_strategies(record, own).strategies[0].onset for own in (COSINE, stopped)]
    assert onsets[0] == onsets[1] is not None


@pytest.mark.parametrize(
    ("text", "steps", "onset", "least", "most"),
    [("cosine:1e-3:5:80", (60, 70, 80), None, 0.0, 0.0), ("constant:1e-5:50:2000", FIRST, 401, 0.9, 1.0)],
    ids=["three steps up to the last are enough", "a run that loses already goes on to"],
)
def test_the_ends_of_what_can_be_foretold(text, steps, onset, least, most):
    _, found = foretold(parse_schedule(text), None, steps)
    assert (found.onset, found.earliest) == (onset, onset)
    assert least <= found.lost <= most


def test_the_narrow_weights_decide_though_most_are_wide():
    layers = [layer("", "", *own) for own in (("float32", 900), ("bfloat16", 60), ("float16", 40))]
    assert [trained_dtype(own) for own in (layers, layers[:1], [])] == ["bfloat16", "float32", "unknown"]


@pytest.mark.parametrize("strategy", ["plain", "plus"])
def test_the_lost_share_still_to_come_is_that_of_the_rounding(strategy):
    weights = Weights()
    _, found = foretold(COSINE, weights, FIRST, strategy)
    came = np.mean([weights.lost(COSINE, step, strategy) for step in range(401, 2001)])
    assert found.lost == pytest.approx(came, abs=0.01)
    steps, shares = zip(*found.shares, strict=True)
    assert (steps[0], steps[-1]) == (401, 2000)
    assert shares == pytest.approx([weights.lost(COSINE, step, strategy) for step in steps], abs=0.05)


@pytest.mark.parametrize(("weights", "like"), [("one", "plain"), ("pair", "light"), ("fp32", "master-weights")])
def test_a_strategy_of_another_package_is_foretold_by_what_it_keeps_a_weight_as(weights, like, monkeypatch):
    added = Strategy("added", "Added", "weights of its own kind", 10, weights=weights)
    monkeypatch.setitem(STRATEGIES, "added", added)
    (_, found), (_, known) = (foretold(COSINE, None, FIRST, strategy) for strategy in ("added", like))
    assert (found.onset, found.lost) == (known.onset, known.lost)
    assert bool(more_exact("added", "weights")) == (weights != "fp32")


def test_a_drift_of_the_updates_is_followed_and_chance_is_none():
    drifting = Weights(drift=-0.3, scale=12.0)
    forecast, found = foretold(COSINE, drifting)
    assert "with half of the drift seen there, -0.3" in forecast.assumes
    assert abs(found.onset - drifting.onset(COSINE, "plain")) <= 0.05 * COSINE.steps
    still, _ = foretold(COSINE, None, range(10, 601, 10))
    assert "without a drift" in still.assumes


def test_what_does_not_come_is_not_foretold():
    forecast, _ = foretold(parse_schedule("constant:1e-3:50:2000"))
    assert [own.onset for own in forecast.strategies] == [None] * 5
    assert all("not in this run" in own.text for own in forecast.strategies)
    forecast, _ = foretold(COSINE)
    random = [own for own in forecast.strategies if own.strategy in ("stochastic", "split-master")]
    assert [own.onset for own in random] == [None, None]
    assert all("rounds at random" in own.text for own in random)


@pytest.mark.slow
def test_the_kind_of_layer_that_loses_first_is_named():
    large, small = Weights(), Weights(scale=0.5)
    counts = np.stack([[own.counts(COSINE, step) for step in FIRST] for own in (large, small)], 2)
    layers = [layer("a.weight", "torch.nn.Linear"), layer("b.weight", "torch.nn.LayerNorm")]
    found = forecast_strategies(record_of(FIRST, counts.swapaxes(0, 1), layers, "plain"), COSINE).strategies[0]
    assert found.first_in == "LayerNorm.weight"
    came = small.onset(COSINE, "plain"), large.onset(COSINE, "plain")
    assert found.first_onset == pytest.approx(came[0], abs=0.03 * COSINE.steps)
    assert came[0] < came[1]


def test_the_sentence_says_from_when_at_which_rate_and_what_it_assumes():
    first, *_, last = str(foretold(COSINE)[0]).splitlines()
    assert first.startswith("Plain in bfloat16 (8 bytes a parameter) loses more than a quarter of its updates from")
    assert "at rates of" in first
    assert last.startswith(f"Assumes the schedule {SCHEDULES[0]}, updates in proportion to the rate")
    assert "as in steps 10 to 400" in last


@pytest.mark.parametrize(("watched", "early"), [(200, True), (311, False)])
def test_steps_within_the_warm_up_are_said_to_be_early(watched, early):
    forecast, _ = foretold(parse_schedule("cosine:1e-3:100:2000"), None, range(10, watched, 10))
    assert ("watch 300 to be sure" in forecast.assumes) == ("to be sure" in forecast.assumes) == early


def test_what_cannot_be_foretold_says_why():
    weights = Weights()
    wide = GridRecord([10], np.zeros((34, 1)), {}, np.zeros((0, 1)), "float32", "plain")
    with pytest.raises(ForecastError, match="weights are float32"):
        forecast_strategies(wide, COSINE)
    with pytest.raises(ForecastError, match="2 measured steps moved anything; 3 are needed"):
        foretold(COSINE, weights, [10, 20])
    with pytest.raises(ForecastError, match="step 90 was watched"):
        forecast_strategies(weights.record(COSINE, [70, 80, 90]), parse_schedule("cosine:1e-3:5:80"))


@pytest.mark.parametrize(
    ("text", "rate_of"),
    [
        ("constant:0.1:4:20", lambda taken: 0.1),
        ("cosine:0.1:4:20", lambda taken: 0.05 * (1 + math.cos(math.pi * (taken - 4) / 16))),
        ("cosine:0.1:4:20:0.02", lambda taken: 0.02 + 0.04 * (1 + math.cos(math.pi * (taken - 4) / 16))),
        ("linear:0.1:4:20", lambda taken: 0.1 * (1 - (taken - 4) / 16)),
        ("wsd:0.1:4:20", lambda taken: 0.1 * min(1.0, (20 - taken) / 4)),
        ("wsd:0.1:4:20:10:0.05", lambda taken: 0.05 + 0.05 * min(1.0, (20 - taken) / 10)),
    ],
)
def test_schedules_are_their_formulas(text, rate_of):
    found = parse_schedule(text)
    wanted = [0.025, 0.05, 0.075, 0.1, *(rate_of(taken) for taken in range(4, 20))]
    assert found.rates == pytest.approx(wanted)
    assert found.steps == 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step:0.1:4:20", "kinds are"),
        ("cosine:0.1:4", "write KIND:RATE"),
        ("cosine:fast:4:20", "not all of it are numbers"),
        ("cosine:0:4:20", "RATE must be above 0"),
        ("cosine:0.1:4:20:0.2", "FINAL between"),
        ("cosine:0.1:20:20", "parts of STEPS"),
        ("wsd:0.1:4:20:30", "parts of STEPS"),
    ],
)
def test_other_schedules_are_refused_with_what_to_write(text, said):
    with pytest.raises(ValueError, match=said):
        parse_schedule(text)


def test_a_function_is_a_schedule_once_the_steps_are_known():
    assert schedule_of(lambda step: 1 / step, 4).rates == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    with pytest.raises(ValueError, match="how many steps"):
        schedule_of(lambda step: 0.1)
    with pytest.raises(ValueError, match="negative or not finite"):
        schedule_of(lambda step: -0.1, 3)
