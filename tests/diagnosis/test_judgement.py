"""The words follow from the numbers: no good word without evidence from every side, no bad one without a number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collage_monitor import wire
from collage_monitor.diagnosis import (
    Evidence,
    judge,
    longest_window,
)

STATE = "state_decrement_ratio/exp_avg_sq"
GOOD = {"edq_ratio": 1.0, STATE: 1.0, "lost_update_ratio": 0.0, "update_error_ratio": 0.0, "measured_ratio": 1.0}
TO_NEAREST = wire.Fingerprint(stochastic_rounding=False)
values = st.none() | st.floats(-2, 3) | st.just("NaN")


def judged(model, layers=None, **watch):
    info = wire.WatchInfo(**{"optimizer": "AdamW", "observed_strategy": "plain", "dtype": "bfloat16", **watch})
    return judge(Evidence(model, layers or {}, info, 1, 100))


def layer(elements=100.0, norm=1.0, **changes):
    return {**GOOD, "elements": elements, "intended_norm": norm, **changes}


def test_edq_alone_is_not_known():
    found = judge(Evidence({"edq_ratio": 1.0}))
    assert found.health == "unknown"
    assert "not known" in found.text


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"edq_ratio": None}, "unknown"),
        ({"edq_ratio": "NaN", STATE: 1.0}, "unknown"),
        ({"edq_ratio": 1.0, STATE: None}, "unknown"),
        ({"edq_ratio": 0.999, STATE: 0.98}, "healthy"),
        ({"edq_ratio": 1.0, "edq_oracle_ratio": 1.01}, "healthy"),
        ({"edq_ratio": 1.0, STATE: 0.02}, "states are stuck"),
        ({"edq_ratio": 1.0, STATE: 1.0, "edq_oracle_ratio": 0.7}, "steps are off"),
        ({"edq_ratio": 1.0, STATE: 1.0, "state_decrement_ratio/exp_avg": 1.6}, "steps are off"),
        ({"edq_ratio": 1.3, STATE: 1.0}, "steps are off"),
        ({"edq_ratio": 0.5, STATE: 1.0, "edq_oracle_ratio": 1.0}, "losing updates"),
        ({"edq_ratio": 0.84, STATE: 0.0, "edq_oracle_ratio": 1.0}, "losing updates"),
    ],
)
def test_one_number_out_of_its_bounds_is_enough(model, expected):
    found = judge(Evidence(model))
    assert found.health == expected
    assert "healthy" not in found.text


def test_the_deciding_number_is_there_to_be_read_by_programs():
    found = judged({**GOOD, STATE: 0.02, "edq_oracle_ratio": 0.7})
    assert found.deciding is not None
    assert (found.deciding.key, found.deciding.value, found.deciding.threshold) == (STATE, 0.02, 0.9)
    assert [finding.key for finding in found.findings] == [STATE, "edq_oracle_ratio"]
    assert (found.measured, found.first_step, found.last_step) == (1.0, 1, 100)


AVERAGE = {
    "average_edq_ratio": 0.2,
    "average_edq_noise_ratio": 0.01,
    "average_lost_ratio": 0.9,
    "average_moved_ratio": 0.03,
    "average_nonfinite": 0.0,
}


def test_an_average_that_loses_its_updates_is_no_loss_of_the_weights():
    found = judged({**GOOD, STATE: 1.0, **AVERAGE})
    assert found.health == "average is off"
    assert "its EDQ is 0.200, 90.0 % of them are rounded away, 3.0 % of its elements ever moved" in found.text
    assert "eep the average in float32" in found.advised
    both = judged({**GOOD, STATE: 1.0, **AVERAGE, "edq_ratio": 0.5})
    assert both.health == "losing updates"
    assert [finding.health for finding in both.findings] == ["losing updates", "average is off"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"average_edq_ratio": 0.96}, "healthy"),
        ({"average_edq_ratio": None}, "healthy"),
        ({"average_edq_noise_ratio": 0.3}, "healthy"),
        ({"average_lost_ratio": 0.0, "average_edq_ratio": -1.0}, "average is off"),
        ({"average_lost_ratio": 0.0, "average_edq_ratio": 1.0, "average_nonfinite": 3.0}, "average is off"),
    ],
)
def test_an_average_is_judged_beyond_what_chance_does(changes, expected):
    found = judged({**GOOD, STATE: 1.0, **AVERAGE, **changes})
    assert found.health == expected
    assert not found.advice


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
    found = judged(
        {**GOOD, "nonfinite_params": 8.0, **model},
        {name: layer(nonfinite_params=count) for name, count in layers.items()},
        trained=trained,
    )
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
    assert judged({**GOOD, STATE: 1.0, key: 0.0}).health == "healthy"


@pytest.mark.parametrize(
    ("window", "share", "moved", "health"),
    [
        (64, 0.018, 1.045, "healthy"),
        (64, 0.018, 0.56, "losing updates"),
        (64, 0.018, None, "losing updates"),
        (64, 0.3, 1.0, "losing updates"),
        (4, 0.018, 1.0, "losing updates"),
        (None, 0.0, 1.0, "losing updates"),
    ],
)
def test_what_has_arrived_after_many_steps_overrules_what_single_steps_lose(window, share, moved, health):
    """Rounding errors that are fed back arrive later: a run that moved as far as fp32 was told it loses half."""
    model = {**GOOD, "lost_update_ratio": 0.494, "update_error_ratio": 0.6, "oracle_displacement_ratio": moved}
    if window is not None:
        model |= {f"lost_window_ratio/{window}": share, f"edq_window_ratio/{window}": 1.0}
    losing = layer(lost_update_ratio=0.9, update_error_ratio=0.9)
    found = judged(model, {"a": losing, "b": layer()})
    assert found.health == health


@given(values, values, values, values)
def test_a_good_word_always_has_two_witnesses_and_no_contradiction(edq, state, oracle, lost):
    model = {"edq_ratio": edq, STATE: state, "edq_oracle_ratio": oracle, "lost_update_ratio": lost}
    if judged(model).health == "healthy":
        assert abs(1 - edq) <= 0.05
        assert isinstance(state, float) or isinstance(oracle, float)
        assert not isinstance(lost, float) or lost <= 0.05


def test_an_overshoot_does_not_make_up_for_a_loss():
    """bf16 AdamW, β₂ 0.95, decay 0.1, lr 1e-3: EDQ 1.027 and 19 % lost was "healthy"."""
    found = judged({**GOOD, "edq_ratio": 1.027, "lost_update_ratio": 0.19, "update_error_ratio": 0.22})
    assert found.health == "losing updates"
    assert "19.0 % of the updates are rounded away" in found.text


def test_lost_updates_too_small_to_matter_are_no_sickness():
    """fp32 SGD loses what is below 2⁻²⁵ of a weight: many elements, nothing of the descent."""
    assert judged({**GOOD, "lost_update_ratio": 0.3, "update_error_ratio": 1e-6}).health == "healthy"


def test_stochastic_rounding_is_not_judged_by_what_one_step_loses():
    model = {
        **GOOD,
        "lost_update_ratio": 0.6,
        "update_error_ratio": 1.2,
        "sampled": 1e6,
        "idle": 0.0,
        "elements": 1e6,
    }
    assert judged(model, strategy="stochastic").health == "healthy"
    assert judged(model, observed_strategy="plain").health == "losing updates"
    unknown = judged(model, observed_strategy="unknown")
    assert unknown.health == "unknown"
    assert "declare strategy=" in unknown.text


def test_layers_that_round_otherwise_than_others_are_judged_by_their_own_loss():
    """CollageAdamW, half of it "split-master" at lr 1e-3, half "plain" at 1e-5: healthy, with 98.8 % lost there."""
    seen = wire.Fingerprint(layer_rounds_at_random={"random": True, "nearest": False})

    def said(at_random, to_nearest, **model):
        layers = {"random": layer(**at_random), "nearest": layer(norm=0.1, **to_nearest)}
        return judged({**GOOD, **model}, layers, observed_strategy="unknown", fingerprint=seen)

    noisy = {"lost_update_ratio": 0.96, "update_error_ratio": 5.0}
    assert said(noisy, {}, lost_update_ratio=0.48, update_error_ratio=4.0).health == "healthy"
    still = said({}, {"lost_update_ratio": 0.988, "update_error_ratio": 0.98}, lost_update_ratio=0.49)
    assert still.health == "losing updates"
    assert "98.8 % of the updates of the layers that round to nearest are rounded away; 1 layer loses" in still.text
    some = said(noisy, {"lost_update_ratio": 0.2, "update_error_ratio": 0.3}, lost_update_ratio=0.58)
    assert (some.health, some.deciding and some.deciding.value) == ("losing updates", 0.2)
    assert said(noisy, {**noisy, "intended_norm": 1e-6}).health == "healthy"
    # Without its layers the model's number is one of both.
    merged = judged({**GOOD, "lost_update_ratio": 0.49}, observed_strategy="unknown", fingerprint=seen)
    assert merged.health == "unknown"
    assert "some layers round at random" in merged.text
    # Of a layer that nothing was seen of, as on another rank.
    other = {"random": layer(), "other": layer(**noisy)}
    assert judged(GOOD, other, observed_strategy="unknown", fingerprint=seen).health == "unknown"


def test_decay_that_only_one_of_several_optimizers_makes_by_itself_is_not_known():
    seen = wire.Fingerprint(implementation="foreach and fused", stochastic_rounding=False)
    found = judged({**GOOD, "decay_ratio": 0.1}, fingerprint=seen)
    assert found.health == "unknown"
    assert "decay" in found.text
    assert judged({**GOOD, "decay_ratio": 0.9}, fingerprint=seen).health == "healthy"


@pytest.mark.parametrize(
    ("dtype", "implementation", "word"),
    [
        ("float32", "fused", "decay is lost"),
        ("float32", "foreach", "decay is lost"),
        ("bfloat16", "foreach", "decay is lost"),
        ("bfloat16", "fused", "healthy"),
        ("float32", "unknown", "healthy"),
    ],
)
def test_decay_is_rounded_by_itself_by_dtype_and_not_by_the_kernel_alone(dtype, implementation, word):
    """Torch's fused kernel multiplies in float32: decay of a float32 weight below half a gap is lost there, too."""
    seen = wire.Fingerprint(parameters={dtype: 8}, implementation=implementation, stochastic_rounding=False)
    assert judged({**GOOD, "decay_ratio": 0.0}, fingerprint=seen).health == word


