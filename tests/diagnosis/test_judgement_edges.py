"""Edges of the judgement's rules: bounds, intervals, what is unknown, one operand of several, one side alone."""

import msgspec
import numpy as np
import pytest

from collage_monitor import wire
from collage_monitor.diagnosis import (
    EDQ_TOLERANCE,
    STATE_TOLERANCE,
    SilentRanks,
    advice_for,
    case,
    percent,
    residuals,
    states,
    updates,
)
from tests.diagnosis.test_judgement import FIRST, GOOD, MOMENTLESS, STATE, STILL, judged, layer, seen

LOSING = {**GOOD, "lost_update_ratio": 0.67, "update_error_ratio": 0.8}
ADAMW = wire.Trained(optimizer="AdamW", fitting="CollageAdamW", parameters={"bfloat16": 8}, strategy="plain")
ADAMW = msgspec.structs.replace(ADAMW, betas=[0.9, 0.95], first_moments=1, second_moments=1)


@pytest.mark.parametrize(
    ("key", "bound", "beyond", "health", "watch"),
    [
        ("edq_ratio", 1 - EDQ_TOLERANCE, -1, "losing updates", {}),
        ("edq_ratio", 1 + EDQ_TOLERANCE, 1, "steps are off", {}),
        (STATE, 1 - STATE_TOLERANCE, -1, "states are stuck", {}),
        (STATE, 1 + STATE_TOLERANCE, 1, "steps are off", {}),
        ("edq_oracle_ratio", 1 - states.ORACLE_TOLERANCE, -1, "steps are off", {}),
        ("edq_oracle_ratio", 1 + states.ORACLE_TOLERANCE, 1, "steps are off", {}),
        ("lost_update_ratio", updates.LOST.threshold, 1, "losing updates", {}),
        ("decay_ratio", states.DECAY.threshold, -1, "decay is lost", seen("foreach")),
        ("residual_fill_ratio", residuals.FILL.threshold, 1, "residuals are off", {}),
        ("residual_dropped_ratio", residuals.DROPPED.threshold, 1, "residuals are off", {}),
        ("nonfinite_params", 0.0, 1, "not finite", {}),
    ],
)
def test_a_number_at_its_bound_is_not_beyond_it(key, bound, beyond, health, watch):
    def found(value):
        others = {**GOOD, "update_error_ratio": float(key == "lost_update_ratio")}
        said = judged({**others, key: value}, **watch).findings
        return [(own.health, own.value) for own in said if (own.key, own.health) == (key, health)]

    further = float(np.nextafter(bound, beyond * np.inf))
    assert found(bound) == []
    assert found(further) == [(health, further)]


def test_a_layer_counts_from_its_share_and_its_residuals_from_their_number():
    """Its share of Σ u² must be beyond the tolerance; of few residuals all may have come to 0 by chance."""
    share = case.LAYER_TOLERANCE

    def losing(norm, edq=0.0):
        others = layer(norm=float(np.sqrt(1 - norm**2)))
        return judged(GOOD, {"a": layer(norm=norm, **{**STILL, "edq_ratio": edq}), "b": others}).health

    assert losing(float(np.sqrt(0.9 * share))) == "healthy"
    assert losing(float(np.sqrt(1.1 * share))) == "losing updates"
    # An overshoot by more than a half is an error of a half by itself: its layer "loses most", at an EDQ of 12.9.
    assert losing(0.5, 1.5) == "losing updates"
    assert losing(0.5, 1.6) == "healthy"

    def emptied(elements, dropped=1.0):
        layers = {"a": layer(elements=elements, residual_dropped_ratio=dropped), "b": layer(norm=1.0)}
        return judged(GOOD, layers).health

    assert emptied(residuals.FEWEST_RESIDUALS) == "residuals are off"
    assert emptied(residuals.FEWEST_RESIDUALS - 1) == "healthy"
    assert emptied(residuals.FEWEST_RESIDUALS, residuals.DROPPED.threshold) == "healthy"
    assert emptied(None) == "healthy"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.191, "19.1 %"),
        (0.003, "0.3 %"),
        (0.00034, "0.03 %"),
        (0.9999, "99.99 %"),
        (1e-5, "< 0.01 %"),
        (1 - 1e-5, "> 99.99 %"),
    ],
)
def test_a_share_is_told_with_as_many_digits_as_it_needs(share, text):
    assert percent(share) == text


def test_layers_that_are_worth_a_look_are_named_and_decide_nothing():
    layers = {"a": layer(), "b": layer(elements=None), "c": layer(elements=None)}
    found = judged(GOOD, layers)
    assert found.health == "healthy"
    assert "2 layers had no gradient in these steps (b, c)." in found.text
    assert "no gradient" not in judged(GOOD, {"a": layer(), "d": layer(elements=0.0)}).text, "another rank's shard"
    small = layer(elements=1.0, norm=1e-3, **{**STILL, "edq_ratio": 1.0})
    found = judged(GOOD, {"a": layer(), "logit_scale": small}, **seen())
    assert found.health == "healthy"
    assert "1 layer stands still (logit_scale): < 0.01 % of Σ u², too little to decide." in found.text
    found = judged(GOOD, {"a": layer(), "group0.1": layer(elements=None)})
    assert "1 of the optimizer's tensors is no parameter of the model (group0.1)." in found.text


