"""The words follow from the numbers: no good word without evidence from every side, no bad one without a number."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collage_monitor import wire
from collage_monitor.diagnosis import Evidence, judge, longest_window

STATE = "state_decrement_ratio/exp_avg_sq"
FIRST = "state_decrement_ratio/exp_avg"
SUM = "state_increment_ratio/sum"
GOOD = {"edq_ratio": 1.0, STATE: 1.0, "lost_update_ratio": 0.0, "update_error_ratio": 0.0, "measured_ratio": 1.0}
STILL = {"lost_update_ratio": 1.0, "update_error_ratio": 1.0, "edq_ratio": 0.0}
values = st.none() | st.floats(-2, 3) | st.just("NaN")


def judged(model, layers=None, *, first=1, last=100, now=None, silent=None, logged=None, **watch):
    """The judgement of these numbers, of plain AdamW in bfloat16 where the watch is not said to be another."""
    info = wire.WatchInfo(**{"optimizer": "AdamW", "observed_strategy": "plain", "dtype": "bfloat16", **watch})
    return judge(Evidence(model, layers or {}, info, first, last, silent, now=now or {}, logged=logged or {}))


def layer(elements=100.0, norm=1.0, **changes):
    return {**GOOD, "elements": elements, "intended_norm": norm, **changes}


def seen(implementation="unknown", **facts):
    """A watch whose weights are rounded to nearest."""
    facts = {"implementation": implementation, "stochastic_rounding": False, **facts}
    return {"fingerprint": wire.Fingerprint(**facts)}


def told(word, numbers, *words, unsaid="nothing of the kind", **facts):
    """The numbers are good but for these; the facts are those of the watch and of the evidence."""
    return word, {**GOOD, **numbers}, words, unsaid, facts


LOSING = {"lost_update_ratio": 0.19, "update_error_ratio": 0.22}
STOCHASTIC = {"strategy": "stochastic"}
ZEROS = "state_zero_ratio/exp_avg_sq"
HALF = seen(states={"exp_avg_sq": "float16"})
NOISE = "state_decrement_noise_ratio/exp_avg_sq"
SUM_NOISE = "state_increment_noise_ratio/sum"
NOISY_SUM = {STATE: None, SUM: 0.8}
MOMENTLESS = {STATE: None, "edq_oracle_ratio": 1.0}
NOISY = {"lost_update_ratio": 0.96, "update_error_ratio": 5.0}
RANDOM_STEP = {"lost_update_ratio": 0.6, "update_error_ratio": 1.2, "sampled": 1e6, "idle": 0.0, "elements": 1e6}
CHANCE = {"edq_ratio": 0.9, "update_error_ratio": 6.0, "elements": 1e4, "sampled": 1e4, "idle": 0.0}
SAMPLED = {"update_error_ratio": 4.0, "sampled": 1e4, "elements": 1e6, "idle": 0.0}
BETWEEN = {"edq_ratio_low": 0.97, "edq_ratio_high": 1.03}
KEPT = {"residual_zero_ratio": 0.0, "residual_fill_ratio": 0.5, "lost_visible_ratio": 0.6}
COUNTS = {"elements": 100.0, "nonfinite": 0.0, "faithful": 1.0, "residual_dropped_ratio": 0.0}
HALF_LEFT = {"elements": 100.0, "nonfinite": 50.0, "residual_dropped_ratio": 0.3}
WINDOWS = {"edq_window_ratio/8": 0.99, "edq_window_ratio/64": 0.7}
LOW = {"parameter_low": "int16"}
COMPENSATED = seen(residual="compensation")
SOME_AT_RANDOM = wire.Fingerprint(layer_rounds_at_random={"random": True, "nearest": False})
HALVES: dict[str, Any] = {"observed_strategy": "unknown", "fingerprint": SOME_AT_RANDOM}
NEAREST = {"fingerprint": wire.Fingerprint(layer_rounds_at_random={"a": False, "b": False})}
STRANGE = {"unexplained": "the state master_param holds something of the weights, and is not understood"}
COPIES = {"cast_changed_ratio/fp8_block128": 0.98, "cast_recoded_ratio/fp8_block128": 0.0026}
ROUTE = {"cast_route_ratio/fp8_block128/bf16>fp8_block128": 0.0221}
NO_DECAY = {"decay_ratio": 0.0}
COUPLED = {"edq_ratio": 1.069, "edq_noise_ratio": 0.004}
SMALL_UPDATES = {"edq_ratio": 1.0, "intended_norm": 1.0}


def halves(at_random, to_nearest):
    return {"layers": {"random": layer(**at_random), "nearest": layer(norm=0.1, **to_nearest)}, **HALVES}


def sgd(states, residual, last):
    facts = {"parameters": {"bfloat16": 8}, "states": states, "residual": residual}
    fingerprint = wire.Fingerprint(**facts)
    return {"optimizer": "SGD", "observed_strategy": "split-master", "fingerprint": fingerprint, "last": last}


def two_errors(error):
    lost = [layer(lost_update_ratio=0.3, update_error_ratio=own) for own in (error, 0.02)]
    return {"layers": dict(zip("ab", lost, strict=True)), **NEAREST}


def newest(**numbers):
    return {"now": {"edq_ratio": 0.9, "intended_norm": 1.0, **numbers}}


def arrived(word, window, share, moved):
    """A run whose single steps lose half, and a layer of it most."""
    numbers = {"lost_update_ratio": 0.494, "update_error_ratio": 0.6, "oracle_displacement_ratio": moved}
    if window is not None:
        numbers |= {f"lost_window_ratio/{window}": share, f"edq_window_ratio/{window}": 1.0}
    return told(word, numbers, layers={"a": layer(lost_update_ratio=0.9, update_error_ratio=0.9), "b": layer()})


def beside(**unmoved):
    """A layer that does not move, of few elements, beside one that does."""
    return {"layers": {"frozen": unmoved, "linear.weight": layer(elements=990.0)}}


IDLE = {"elements": 10.0, "intended_norm": 0.0, "lost_update_ratio": None, "measured_ratio": 1.0}
LOST_ALL = {"lost_update_ratio": 0.99, "update_error_ratio": 1.0, "edq_ratio": 0.02}
EMBEDDING = {"elements": 9970.0}
FEW = {"embedding": EMBEDDING, "norm": layer(elements=30.0)}
FEW_LOST = {"embedding": EMBEDDING, "norm": layer(elements=30.0, **LOST_ALL)}
COPY_STILL = {"cast_changed_ratio/bf16": 0.049, "cast_changed_ratio/fp16": 0.9}
LAWS = {
    "what has arrived after many steps overrules what single steps lose: errors fed back arrive later": [
        arrived("healthy", 64, 0.018, 1.045),
        arrived("losing updates", 64, 0.018, 0.56),
        arrived("losing updates", 64, 0.018, None),
        arrived("losing updates", 64, 0.3, 1.0),
        arrived("losing updates", 4, 0.018, 1.0),
        arrived("losing updates", None, 0.0, 1.0),
    ],
    "a layer that was not to move is no sickness: a rate of 0, no gradient, next to nothing intended": [
        told("healthy", {}, **beside(**IDLE)),
        told("healthy", {}, **beside(elements=None, intended_norm=None, lost_update_ratio=None)),
        told("healthy", {}, **beside(**layer(elements=10.0, norm=1e-6, **STILL))),
    ],
    "what was not measured keeps a run from a good word: of 0.3 % of a tied embedding 99 % were lost": [
        told("unknown", {"measured_ratio": 0.003}, "known of 0.3 % of the elements only", layers=FEW),
        told("unknown", LOST_ALL, "; 99.0 % of the updates are rounded away", layers=FEW_LOST),
        told("unknown", LOST_ALL, "Measured: steps 1 to 100, 0.3 % of the elements.", layers=FEW_LOST),
    ],
    "a copy that hardly moves is said and decides nothing": [
        told("healthy", COPY_STILL, "4.9 % of a bf16 copy of the weights. Training is unaffected", unsaid="fp16"),
    ],
    "a state that grows is told in words": [
        told("states are stuck", {STATE: -1.466}, "exp_avg_sq grows instead.", "shrink, by 1.47 times as much"),
    ],
    "an overshoot does not make up for a loss: bf16 AdamW at lr 1e-3, EDQ 1.027 and 19 % lost, was healthy": [
        told("losing updates", {**LOSING, "edq_ratio": 1.027}, "19.0 % of the updates are rounded away"),
    ],
    "lost updates too small to matter are no sickness: fp32 SGD loses what is below 2⁻²⁵ of a weight": [
        told("healthy", {"lost_update_ratio": 0.3, "update_error_ratio": 1e-6}),
    ],
    "stochastic rounding is not judged by what one step loses": [
        told("healthy", RANDOM_STEP, **STOCHASTIC),
        told("losing updates", RANDOM_STEP, observed_strategy="plain"),
        told("unknown", RANDOM_STEP, "declare strategy=", observed_strategy="unknown"),
    ],
    "chance is no loss where rounding is stochastic; what rounding to nearest does is none": [
        told("unknown", {**CHANCE, "edq_noise_ratio": 0.06}, **STOCHASTIC),
        told("losing updates", {**CHANCE, "edq_noise_ratio": 6e-4}, **STOCHASTIC),
        told("losing updates", {**CHANCE, "edq_noise_ratio": 0.06}),
        told("healthy", {"edq_window_ratio/8": 1.087, "edq_window_noise_ratio/8": 0.05}, **STOCHASTIC),
        told("steps are off", {"edq_window_ratio/8": 1.087, "edq_window_noise_ratio/8": 0.005}, **STOCHASTIC),
    ],
    "a sample that gives no interval gives no word about noise, unless the error bounds it": [
        told("unknown", {**SAMPLED, "edq_ratio": 1.0}, **STOCHASTIC),
        told("unknown", {**SAMPLED, "edq_ratio": 0.9}, **STOCHASTIC),
        told("healthy", {**SAMPLED, **BETWEEN}, **STOCHASTIC),
        told("healthy", {**SAMPLED, "sampled": 1e9, "elements": 1e9}, **STOCHASTIC),
        told("healthy", {**SAMPLED, "update_error_ratio": 0.01}, **STOCHASTIC),
    ],
    "states rounded at random are judged by their own noise; what it could bring here from 0 is no witness": [
        told("healthy", {STATE: 0.8, NOISE: 0.1}, "exp_avg_sq is off by what chance may do (0.800)", **STOCHASTIC),
        told("healthy", {STATE: 1.2, NOISE: 0.1}, **STOCHASTIC),
        told("healthy", {STATE: 0.95, NOISE: 0.1}, "exp_avg_sq decays as it should (0.950)", **STOCHASTIC),
        told("states are stuck", {STATE: 0.8, NOISE: 0.001}, **STOCHASTIC),
        told("steps are off", {STATE: 1.2, NOISE: 0.001}, **STOCHASTIC),
        told("unknown", {STATE: 1.0, NOISE: 0.5}, **STOCHASTIC),
    ],
    "a sum is judged by how it grows: Adagrad's in bfloat16 held 0.73 of the true one, and unknown was said": [
        told("healthy", {STATE: None, SUM: 1.0}, "sum grows as it should (1.000)"),
        told("states are stuck", {STATE: None, SUM: 0.73}, "(0.730): steps that divide by its root tend to 1.17"),
        told("states are stuck", {STATE: None, SUM: 0.95}, "(0.950, 0.640 now):", "to 1.25", now={SUM: 0.64}),
        told("states are stuck", {STATE: None, SUM: 0.73}, "(0.730, 0.990 now):", "to 1.17", now={SUM: 0.99}),
        told("states are stuck", {STATE: None, SUM: 0.0}, "state sum does not grow as it should (0.000). "),
        told("states are stuck", {STATE: None, SUM: -0.5}, "shrinks where it should grow, by 0.50 times as much"),
        told("steps are off", {STATE: None, SUM: 1.4}, "the state sum grows too fast (1.400)"),
    ],
    "chance is no fault of a sum that is rounded at random, nor a witness": [
        told("states are stuck", {**NOISY_SUM, SUM_NOISE: 0.05}),
        told("healthy", {**NOISY_SUM, SUM_NOISE: 0.05}, "sum is off by what chance may do (0.800)", **STOCHASTIC),
        told("unknown", {**NOISY_SUM, SUM_NOISE: 0.35}, **STOCHASTIC),
    ],
    "layers that round otherwise than others are judged by their own loss: healthy, with 98.8 % lost there": [
        told("healthy", {"lost_update_ratio": 0.48, "update_error_ratio": 4.0}, **halves(NOISY, {})),
        told(
            "losing updates",
            {"lost_update_ratio": 0.49},
            "98.8 % of the updates of the layers that round to nearest are rounded away; 1 layer loses",
            **halves({}, {"lost_update_ratio": 0.988, "update_error_ratio": 0.98}),
        ),
        told("losing updates", {"lost_update_ratio": 0.58}, **halves(NOISY, LOSING)),
        told("healthy", {}, **halves(NOISY, {**NOISY, "intended_norm": 1e-6})),
        told("unknown", {"lost_update_ratio": 0.49}, "some layers round at random", **HALVES),
        # Of a layer that nothing was seen of, as on another rank.
        told("unknown", {}, layers={"random": layer(), "other": layer(**NOISY)}, **HALVES),
    ],
    "errors of layers are put together as squares": [
        told("healthy", {"lost_update_ratio": 0.3}, **two_errors(0.06)),
        told("losing updates", {"lost_update_ratio": 0.3}, **two_errors(0.08)),
    ],
    "decay is lost where it is an operation of its own, by dtype and not by the kernel alone": [
        told("decay is lost", NO_DECAY, **seen("foreach")),
        told("decay is lost", NO_DECAY, "(0 % of it is kept)", **seen("for-loop")),
        told("healthy", NO_DECAY, **seen("fused")),
        told("healthy", NO_DECAY, **seen("foreach", master="master")),
        told("decay is lost", NO_DECAY, **seen("fused", parameters={"float32": 8})),
        told("decay is lost", NO_DECAY, **seen("foreach", parameters={"float32": 8})),
        told("decay is lost", NO_DECAY, **seen("foreach", parameters={"bfloat16": 8})),
        told("healthy", NO_DECAY, **seen("fused", parameters={"bfloat16": 8})),
        told("healthy", NO_DECAY, **seen("unknown", parameters={"float32": 8})),
        # Only one of several optimizers makes it by itself.
        told("unknown", {"decay_ratio": 0.1}, "decay", **seen("foreach and fused")),
        told("healthy", {"decay_ratio": 0.9}, **seen("foreach and fused")),
    ],
    "states that cannot go wrong confirm a run: SGD stayed unknown after the cure that was told": [
        told("healthy", {STATE: None}, **sgd(LOW, "parameter_low", 40)),
        told("healthy", {STATE: None}, **sgd({"sum": "float32"}, None, 40)),
        told("unknown", {STATE: None}, **sgd({"sum": "float32"}, None, 4)),
        told("unknown", {STATE: None}, **sgd({"sum": "bfloat16"}, None, 40)),
        told("unknown", {STATE: None}, **sgd({**LOW, "momentum_buffer": "bfloat16"}, "parameter_low", 40)),
    ],
    "moments kept by row in 16 bits need an oracle": [
        told("unknown", {}, **seen(factored={"row_var": "bfloat16"})),
        told("healthy", {"edq_oracle_ratio": 1.0}, **seen(factored={"row_var": "bfloat16"})),
        told("healthy", {}, **seen(factored={"row_var": "float32"})),
    ],
    "an average that is rounded to 0 needs an oracle": [
        told("unknown", {ZEROS: 0.02}, **HALF),
        told("healthy", {ZEROS: 0.005}, **HALF),
        told("healthy", {ZEROS: 0.02, "edq_oracle_ratio": 1.0}, **HALF),
        told("healthy", {ZEROS: 0.02}, **seen(states={"exp_avg_sq": "float32"})),
    ],
    "coupled rounding overshoots by what it took before, and an oracle says so": [
        told("unknown", COUPLED, observed_strategy="coupled-7"),
        told("healthy", {**COUPLED, "edq_oracle_ratio": 1.0}, observed_strategy="coupled-7"),
        told("steps are off", {**COUPLED, "edq_oracle_ratio": 1.0}, observed_strategy="split-24bit-8bit"),
    ],
    "an oracle that moves away confirms nothing": [
        told("healthy", MOMENTLESS, now={"edq_oracle_ratio": 1.0}),
        told("unknown", MOMENTLESS, now={"edq_oracle_ratio": 0.9}),
    ],
    "newest steps move a number if neither three standard errors nor its interval explain it": [
        told("unknown", SMALL_UPDATES, **newest(edq_noise_ratio=0.0)),
        told("healthy", SMALL_UPDATES, **newest(edq_noise_ratio=0.03)),
        told("healthy", SMALL_UPDATES, **newest(edq_ratio_low=0.79, edq_ratio_high=1.01)),
        told("unknown", SMALL_UPDATES, **newest(edq_ratio_low=0.81, edq_ratio_high=0.99)),
    ],
    "residuals that are dropped or overflow are no good keeping": [
        told("healthy", KEPT),
        told("losing updates", {**KEPT, "residual_zero_ratio": 1.0}, "60.0 % of the updates do not move the"),
        told("residuals are off", {**KEPT, "residual_dropped_ratio": 0.98}, "98.0 % of the residuals were 0 again"),
        told("healthy", {**KEPT, "residual_dropped_ratio": 0.02}),
        told("healthy", {**COUNTS, "idle": 100.00000000000001}),
        told("healthy", {**COUNTS, "idle": 120.0}),
        told("residuals are off", {**KEPT, "residual_fill_ratio": 510.0}, "510 half gaps"),
    ],
    "residuals of rows that are never used are 0, and all are before the one step that was measured": [
        told("healthy", {**KEPT, "residual_zero_ratio": 0.97, "idle": 97.0, "elements": 100.0}),
        told("healthy", {**KEPT, "residual_zero_ratio": 1.0}, first=5, last=5),
        told("losing updates", {**KEPT, "residual_zero_ratio": 1.0}, first=5, last=6),
    ],
    "what is not finite is not among the elements that are idle": [
        told("healthy", {**HALF_LEFT, "idle": 10.0}),
        told("residuals are off", {**HALF_LEFT, "idle": 25.0}),
    ],
    "a window speaks where more than the visible weight is kept, also where single steps say nothing": [
        told("losing updates", WINDOWS, "over 64 steps is 0.700", **COMPENSATED),
        told("losing updates", {"edq_window_ratio/8": 0.5}, "over 8 steps", **COMPENSATED),
        # Plain rounding loses in each step what it loses: the last window of a schedule to 0 is next to nothing.
        told("healthy", WINDOWS),
        told("losing updates", {"edq_ratio": None, "faithful": 1.0, "edq_window_ratio/32": 0.5}, **seen()),
    ],
    "weights kept in a way that is not understood are neither healthy nor sick": [
        told("unknown", {}, "The state master_param holds", **seen(**STRANGE)),
        told("unknown", {"edq_ratio": 0.1}, "The state master_param holds", **seen(**STRANGE)),
        told("unknown", {"nonfinite_params": 3.0}, "The state master_param holds", **seen(**STRANGE)),
    ],
    "what is not finite is told however little is measured": [
        told("not finite", {"measured_ratio": 0.2, "nonfinite_params": 3.0}),
    ],
    "codes speak for copies whose scales move every number, and routes are set against a step": [
        told("healthy", COPIES, "A step changes 0.3 % of a fp8_block128 copy of the weights"),
        told("healthy", COPIES | ROUTE, "differ in 2.2 % of their codes, 8.5 times what a step changes."),
    ],
}


@pytest.mark.parametrize(
    ("word", "numbers", "words", "unsaid", "facts"),
    [pytest.param(*row, id=f"{law} {place}") for law, rows in LAWS.items() for place, row in enumerate(rows, 1)],
)
def test_the_word_follows_from_the_numbers(word, numbers, words, unsaid, facts):
    found = judged(numbers, **facts)
    assert found.health == word, found.text
    said = f"{found.headline}\n{found.text}".casefold()
    assert [own for own in words if own.casefold() not in said] == []
    assert unsaid not in said


def test_the_longest_window_is_that_of_most_steps_among_those_that_are_known():
    assert longest_window(WINDOWS, "lost_window_ratio") is None
    assert longest_window({"edq_window_ratio/x": 1.0}, "edq_window_ratio") is None


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"edq_ratio": 1.0}, "unknown"),
        ({"edq_ratio": None}, "unknown"),
        ({"edq_ratio": "NaN", STATE: 1.0}, "unknown"),
        ({"edq_ratio": 1.0, STATE: None}, "unknown"),
        ({"edq_ratio": 0.999, STATE: 0.98}, "healthy"),
        ({"edq_ratio": 1.0, "edq_oracle_ratio": 1.01}, "healthy"),
        ({"edq_ratio": 1.0, STATE: 0.02}, "states are stuck"),
        ({"edq_ratio": 1.0, STATE: 1.0, "edq_oracle_ratio": 0.7}, "steps are off"),
        ({"edq_ratio": 1.0, STATE: 1.0, FIRST: 1.6}, "steps are off"),
        ({"edq_ratio": 1.3, STATE: 1.0}, "steps are off"),
        ({"edq_ratio": 0.5, STATE: 1.0, "edq_oracle_ratio": 1.0}, "losing updates"),
        ({"edq_ratio": 0.84, STATE: 0.0, "edq_oracle_ratio": 1.0}, "losing updates"),
    ],
)
def test_one_number_out_of_its_bounds_is_enough(model, expected):
    found = judge(Evidence(model))
    assert found.health == expected
    assert "healthy" not in found.text


@given(values, values, values, values)
def test_a_good_word_always_has_two_witnesses_and_no_contradiction(edq, state, oracle, lost):
    model = {"edq_ratio": edq, STATE: state, "edq_oracle_ratio": oracle, "lost_update_ratio": lost}
    if judged(model).health == "healthy":
        assert abs(1 - edq) <= 0.05
        assert isinstance(state, float) or isinstance(oracle, float)
        assert not isinstance(lost, float) or lost <= 0.05


def test_the_deciding_number_is_there_to_be_read_by_programs():
    found = judged({**GOOD, STATE: 0.02, "edq_oracle_ratio": 0.7})
    assert found.deciding is not None
    assert (found.deciding.key, found.deciding.value, found.deciding.threshold) == (STATE, 0.02, 0.9)
    assert [finding.key for finding in found.findings] == [STATE, "edq_oracle_ratio"]
    assert (found.measured, found.first_step, found.last_step) == (1.0, 1, 100)
    # Of layers that round to nearest beside others, it is theirs.
    found = judged({**GOOD, "lost_update_ratio": 0.58}, **halves(NOISY, LOSING))
    assert found.deciding is not None
    assert found.deciding.value == 0.19


AVERAGE = {"average_edq_ratio": 0.2, "average_edq_noise_ratio": 0.01, "average_lost_ratio": 0.9}
AVERAGE |= {"average_moved_ratio": 0.03, "average_nonfinite": 0.0}


def test_an_average_that_loses_its_updates_is_no_loss_of_the_weights():
    found = judged({**GOOD, **AVERAGE})
    assert found.health == "average is off"
    assert "its EDQ is 0.200, 90.0 % of them are rounded away, 3.0 % of its elements ever moved" in found.text
    assert "eep the average in float32" in found.advised
    both = judged({**GOOD, **AVERAGE, "edq_ratio": 0.5})
    assert [finding.health for finding in both.findings] == ["losing updates", "average is off"]


@pytest.mark.parametrize(
    ("changes", "expected", "bound"),
    [
        ({"average_edq_ratio": 0.96}, "healthy", None),
        ({"average_edq_ratio": None}, "healthy", None),
        ({"average_edq_noise_ratio": 0.3}, "healthy", None),
        ({"average_lost_ratio": 0.0, "average_edq_ratio": -1.0}, "average is off", 0.95),
        ({"average_lost_ratio": 0.0, "average_edq_ratio": 1.5}, "average is off", 1.05),
        ({"average_lost_ratio": 0.0, "average_edq_ratio": 1.0, "average_nonfinite": 3.0}, "average is off", None),
    ],
)
def test_an_average_is_judged_beyond_what_chance_does_by_the_bound_on_its_side(changes, expected, bound):
    found = judged({**GOOD, **AVERAGE, **changes})
    assert found.health == expected
    assert not found.advice
    assert bound is None or found.findings[0].threshold == pytest.approx(bound)


NARROW = wire.Trained(optimizer="Adam", strategy="plain", parameters={"float16": 16})


@pytest.mark.parametrize(
    ("model", "layers", "trained", "expected"),
    [
        ({"nonfinite_grads": 3.0}, {}, [], "8 weights are NaN or infinite"),
        ({}, {"a": 0.0, "b": 8.0}, [], "8 weights are NaN or infinite, in b"),
        ({}, {"a": 3.0, "b": 5.0}, [], "8 weights are NaN or infinite, in b and another layer"),
        (
            {"nonfinite_grads": 0.0},
            {"a": 1.0, "b": 5.0, "c": 2.0, "d": 0.0},
            [NARROW],
            "8 weights are NaN or infinite, in b and 2 more layers; the gradients were finite, so the step made "
            "them (in float16 an eps below 3e-8 is 0: raise it, or keep the weights in float32)",
        ),
    ],
)
def test_weights_that_are_not_finite_are_named_with_their_layer_and_what_made_them(
    model, layers, trained, expected
):
    """Told was a number alone, and of the layers the first that was finite."""
    layers = {name: layer(nonfinite_params=count) for name, count in layers.items()}
    found = judged({**GOOD, "nonfinite_params": 8.0, **model}, layers, trained=trained)
    assert found.deciding is not None
    # The number is the whole model's: alerts take no finding of a layer for the run's.
    assert (found.health, found.deciding.text, found.deciding.layer) == ("not finite", expected, None)
    assert ("with a larger eps" in found.advised, "clipping" in found.advised) == (bool(trained), not trained)


def test_a_state_that_is_infinite_is_no_loss_of_updates():
    """Told was that they are rounded away, and to keep master weights, under which nothing moves either."""
    key = "state_infinite_ratio/exp_avg_sq"
    found = judged({**GOOD, key: 0.25, "edq_ratio": 0.3})
    assert found.health == "not finite"
    assert found.headline == "exp_avg_sq is infinite in 25.0 % of the elements."
    assert found.findings[0].alert == "CollageNotFinite", "no alert told of it"
    assert "without a loss scale" in found.advised
    assert "from_optimizer" not in found.advised
    assert judged({**GOOD, key: 0.0}).health == "healthy"


def test_elements_that_stand_still_are_told_where_nobody_knows_what_was_intended():
    model = {"elements": 100.0, "unchanged_ratio": 0.97}
    found = judged(model)
    assert (found.health, found.short) == ("unknown", "97.0 % did not move")
    assert "97.0 % of the elements did not move" in found.headline
    assert "did not move" not in judged({**model, "unchanged_ratio": 0.1}).headline


def test_a_layer_that_stands_still_is_named_with_its_share():
    """Every LayerNorm weight still was exactly 1.0 in a run that was called healthy."""
    still = layer(elements=10.0, norm=0.1, **STILL)
    found = judged(GOOD, {"norm.weight": still, "linear.weight": layer(elements=990.0)})
    assert found.health == "losing updates"
    assert "1 layer stands still (norm.weight: 1.0 % of the measured elements, 1.0 % of Σ u²)" in found.text
    assert found.deciding is not None
    assert found.deciding.layer == "norm.weight"