@pytest.mark.parametrize(
    ("states", "residual", "last", "word"),
    [
        ({"parameter_low": "int16"}, "parameter_low", 40, "healthy"),
        ({"sum": "float32"}, None, 40, "healthy"),
        ({"sum": "float32"}, None, 4, "unknown"),
        ({"sum": "bfloat16"}, None, 40, "unknown"),
        ({"parameter_low": "int16", "momentum_buffer": "bfloat16"}, "parameter_low", 40, "unknown"),
    ],
)
def test_states_that_cannot_go_wrong_confirm_a_run(states, residual, last, word):
    """SGD and Adagrad stayed "unknown" after the cure that was told, with nothing left to confirm."""
    seen = wire.Fingerprint(parameters={"bfloat16": 8}, states=states, residual=residual)
    watch = wire.WatchInfo(optimizer="SGD", observed_strategy="split-master", fingerprint=seen)
    model = {**GOOD, STATE: None}
    assert judge(Evidence(model, watch=watch, first_step=1, last_step=last)).health == word


@pytest.mark.parametrize(("size", "word"), [(0.0, ""), (50.0, ", of 66.7 % of the elements"), (300.0, None)])
def test_an_oracle_says_of_how_much_it_speaks(size, word):
    layers = {"followed": layer(edq_oracle_ratio=1.0), "other": layer(size)}
    model = {**GOOD, STATE: None, "edq_oracle_ratio": 1.0}
    text = judged(model, layers).text
    assert ("the oracle agrees" in text) == (word is not None)
    assert word is None or f"the oracle agrees (1.000{word})" in text
    off = judged({**model, "edq_oracle_ratio": 0.7}, layers).text
    assert f"is 0.700{', of 25.0 % of the elements' if word is None else word}" in off