@pytest.mark.parametrize(("strangers", "word"), [([], "healthy"), (["10 × 4"], "unknown")])
def test_a_weight_in_no_optimizer_is_told_and_in_doubt_if_the_optimizer_steps_one_in_no_module(strangers, word):
    coverage = wire.Coverage(watched=100, orphaned=10, orphans=["head.weight"], strangers=strangers)
    found = judged(GOOD, coverage=coverage)
    assert found.health == word
    assert "head.weight" in f"{found.text} {found.short}"


def test_optimizers_that_are_alike_get_one_line_of_advice():
    """Decays of averages are a list: no run with any could be judged."""
    other = msgspec.structs.replace(ADAMW, parameters={"bfloat16": 80}, float32_bytes=16.0)
    apart = msgspec.structs.replace(ADAMW, betas=[0.9, 0.999])
    assert len(judged(LOSING, **seen(), trained=[ADAMW, other, apart]).advice) == 2


@pytest.mark.parametrize(
    ("value", "low", "high", "of_edq", "of_oracle"),
    [
        (0.90, 0.80, 0.94, "losing updates", "steps are off"),
        (0.90, 0.80, 0.99, "unknown", "unknown"),
        (1.10, 1.06, 1.20, "steps are off", "steps are off"),
        (1.10, 1.01, 1.20, "unknown", "unknown"),
        (0.97, 0.96, 0.98, "healthy", "healthy"),
        (0.92, 0.91, 0.99, "unknown", "unknown"),
        (1.08, 1.01, 1.09, "unknown", "unknown"),
        (1.00, 0.93, 1.07, "healthy", "healthy"),
        (1.00, 0.88, 1.04, "unknown", "healthy"),
        (1.00, 0.97, 1.12, "unknown", "healthy"),
    ],
)
def test_a_number_counts_against_a_run_only_if_its_whole_interval_does(value, low, high, of_edq, of_oracle):
    def judged_by(key, **others):
        return judged({**others, key: value, f"{key}_low": low, f"{key}_high": high})

    assert judged_by("edq_ratio", **GOOD).health == of_edq
    alone = {key: number for key, number in GOOD.items() if key != STATE}
    assert judged_by("edq_oracle_ratio", **alone).health == of_oracle
    beside = judged_by("edq_oracle_ratio", **GOOD)
    assert beside.health == ("healthy" if of_oracle == "unknown" else of_oracle)
    assert ("the oracle agrees" in beside.text) == (of_oracle == "healthy")


@pytest.mark.parametrize(("held", "word"), [(None, "unknown"), (0.5, "unknown"), (1.0, "healthy")])
def test_what_silent_ranks_hold_is_in_doubt_unless_the_others_hold_it_too(held, word):
    found = judged(GOOD, silent=SilentRanks(reporting=2, expected=4, since=50, held=held))
    assert (found.health, found.measured) == (word, held)


@pytest.mark.parametrize(("elsewhere", "word"), [(0, "healthy"), (10, "healthy"), (30, "unknown")])
def test_what_unwatched_optimizers_step_is_not_measured(elsewhere, word):
    coverage = wire.Coverage(watched=100, elsewhere=elsewhere)
    found = judged(GOOD, coverage=coverage)
    assert found.health == word
    assert found.measured == pytest.approx(100 / (100 + elsewhere))


@pytest.mark.parametrize(("lost", "verb"), [(1.0, "2 layers stand still"), (0.6, "2 layers lose most")])
def test_layers_stand_still_if_all_of_them_do(lost, verb):
    layers = {"a": layer(**STILL), "b": layer(**{**STILL, "lost_update_ratio": lost}), "c": layer()}
    found = judged(GOOD, layers, **seen())
    assert verb in found.text
    assert "too little to decide" not in found.text
    assert "66.7 % of the elements" in found.headline
    unknown = {**layers, "c": layer(elements=None)}
    assert "of the elements" not in judged(GOOD, unknown, **seen()).headline


@pytest.mark.parametrize(("second", "advised"), [("float32", False), ("bfloat16", True), (None, True)])
def test_states_in_fp32_get_no_advice_if_all_that_are_stuck_are(second, advised):
    kept = {"exp_avg": "float32"} | ({} if second is None else {"exp_avg_sq": second})
    found = judged({**GOOD, FIRST: 0.1, STATE: 0.1}, **seen(states=kept), trained=[ADAMW])
    assert [True for entry in found.advice if "collage_agent.optim" in entry.choices[0].code] == [True] * advised
    assert bool(found.advice) == advised


