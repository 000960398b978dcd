"""Edges of the judgement's rules: intervals, what is unknown, one operand of several, one side alone."""

import msgspec
import pytest

from collage_monitor import wire
from collage_monitor.diagnosis import Evidence, SilentRanks, advice_for, judge, percent
from tests.diagnosis.test_judgement import GOOD, STATE, TO_NEAREST, judged, layer


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
    small = layer(elements=1.0, norm=1e-3, lost_update_ratio=1.0, update_error_ratio=1.0)
    found = judged(GOOD, {"a": layer(), "logit_scale": small}, fingerprint=TO_NEAREST)
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
    own = wire.Trained(
        optimizer="AdamW",
        fitting="CollageAdamW",
        strategy="plain",
        betas=[0.9, 0.95],
        first_moments=1,
        second_moments=1,
        parameters={"bfloat16": 8},
    )
    other = msgspec.structs.replace(own, parameters={"bfloat16": 80}, float32_bytes=16.0)
    apart = msgspec.structs.replace(own, betas=[0.9, 0.999])
    losing = {**GOOD, "lost_update_ratio": 0.67, "update_error_ratio": 0.8}
    assert len(judged(losing, fingerprint=TO_NEAREST, trained=[own, other, apart]).advice) == 2


def test_an_optimizer_that_steps_nothing_that_can_be_measured_is_not_said_to_lack_gradients():
    nothing, some = wire.Trained(optimizer="AdamW"), wire.Trained(optimizer="SGD", parameters={"bfloat16": 8})
    found = judged({"elements": None}, {"fc.weight": {}}, trained=[nothing])
    assert found.health == "unknown"
    assert found.text.startswith("The optimizer steps no watched layer that can be measured.")
    found = judged({"elements": None}, {"fc.weight": {}}, trained=[nothing, some])
    assert found.text.startswith("No watched layer had a gradient")


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
    info = wire.WatchInfo(optimizer="AdamW", observed_strategy="plain", dtype="bfloat16")
    silent = SilentRanks(reporting=2, expected=4, since=50, held=held)
    found = judge(Evidence(GOOD, {}, info, 1, 100, silent))
    assert (found.health, found.measured) == (word, held)


@pytest.mark.parametrize(
    ("dtype", "oracle", "word"),
    [("bfloat16", None, "unknown"), ("bfloat16", 1.0, "healthy"), ("float32", None, "healthy")],
)
def test_moments_kept_by_row_in_16_bits_need_an_oracle(dtype, oracle, word):
    seen = wire.Fingerprint(stochastic_rounding=False, factored={"row_var": dtype})
    assert judged({**GOOD, "edq_oracle_ratio": oracle}, fingerprint=seen).health == word


@pytest.mark.parametrize(
    ("strategy", "oracle", "word"),
    [("coupled-7", None, "unknown"), ("coupled-7", 1.0, "healthy"), ("split-24bit-8bit", 1.0, "steps are off")],
)
def test_coupled_rounding_overshoots_by_what_it_took_before_and_an_oracle_says_so(strategy, oracle, word):
    """CollageAdam at 1.1e-5: EDQ 1.069, against the oracle 1.007, a displacement of 1.016: "updates overshoot"."""
    numbers = {**GOOD, "edq_ratio": 1.069, "edq_noise_ratio": 0.004, "edq_oracle_ratio": oracle}
    assert judged(numbers, observed_strategy=strategy).health == word


@pytest.mark.parametrize(
    ("dtype", "share", "oracle", "word"),
    [
        ("float16", 0.02, None, "unknown"),
        ("float16", 0.005, None, "healthy"),
        ("float16", 0.02, 1.0, "healthy"),
        ("float32", 0.02, None, "healthy"),
    ],
)
def test_an_average_that_is_rounded_to_0_needs_an_oracle(dtype, share, oracle, word):
    seen = wire.Fingerprint(stochastic_rounding=False, states={"exp_avg_sq": dtype})
    found = judged({**GOOD, "state_zero_ratio/exp_avg_sq": share, "edq_oracle_ratio": oracle}, fingerprint=seen)
    assert found.health == word