@pytest.mark.parametrize(
    ("dtype", "moved", "health"),
    [
        ("float32", 0.985, "healthy"),
        ("bfloat16", 0.985, "states are stuck"),
        ("float32", 0.92, "losing updates"),
        ("bfloat16", 0.92, "losing updates"),
    ],
)
def test_an_average_that_takes_the_rounding_errors_is_not_stuck(dtype, moved, health):
    """Errors fed back into the momentum: 0.971 of the way arrives, and "m is stuck; updates overshoot" was said."""
    seen = wire.Fingerprint(states={"exp_avg": dtype, "exp_avg_sq": "float32"}, stochastic_rounding=False)
    model = {
        **GOOD,
        "edq_ratio": 1.098,
        "edq_window_ratio/64": 0.902,
        "lost_update_ratio": 0.491,
        "update_error_ratio": 0.7,
        "lost_window_ratio/64": 0.017,
        "oracle_displacement_ratio": moved,
        "edq_oracle_ratio": 1.04,
        "state_decrement_ratio/exp_avg": 0.764,
    }
    found = judged(model, {"a": layer(lost_update_ratio=0.9)}, observed_strategy="fp32-states", fingerprint=seen)
    assert found.health == health
    told = [finding.short for finding in found.findings]
    if moved < 0.95 and dtype == "float32":
        assert found.headline == "Loses 8.0 % of its descent.", "and not 49.1 % of its updates, as single steps do"
        assert told == ["loses 8.0 % of its descent"]
    else:
        assert ("loses 49.1 % of its updates" in told) == (moved < 0.95)