def test_bytes_of_advice_are_means_over_the_weights():
    """Of several optimizers by their sizes; weights in 32 bits count as they stay."""

    def told(*trained):
        return judged(LOSING, **seen(), trained=trained).advice[0].choices[0].bytes_per_parameter

    def adam(**more):
        return msgspec.structs.replace(ADAMW, **more)

    sizes = ((8, 10.0), (24, 20.0))
    alone = [wire.Trained(optimizer="Own", parameters={"bfloat16": n}, float32_bytes=size) for n, size in sizes]
    assert told(*alone) == 17.5
    narrow = told(ADAMW)
    assert told(adam(parameters={"bfloat16": 8, "float32": 24})) == pytest.approx((narrow + 3 * 16) / 4)
    assert told(adam(sparse=4, float32_bytes=16.0)) == narrow
    assert told(adam(sparse=8, float32_bytes=17.0)) == 17.0


@pytest.mark.parametrize(
    ("door", "before"),
    [
        ("torch", "before the scheduler is built"),
        ("transformers", "before trainer.train()"),
        ("lightning", "in configure_optimizers, before the scheduler is built"),
        ("accelerate", "before accelerator.prepare, and before the scheduler is built"),
    ],
)
def test_where_the_line_stands_is_said_in_the_words_of_the_framework(door, before):
    """All were told "before the scheduler is built", also where no scheduler is built by hand."""
    told = advice_for(ADAMW, "weights", door=door)
    own = "trainer.optimizer" if door == "transformers" else "optimizer"
    assert told is not None
    assert told.text.endswith(f", {before}")
    for choice in told.choices:
        assert f"\n{own} = collage_agent.optim.CollageAdamW.from_optimizer({own}, strategy=" in choice.code
    sharded = advice_for(msgspec.structs.replace(ADAMW, sharded=True), "weights", door=door)
    assert sharded is not None
    assert "trainer" not in sharded.text + sharded.choices[0].code


@pytest.mark.parametrize(("size", "word"), [(0.0, ""), (50.0, ", of 66.7 % of the elements"), (300.0, None)])
def test_an_oracle_says_of_how_much_it_speaks(size, word):
    layers = {"followed": layer(edq_oracle_ratio=1.0), "other": layer(size)}
    text = judged({**GOOD, **MOMENTLESS}, layers).text
    assert ("the oracle agrees" in text) == (word is not None)
    assert word is None or f"the oracle agrees (1.000{word})" in text
    off = judged({**GOOD, **MOMENTLESS, "edq_oracle_ratio": 0.7}, layers).text
    assert f"is 0.700{', of 25.0 % of the elements' if word is None else word}" in off


FED_BACK = {"edq_ratio": 1.098, "edq_window_ratio/64": 0.902, "lost_update_ratio": 0.491, FIRST: 0.764}
FED_BACK |= {"update_error_ratio": 0.7, "lost_window_ratio/64": 0.017, "edq_oracle_ratio": 1.04}


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
    model = {**GOOD, **FED_BACK, "oracle_displacement_ratio": moved}
    watch = {"observed_strategy": "fp32-states", **seen(states={"exp_avg": dtype, "exp_avg_sq": "float32"})}
    found = judged(model, {"a": layer(lost_update_ratio=0.9)}, **watch)
    assert found.health == health
    shorts = [finding.short for finding in found.findings]
    if moved < 0.95 and dtype == "float32":
        assert found.headline == "Loses 8.0 % of its descent.", "and not 49.1 % of its updates, as single steps do"
        assert shorts == ["loses 8.0 % of its descent"]
    else:
        assert ("loses 49.1 % of its updates" in shorts) == (moved < 0.95)


NO_ELEMENTS: dict = {"elements": None}
ELEMENTS = {"elements": 10.0, "nonfinite": 0.0}
BOTH = [wire.Trained(optimizer="AdamW"), wire.Trained(optimizer="SGD", parameters={"bfloat16": 8})]


@pytest.mark.parametrize(
    ("start", "model", "layers", "watch"),
    [
        ("No step", {}, {}, {}),
        ("No watched layer had a gradient", NO_ELEMENTS, {"fc.weight": {}}, {}),
        ("No watched layer had a gradient", NO_ELEMENTS, {"fc.weight": {}}, {"trained": BOTH}),
        ("The optimizer steps no watched layer", NO_ELEMENTS, {"fc.weight": {}}, {"trained": BOTH[:1]}),
        ("None of the optimizer's tensors belongs to the model", NO_ELEMENTS, {"group0.0": {}}, {}),
        ("Only what changed is known, not what was intended", {"elements": 10.0}, {"group0.0": ELEMENTS}, {}),
        ("10 weights are NaN", {**ELEMENTS, "nonfinite_params": 10.0}, {}, {}),
        ("Every intended update was 0", {**ELEMENTS, "measured_ratio": 1.0, "idle": 10.0}, {}, {}),
        ("Only what changed is known", {**ELEMENTS, "measured_ratio": None}, {}, {}),
    ],
)
def test_each_reason_for_no_number_has_its_own_sentence(start, model, layers, watch):
    found = judged(model, layers, **watch)
    assert found.text.startswith(start)
    assert found.health == ("not finite" if "NaN" in start else "unknown")


def test_a_rate_of_0_after_a_cure_names_the_scheduler():
    model = {"elements": 8.0, "measured_ratio": 1.0, "grad_norm": 1.0, "idle": 8.0}
    assert "build it after from_optimizer()" in judged(model, optimizer="CollageAdamW").text