@pytest.mark.parametrize(("edq", "bound"), [(0.5, 0.95), (1.5, 1.05)])
def test_an_average_that_moves_otherwise_is_held_to_the_bound_on_its_side(edq, bound):
    moved = {"average_edq_ratio": edq, "average_edq_noise_ratio": 0.0, "average_lost_ratio": 0.0}
    (found,) = [finding for finding in judged({**GOOD, **moved}).findings if finding.health == "average is off"]
    assert found.threshold == pytest.approx(bound)


@pytest.mark.parametrize(("now", "word"), [(1.0, "healthy"), (0.9, "unknown")])
def test_an_oracle_that_moves_away_confirms_nothing(now, word):
    info = wire.WatchInfo(optimizer="AdamW", observed_strategy="plain", dtype="bfloat16")
    model = {key: number for key, number in GOOD.items() if key != STATE} | {"edq_oracle_ratio": 1.0}
    assert judge(Evidence(model, {}, info, 1, 100, now={"edq_oracle_ratio": now})).health == word


@pytest.mark.parametrize(
    ("beside", "word"),
    [
        ({"edq_noise_ratio": 0.0}, "unknown"),
        ({"edq_noise_ratio": 0.03}, "healthy"),
        ({"edq_ratio_low": 0.79, "edq_ratio_high": 1.01}, "healthy"),
        ({"edq_ratio_low": 0.81, "edq_ratio_high": 0.99}, "unknown"),
    ],
)
def test_newest_steps_move_a_number_if_chance_does_not_explain_it(beside, word):
    """Neither three standard errors nor its interval."""
    info = wire.WatchInfo(optimizer="AdamW", observed_strategy="plain", dtype="bfloat16")
    now = {"edq_ratio": 0.9, "intended_norm": 1.0, **beside}
    assert judge(Evidence({**GOOD, "intended_norm": 1.0}, {}, info, 1, 100, now=now)).health == word


@pytest.mark.parametrize(("elsewhere", "word"), [(0, "healthy"), (10, "healthy"), (30, "unknown")])
def test_what_unwatched_optimizers_step_is_not_measured(elsewhere, word):
    coverage = wire.Coverage(watched=100, elsewhere=elsewhere)
    found = judged(GOOD, coverage=coverage)
    assert found.health == word
    assert found.measured == pytest.approx(100 / (100 + elsewhere))


@pytest.mark.parametrize(("elements", "words"), [(None, "belongs to the model"), (10.0, "what was intended")])
def test_tensors_without_a_name_are_another_models_if_none_had_a_gradient(elements, words):
    assert words in judged({"elements": elements}, {"group0.0": {"elements": elements}}).text


def test_what_is_not_finite_is_not_among_the_elements_that_are_idle():
    dropped = {**GOOD, "elements": 100.0, "nonfinite": 50.0, "residual_dropped_ratio": 0.3}
    assert judged({**dropped, "idle": 10.0}).health == "healthy" != judged({**dropped, "idle": 25.0}).health


@pytest.mark.parametrize(("error", "word"), [(0.06, "healthy"), (0.08, "losing updates")])
def test_errors_of_layers_are_put_together_as_squares(error, word):
    seen = wire.Fingerprint(layer_rounds_at_random={"a": False, "b": False})
    layers = {
        "a": layer(lost_update_ratio=0.3, update_error_ratio=error),
        "b": layer(lost_update_ratio=0.3, update_error_ratio=0.02),
    }
    assert judged({**GOOD, "lost_update_ratio": 0.3}, layers, fingerprint=seen).health == word


def test_what_is_not_finite_is_told_however_little_is_measured():
    assert judged({**GOOD, "measured_ratio": 0.2, "nonfinite_params": 3.0}).health == "not finite"


def test_residuals_are_0_before_the_one_step_that_was_measured():
    info = wire.WatchInfo(optimizer="AdamW", observed_strategy="kahan", dtype="bfloat16")
    model = {**GOOD, "residual_zero_ratio": 1.0, "lost_visible_ratio": 0.6}
    assert [judge(Evidence(model, {}, info, 5, last)).health for last in (5, 6)] == ["healthy", "losing updates"]