def test_a_state_that_grows_is_told_in_words():
    found = judged({**GOOD, STATE: -1.466})
    assert found.headline == "exp_avg_sq grows instead."
    assert "the state exp_avg_sq grows where it should shrink, by 1.47 times as much" in found.text.lower()


def test_elements_that_stand_still_are_told_where_nobody_knows_what_was_intended():
    model = {"elements": 100.0, "unchanged_ratio": 0.97}
    found = judged(model)
    assert (found.health, found.short) == ("unknown", "97.0 % did not move")
    assert "97.0 % of the elements did not move" in judged(model).headline
    assert "did not move" not in judged({**model, "unchanged_ratio": 0.1}).headline


def test_a_rate_of_0_after_a_cure_names_the_scheduler():
    model = {"elements": 8.0, "measured_ratio": 1.0, "grad_norm": 1.0, "idle": 8.0}
    assert "build it after from_optimizer()" in judged(model, optimizer="CollageAdamW").text


def test_chance_is_no_loss_where_rounding_is_stochastic():
    model = {**GOOD, "edq_ratio": 0.9, "update_error_ratio": 6.0, "elements": 1e4, "sampled": 1e4, "idle": 0.0}
    assert judged({**model, "edq_noise_ratio": 0.06}, strategy="stochastic").health == "unknown"
    assert judged({**model, "edq_noise_ratio": 6e-4}, strategy="stochastic").health == "losing updates"
    window = {**GOOD, "edq_window_ratio/8": 1.087}
    assert judged({**window, "edq_window_noise_ratio/8": 0.05}, strategy="stochastic").health == "healthy"
    assert judged({**window, "edq_window_noise_ratio/8": 0.005}, strategy="stochastic").health == "steps are off"
    # What rounding to nearest does is no chance.
    assert judged({**model, "edq_noise_ratio": 0.06}).health == "losing updates"


def test_states_rounded_at_random_are_judged_by_their_own_noise():
    def state(value, noise):
        return judged(
            {**GOOD, STATE: value, "state_decrement_noise_ratio/exp_avg_sq": noise}, strategy="stochastic"
        )

    assert state(0.8, 0.1).health == state(1.2, 0.1).health == "healthy"
    assert "exp_avg_sq is off by what chance may do (0.800)" in state(0.8, 0.1).text
    assert "exp_avg_sq decays as it should (0.950)" in state(0.95, 0.1).text
    assert state(0.8, 0.001).health == "states are stuck"
    assert state(1.2, 0.001).health == "steps are off"
    # A witness that chance could have brought here from 0 is none.
    assert state(1.0, 0.5).health == "unknown"