def test_a_window_speaks_where_single_steps_say_nothing():
    model = {**GOOD, "edq_ratio": None, "faithful": 1.0, "edq_window_ratio/32": 0.5}
    assert judged(model, fingerprint=TO_NEAREST).health == "losing updates"


@pytest.mark.parametrize(("lost", "verb"), [(1.0, "2 layers stand still"), (0.6, "2 layers lose most")])
def test_layers_stand_still_if_all_of_them_do(lost, verb):
    still = {"lost_update_ratio": 1.0, "update_error_ratio": 1.0, "edq_ratio": 0.0}
    layers = {"a": layer(**still), "b": layer(**{**still, "lost_update_ratio": lost}), "c": layer()}
    found = judged(GOOD, layers, fingerprint=TO_NEAREST)
    assert verb in found.text
    assert "too little to decide" not in found.text
    assert "66.7 % of the elements" in found.headline
    unknown = {**layers, "c": layer(elements=None)}
    assert "of the elements" not in judged(GOOD, unknown, fingerprint=TO_NEAREST).headline


@pytest.mark.parametrize(
    ("second", "told"), [("float32", []), ("bfloat16", ["collage_agent.optim"]), (None, ["collage_agent.optim"])]
)
def test_states_in_fp32_get_no_advice_if_all_that_are_stuck_are(second, told):
    own = wire.Trained(
        optimizer="AdamW",
        fitting="CollageAdamW",
        strategy="plain",
        betas=[0.9, 0.999],
        first_moments=1,
        second_moments=1,
        parameters={"bfloat16": 8},
    )
    kept = {"exp_avg": "float32"} | ({} if second is None else {"exp_avg_sq": second})
    stuck = {**GOOD, "state_decrement_ratio/exp_avg": 0.1, STATE: 0.1}
    found = judged(stuck, fingerprint=wire.Fingerprint(stochastic_rounding=False, states=kept), trained=[own])
    assert [name for entry in found.advice for name in told if name in entry.choices[0].code] == told
    assert bool(found.advice) == bool(told)


def test_bytes_of_advice_are_means_over_the_weights():
    """Of several optimizers by their sizes; weights in 32 bits count as they stay."""
    losing = {**GOOD, "lost_update_ratio": 0.67, "update_error_ratio": 0.8}

    def told(*trained):
        found = judged(losing, fingerprint=TO_NEAREST, trained=trained)
        return found.advice[0].choices[0].bytes_per_parameter

    def adam(**more):
        told_of = wire.Trained(optimizer="AdamW", fitting="CollageAdamW", strategy="plain", betas=[0.9, 0.999])
        return msgspec.structs.replace(told_of, first_moments=1, second_moments=1, **more)

    sizes = ((8, 10.0), (24, 20.0))
    alone = [wire.Trained(optimizer="Own", parameters={"bfloat16": n}, float32_bytes=size) for n, size in sizes]
    assert told(*alone) == 17.5
    narrow = told(adam(parameters={"bfloat16": 8}))
    assert told(adam(parameters={"bfloat16": 8, "float32": 24})) == pytest.approx((narrow + 3 * 16) / 4)
    assert told(adam(parameters={"bfloat16": 8}, sparse=4, float32_bytes=16.0)) == narrow
    assert told(adam(parameters={"bfloat16": 8}, sparse=8, float32_bytes=17.0)) == 17.0


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
    narrow = wire.Trained(optimizer="AdamW", fitting="CollageAdamW", parameters={"bfloat16": 8})
    told = advice_for(narrow, "weights", door=door)
    own = "trainer.optimizer" if door == "transformers" else "optimizer"
    assert told is not None
    assert told.text.endswith(f", {before}")
    for choice in told.choices:
        assert f"\n{own} = collage_agent.optim.CollageAdamW.from_optimizer({own}, strategy=" in choice.code
    sharded = advice_for(msgspec.structs.replace(narrow, sharded=True), "weights", door=door)
    assert sharded is not None
    assert "trainer" not in sharded.text + sharded.choices[0].code