@pytest.mark.parametrize("edq", [1.0, 0.9])
def test_a_sample_that_gives_no_interval_gives_no_word_about_noise(edq):
    model = {**GOOD, "edq_ratio": edq, "update_error_ratio": 4.0, "sampled": 1e4, "elements": 1e6, "idle": 0.0}
    assert judged(model, strategy="stochastic").health == "unknown"
    known = {**model, "edq_ratio": 1.0, "edq_ratio_low": 0.97, "edq_ratio_high": 1.03}
    assert judged(known, strategy="stochastic").health == "healthy", "an interval says how exact it is"
    whole = {**model, "sampled": 1e9, "elements": 1e9, "edq_ratio": 1.0}
    assert judged(whole, strategy="stochastic").health == "healthy"
    # The error bounds what EDQ can be off by.
    assert judged({**model, "edq_ratio": 1.0, "update_error_ratio": 0.01}).health == "healthy"


def test_a_layer_that_stands_still_is_named_with_its_share():
    """Every LayerNorm weight still was exactly 1.0 in a run that was called healthy."""
    still = layer(elements=10.0, norm=0.1, lost_update_ratio=1.0, update_error_ratio=1.0, edq_ratio=0.0)
    found = judged(GOOD, {"norm.weight": still, "linear.weight": layer(elements=990.0)})
    assert found.health == "losing updates"
    assert "1 layer stands still (norm.weight: 1.0 % of the measured elements, 1.0 % of Σ u²)" in found.text
    assert found.deciding is not None
    assert found.deciding.layer == "norm.weight"


@pytest.mark.parametrize(
    "unmoved",
    [
        {"elements": 10.0, "intended_norm": 0.0, "lost_update_ratio": None, "measured_ratio": 1.0},
        {"elements": None, "intended_norm": None, "lost_update_ratio": None},
        layer(elements=10.0, norm=1e-6, lost_update_ratio=1.0, update_error_ratio=1.0, edq_ratio=0.0),
    ],
    ids=["learning rate 0", "no gradient", "next to nothing was intended"],
)
def test_a_layer_that_was_not_to_move_is_no_sickness(unmoved):
    assert judged(GOOD, {"frozen": unmoved, "linear.weight": layer(elements=990.0)}).health == "healthy"


def test_decay_that_moves_nothing_is_lost_where_it_is_an_operation_of_its_own():
    def watched(implementation, **changes):
        seen = wire.Fingerprint(implementation=implementation, stochastic_rounding=False, **changes)
        return judged({**GOOD, "decay_ratio": 0.0}, fingerprint=seen)

    assert watched("foreach").health == "decay is lost"
    assert watched("for-loop").text.startswith("Weight decay moves next to nothing (0 % of it is kept)")
    assert watched("fused").health == "healthy"
    assert watched("foreach", master="master").health == "healthy"


def test_residuals_that_are_dropped_or_overflow_are_no_good_keeping():
    kept = {**GOOD, "residual_zero_ratio": 0.0, "residual_fill_ratio": 0.5, "lost_visible_ratio": 0.6}
    assert judged(kept).health == "healthy"
    dropped = judged({**kept, "residual_zero_ratio": 1.0})
    assert dropped.health == "losing updates"
    assert "what they kept is dropped, and 60.0 % of the updates do not move the weights" in dropped.text
    resumed = judged({**kept, "residual_dropped_ratio": 0.98})
    assert resumed.health == "residuals are off"
    assert "98.0 % of the residuals were 0 again" in resumed.text
    assert judged({**kept, "residual_dropped_ratio": 0.02}).health == "healthy"
    for idle in (100.00000000000001, 120.0):
        counts = {"idle": idle, "elements": 100.0, "nonfinite": 0.0, "faithful": 1.0}
        assert judged({**GOOD, **counts, "residual_dropped_ratio": 0.0}).health == "healthy"
    full = judged({**kept, "residual_fill_ratio": 510.0})
    assert full.health == "residuals are off"
    assert "510 half gaps" in full.text


def test_residuals_of_rows_that_are_never_used_are_0():
    unused = {"residual_zero_ratio": 0.97, "lost_visible_ratio": 0.6, "idle": 97.0, "elements": 100.0}
    assert judged({**GOOD, **unused}).health == "healthy"


def test_a_window_speaks_where_more_than_the_visible_weight_is_kept():
    one_step = {**GOOD, "edq_window_ratio/8": 0.99, "edq_window_ratio/64": 0.7}
    seen = wire.Fingerprint(residual="compensation", stochastic_rounding=False)
    found = judged(one_step, fingerprint=seen)
    assert found.health == "losing updates"
    assert "over 64 steps is 0.700" in found.text
    short = {**one_step, "edq_window_ratio/64": None, "edq_window_ratio/8": 0.5}
    assert "over 8 steps" in judged(short, fingerprint=seen).text
    # Plain rounding loses in each step what it loses: the last window of a schedule to 0 is next to nothing.
    assert judged(one_step).health == "healthy"
    assert longest_window(one_step, "lost_window_ratio") is None
    assert longest_window({"edq_window_ratio/x": 1.0}, "edq_window_ratio") is None


def test_weights_kept_in_a_way_that_is_not_understood_are_neither_healthy_nor_sick():
    seen = wire.Fingerprint(
        unexplained="the state master_param holds something of the weights, and is not understood"
    )
    for model in (GOOD, {**GOOD, "edq_ratio": 0.1}, {**GOOD, "nonfinite_params": 3.0}):
        found = judged(model, fingerprint=seen)
        assert found.health == "unknown"
        assert found.text.startswith("The state master_param holds")


def test_what_was_not_measured_is_said_and_keeps_a_run_from_a_good_word():
    """Adafactor on a tied embedding: 0.3 % of the elements have a u, and 99 % of those were lost."""
    few = {"embedding": {"elements": 9970.0}, "norm": layer(elements=30.0)}
    healthy_part = judged({**GOOD, "measured_ratio": 0.003}, few)
    assert healthy_part.health == "unknown"
    assert "known of 0.3 % of the elements only" in healthy_part.text
    lost = {"lost_update_ratio": 0.99, "update_error_ratio": 1.0, "edq_ratio": 0.02}
    sick_part = judged({**GOOD, **lost}, {**few, "norm": layer(elements=30.0, **lost)})
    assert sick_part.health == "unknown"
    assert "; 99.0 % of the updates are rounded away" in sick_part.headline
    assert sick_part.text.endswith("Measured: steps 1 to 100, 0.3 % of the elements.")


def test_a_copy_that_hardly_moves_is_said_and_decides_nothing():
    """fp32 at lr 3e-6: "EDQ 1.0000, 0.0 % lost" while 4.9 % of the bf16 copy moved in a step."""
    found = judged({**GOOD, "cast_changed_ratio/bf16": 0.049, "cast_changed_ratio/fp16": 0.9})
    assert found.health == "healthy"
    assert "A step changes 4.9 % of a bf16 copy of the weights. Training is unaffected" in found.text
    assert "fp16" not in found.text


def test_codes_speak_for_copies_whose_scales_move_every_number_and_routes_are_set_against_a_step():
    copies = {"cast_changed_ratio/fp8_block128": 0.98, "cast_recoded_ratio/fp8_block128": 0.0026}
    route = {"cast_route_ratio/fp8_block128/bf16>fp8_block128": 0.0221}
    found = judged({**GOOD, **copies, **route})
    assert found.health == "healthy"
    assert "A step changes 0.3 % of a fp8_block128 copy of the weights" in found.text
    told = (
        "routes fp8_block128 and bf16>fp8_block128 differ in 2.2 % of their codes, 8.5 times what a step changes."
    )
    assert told in found.text


def test_each_reason_for_no_number_has_its_own_sentence():
    elements = {"elements": 10.0, "nonfinite": 0.0}
    named: dict = {"fc.weight": {}}
    said = [
        judge(Evidence({})),
        judged({"elements": None}, named),
        judged({"elements": None}, {"group0.0": {}}),
        judged({**elements, "nonfinite_params": 10.0}, named),
        judged({**elements, "measured_ratio": 1.0, "idle": 10.0}, named),
        judged({**elements, "measured_ratio": None}, named),
    ]
    starts = [
        "No step",
        "No watched layer had a gradient",
        "None of the optimizer's tensors",
        "10 weights are NaN",
        "Every intended update was 0",
        "Only what changed is known",
    ]
    for found, start in zip(said, starts, strict=True):
        assert found.text.startswith(start)
        assert found.health == ("not finite" if "NaN" in start else "unknown")
