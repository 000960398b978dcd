"""Which strategy is recommended, and what is said for and against each."""

import msgspec
import numpy as np
import pytest

from collage_monitor import wire
from collage_monitor.diagnosis import advice_for
from collage_monitor.recommendation import recommendation, signed, worth
from collage_monitor.strategy_results import loss_name, results_by_strategy, run_results

BYTES = {"plain": 8.0, "light": 10.0, "plus": 12.0, "split-master": 12.0, "master-weights": 16.0}
STUCK = "exp_avg_sq is stuck"


def row(strategy, loss, *, dtype="bfloat16", health="healthy", short="healthy", lost=0.0, seed=None, step=100):
    """A run as the table of runs has it."""
    size = 16.0 if dtype == "float32" else BYTES[strategy]
    scalars = {"bytes_per_parameter": wire.LoggedScalar(step=1, value=size)}
    scalars |= {"validation_loss": wire.LoggedScalar(step=step, value=loss)}
    scalars |= {"tokens_per_second": wire.LoggedScalar(step=step, value=1000.0)}
    run_id = f"{strategy}-{dtype}-{seed}"
    adamw = wire.Trained(
        optimizer="AdamW",
        strategy=strategy,
        fitting="CollageAdamW",
        first_moments=1,
        second_moments=1,
        parameters={dtype: 100},
    )
    told = advice_for(adamw, "weights") if health == "losing updates" else None
    return wire.RunRow(
        run_id=run_id,
        project="p",
        name=run_id,
        group="g",
        tags=[],
        notes="",
        state="finished",
        strategy=strategy,
        observed_strategy=strategy,
        dtype=dtype,
        created_at=0.0,
        updated_at=0.0,
        last_step=step,
        scalars=scalars,
        overview=wire.Overview(
            run_id=run_id,
            health=health,
            short=short,
            numbers={"edq_ratio": 0.9, "lost_update_ratio": lost},
            advice=[told] if told else [],
        ),
        seed=seed,
        trained=[adamw],
    )


def test_sharded_weights_are_told_no_blocks():
    told = advice_for(msgspec.structs.replace(row("plain", 1.0).trained[0], sharded=True), "weights")
    assert told is not None
    assert [choice.strategy for choice in told.choices] == ["split-master"], "a scale cannot be cut as a shard is"


def compared(run, steps, values, name="validation_loss"):
    """The same run with the curve of its loss."""
    series = wire.Series(
        run_id=run.run_id,
        metric=name,
        layer=None,
        axis="step",
        first_steps=steps,
        steps=steps,
        positions=steps,
        values=values,
        minimum=values,
        maximum=values,
    )
    return wire.ComparedRun(
        run_id=run.run_id,
        name=run.name,
        strategy=run.strategy,
        dtype=run.dtype,
        state=run.state,
        last_step=run.last_step,
        reports=1,
        merged={},
        scalars=run.scalars,
        mean_scalars={"tokens_per_second": 1100.0},
        series=series,
    )


REFERENCE = row("plain", 2.42, dtype="float32")
DEMO = [
    REFERENCE,
    row("plain", 2.51, health="losing updates", short="loses 57 % of its updates"),
    row("light", 2.421, health="states are stuck", short=STUCK),
    row("plus", 2.419),
    row("master-weights", 2.42),
]


def results(rows, runs=()):
    return results_by_strategy(run_results(rows, runs))


def found(rows, runs=()):
    return recommendation(results(rows, runs))


def test_the_cheapest_that_nothing_speaks_against_is_recommended_and_each_has_its_reason():
    said = found(DEMO)
    assert said.chosen.strategy == "plus"
    assert said.text == (
        "Use Collage plus · bfloat16, fp32 master weights · bfloat16 or Plain · float32: all 3 keep their updates, "
        "Collage plus · bfloat16 in the fewest bytes (12 bytes a parameter). "
        "Loss −0.001 against Plain · float32, one run each: repeat with other seeds."
    )
    assert said.reasons == (
        "Plain · bfloat16: 8 bytes a parameter, loss +0.09 (+3.7 %), loses 57 % of its updates",
        "Collage light · bfloat16: 10 bytes a parameter, loss +0.001 (+0.04 %), exp_avg_sq is stuck",
        "Collage plus · bfloat16: 12 bytes a parameter, loss −0.001 (−0.04 %), healthy",
        "fp32 master weights · bfloat16: 16 bytes a parameter, loss 0 (0 %), healthy",
        "Plain · float32: 16 bytes a parameter, the reference, healthy",
        "Split fp32 master: not compared here; in 12 bytes a parameter the most exact on given gradients "
        "(docs/how-to/choose-a-strategy.md). Try optimizer = "
        'collage_agent.optim.CollageAdamW.from_optimizer(optimizer, strategy="split-master")',
    )


def seeds(strategy, *losses, **more):
    return [row(strategy, loss, seed=seed, **more) for seed, loss in enumerate(losses)]


def test_a_loss_speaks_against_a_healthy_strategy_only_if_its_interval_lies_beyond_what_counts():
    reference = seeds("plain", 2.42, 2.40, 2.44, dtype="float32")
    worse = found([*reference, *seeds("plus", 2.44, 2.42, 2.46), *seeds("master-weights", 2.421, 2.402, 2.439)])
    assert worse.chosen.strategy == "master-weights"
    assert "more than 0.5 % above the reference" in worse.reasons[0]
    assert "both keep their updates and the reference's loss" in worse.text
    # 1.3 % above on average, which may be chance: "Use Plain: the only one that keeps its updates" was said of it.
    chance = found([*reference, *seeds("master-weights", 2.40, 2.49, 2.46)])
    assert chance.brief == "Use fp32 master weights · bfloat16 or Plain · float32: both keep their updates."
    assert chance.chosen.strategy == "master-weights"
    assert found([REFERENCE, row("plus", 2.9)]).chosen.strategy == "plus", "of one run each chance is not known"


def test_what_counts_is_a_share_of_the_size_of_a_loss_below_0():
    negative = [*seeds("plain", -2.42, -2.40, -2.44, dtype="float32"), *seeds("plus", -2.419, -2.399, -2.439)]
    assert found(negative).chosen.strategy == "plus"


def test_no_strategy_is_said_to_lose_while_another_is_not_known():
    losing = row("plain", 2.51, health="losing updates", short="loses 57 % of its updates")
    assert found([losing]).brief
    assert not found([losing, row("plus", 2.42, health="unknown", short="no step")]).brief


def test_a_loss_that_is_noticeably_lower_speaks_for_a_strategy():
    said = found([REFERENCE, row("plus", 2.42 * 0.9), row("master-weights", 2.42)])
    assert said.chosen.strategy == "plus"
    assert "above the reference" not in "".join(said.reasons)


def test_one_unhealthy_seed_speaks_against_a_strategy():
    seeds = [
        row("plus", 2.42, seed=1),
        row("plus", 2.42, seed=2, health="losing updates", short="EDQ is low", lost=0.3),
    ]
    said = found([REFERENCE, *seeds])
    assert said.chosen.is_reference
    assert "1 of 2 runs: losing updates, 30.0 % on average" in said.reasons[0]
    assert "the only one that keeps its updates" in said.text


def test_seeds_are_paired_and_a_wide_interval_asks_for_more():
    rows = [row("plain", loss, dtype="float32", seed=seed) for seed, loss in enumerate((2.40, 2.44, 2.42))]
    rows += [row("plus", loss, seed=seed) for seed, loss in enumerate((2.41, 2.44, 2.44))]
    plus, _ = results(rows)
    assert (plus.gap.count, plus.gap.paired) == (3, True)
    assert plus.gap.value == pytest.approx(0.01)
    said = found(rows)
    assert "(95 %: −0.0148 to +0.0348, 3 seeds)" in said.text
    assert "more seeds would tell if it is worse" in said.text


def test_runs_that_have_come_unequally_far_are_compared_where_all_have_been():
    late = row("plus", 2.2, step=300)
    rows = [REFERENCE, late]
    assert results(rows)[0].gap is None, "two last losses at two steps do not compare"
    runs = [compared(REFERENCE, [50, 100], [2.6, 2.42]), compared(late, [50, 100, 300], [2.61, 2.43, 2.2])]
    plus, reference = results(rows, runs)
    assert plus.gap.value == pytest.approx(0.01)
    assert plus.runs[0].loss_step == reference.runs[0].loss_step == 100
    assert plus.tokens_per_second.value == 1000.0, "the newest logged, as the table of runs shows"


def test_validation_losses_are_compared_where_every_run_logged_one():
    """A run that ended at step 91 was better by what it learned after step 72, where the others logged last."""
    late = row("plus", 2.30, step=91)
    ours, theirs = (
        compared(late, [48, 72, 91], [2.6, 2.43, 2.30]),
        compared(REFERENCE, [48, 72, 96], [2.6, 2.42, 2.2]),
    )
    plus, reference = results([REFERENCE, late], [theirs, ours])
    assert plus.gap.value == pytest.approx(0.01)
    assert plus.runs[0].loss_step == reference.runs[0].loss_step == 72
    apart = compared(late, [50, 91], [2.6, 2.30])
    plus, reference = results([REFERENCE, late], [theirs, apart])
    assert (plus.runs[0].loss_step, reference.runs[0].loss_step) == (91, 72), "each says where its own was logged"


def test_a_training_loss_is_the_mean_of_the_last_tenth_of_its_steps():
    noisy = msgspec.structs.replace(
        REFERENCE, scalars={"loss": wire.LoggedScalar(step=100, value=9.0)}, run_id="noisy"
    )
    assert loss_name([REFERENCE, noisy]) == "loss"
    steps = list(range(10, 101, 10))
    [result] = run_results([noisy], [compared(noisy, steps, [5.0] * 8 + [2.0, 3.0], "loss")])
    assert result.loss == 2.5
    [broken] = run_results([noisy], [compared(noisy, steps, [5.0] * 9 + ["NaN"], "loss")])
    assert broken.loss is None


def configured(run, suffix="", **config):
    """The run with these entries of its configuration, in which it differs from others."""
    told = "/".join(f"{name}={value}" for name, value in config.items())
    return msgspec.structs.replace(
        run, run_id=run.run_id + suffix, name=run.run_id + suffix, config=config, configuration=told
    )


def test_runs_that_differ_in_more_than_their_seed_are_rows_of_their_own_and_nothing_is_recommended_across_them():
    slow = [configured(row("plus", loss, seed=seed), lr=3e-4) for seed, loss in enumerate((2.40, 2.42))]
    fast = [configured(row("plus", loss, seed=seed), "f", lr=1e-3) for seed, loss in enumerate((2.50, 2.52))]
    reference = configured(REFERENCE, lr=3e-4)
    rows = {result.title: result for result in results([*slow, *fast, reference])}
    assert list(rows) == [
        "Collage plus · bfloat16 · lr 0.0003",
        "Collage plus · bfloat16 · lr 0.001",
        "Plain · float32",
    ]
    assert rows["Collage plus · bfloat16 · lr 0.0003"].gap.value == pytest.approx(-0.01)
    assert rows["Collage plus · bfloat16 · lr 0.001"].gap is None, "its reference has another learning rate"
    said = found([*slow, *fast, reference])
    assert said.chosen is None
    assert said.text.startswith(
        "These runs differ in lr (0.0003 and 0.001). No strategy is recommended across them"
    )
    assert found([*slow, *fast]).text == (
        "These runs differ in lr (0.0003 and 0.001). The loss with lr 0.0003 is lower by 0.1 (95 %: +0.1 to +0.1)."
    )
    assert found([*slow, *fast]).brief == "The loss with lr 0.0003 is lower by 0.1."
    one_each = found([slow[0], fast[0]])
    assert one_each.brief == "The loss with lr 0.0003 is lower by 0.1; it may be chance."
    unjudged = [configured(row("plus", 2.4, health="unknown"), own, lr=rate) for own, rate in (("", 1), ("f", 2))]
    assert found(unjudged).brief == "Their losses are equal. 0 of 2 runs are known to keep updates."
    across = [reference, configured(row("plus", 2.42), lr=1e-3)]
    assert found(across).chosen is None, "a strategy is not compared at another learning rate"
    projects = [msgspec.structs.replace(entry, project=f"p{place}") for place, entry in enumerate(DEMO)]
    assert "These runs differ in project (5 values)." in found(projects).text


def test_what_names_the_strategy_may_differ_and_people_may_treat_runs_as_one():
    named = [configured(row("plus", 2.42), optimizer="collage.CollageAdamW", precision="bf16-true", lr=1e-3)]
    named += [configured(REFERENCE, optimizer="torch.optim.AdamW", precision="32", lr=1e-3)]
    assert found(named).chosen.strategy == "plus"
    seeds = [configured(row("plus", 2.4 + seed, seed=seed), str(seed), lr=seed) for seed in range(2)]
    treated = [msgspec.structs.replace(run, configuration=seeds[0].configuration, is_treated=True) for run in seeds]
    assert (len(results(seeds)), len(results(treated))) == (2, 1)
    assert found(treated).chosen.loss.count == 2


def test_a_resumed_or_sick_run_does_not_move_its_strategys_loss_and_is_named():
    well = [row("plus", 2.42, seed=seed) for seed in (1, 2)]
    sick = row("plus", 9.0, seed=3, health="residuals are off", short="residuals were dropped")
    resumed = msgspec.structs.replace(row("plus", 5.0, seed=4), resumed_at=[170])
    [plus, _] = results([*well, sick, resumed, REFERENCE])
    assert (plus.loss.value, plus.loss.count, plus.gap.count) == (2.42, 2, 1)
    assert [run.seed for run in plus.set_apart] == [3, 4]
    said = found([*well, sick, resumed, REFERENCE])
    assert (
        "not counted: plus-bfloat16-3: residuals are off; plus-bfloat16-4: resumed at step 170" in said.reasons[0]
    )
    assert said.chosen.is_reference, "one of its runs is not well, whether it counts or not"
    plain = [row("plain", 2.5 + seed, seed=seed, health="losing updates", short="loses") for seed in range(2)]
    assert results(plain)[0].loss.value == 3.0, "what befalls all is the strategy's own"


def test_nothing_is_recommended_that_is_not_known_to_be_well():
    unknown = [msgspec.structs.replace(entry, overview=None) for entry in DEMO]
    assert found(unknown).text == "No strategy can be named yet: no run is known to keep its updates."
    losing = found([DEMO[1]])
    assert losing.chosen is None
    assert losing.text.endswith(
        '"split-master") (12 bytes a parameter) or "coupled-8" (8), before the scheduler is built.'
    )
    assert found([]).text == "No run to compare yet."


def test_without_a_reference_the_loss_is_said_to_be_unknown():
    said = found([row("plus", 2.42)])
    assert said.text.startswith(
        "Collage plus · bfloat16 keeps its updates (12 bytes a parameter); nothing is compared with it."
    )
    assert "What it costs in loss is not known" in said.text
    assert found([row("split-master", 2.42)]).reasons[1:] == (), "the most exact one is already there"


def test_differences_have_a_sign_and_a_true_minus():
    assert [signed(value) for value in (0.09312, -0.002, 0.0)] == ["+0.0931", "−0.002", "0"]


def test_the_answer_has_fifteen_words_at_most():
    said = found(DEMO)
    assert said.brief == "Use Collage plus · bfloat16: all 3 keep their updates (12 bytes a parameter)."
    only = found([REFERENCE, row("plain", 2.51, health="losing updates", short="loses 57 % of its updates")])
    none = found([row("plain", 2.51, health="losing updates", short="loses 57 % of its updates")])
    for answer in (said, only, none):
        assert 0 < len(answer.brief.split()) <= 15


def pair(losses, others):
    rows = [row("plain", loss, seed=seed) for seed, loss in enumerate(others)]
    rows += [row("plus", loss, seed=seed) for seed, loss in enumerate(losses)]
    one, other = (next(r for r in results(rows) if r.strategy == name) for name in ("plus", "plain"))
    assert worth(one, other) == worth(other, one), "whichever comes first"
    return worth(one, other)


def test_two_strategies_are_held_against_each_other_with_how_sure_that_is():
    differences = np.array([0.010, 0.012, 0.011])
    half = 4.302652729911275 * np.std(differences, ddof=1) / np.sqrt(3)
    low, high = (f"{differences.mean() + side * half:.3g}" for side in (-1, 1))
    others = np.array([2.50, 2.60, 2.40])
    assert pair(others - differences, others) == (
        f"Collage plus · bfloat16's loss is 0.011 lower than Plain · bfloat16's for 4 bytes more "
        f"(95 %: {low} to {high}, 3 pairs)."
    )
    assert "'s loss is 0.011 higher than Plain · bfloat16's for 4 bytes more" in pair(others + differences, others)
    assert "'s loss equals Plain · bfloat16's for 4 bytes more" in pair(others, others)
    assert ", which may be chance (95 %: −" in pair(others + np.array([0.01, -0.01, 0.002]), others)
    assert pair([2.4], [2.5]) == (
        "Collage plus · bfloat16's loss is 0.1 lower than Plain · bfloat16's for 4 bytes more. "
        "One run each: repeat with other seeds."
    )
    sick = [row("plain", 2.5, seed=1, health="losing updates"), row("plus", 2.4, seed=1)]
    one, other = results(sick)
    assert worth(one, other).endswith(" Plain · bfloat16: losing updates.")
    both = results([sick[0], row("plus", 2.4, seed=1, health="states are stuck")])
    assert worth(*both).endswith(": losing updates. Take neither.")


def test_two_strategies_at_two_rates_are_not_held_against_each_other():
    one, other = results([configured(row("plus", 2.4), lr=1e-3), configured(row("plain", 2.5), lr=3e-4)])
    assert worth(one, other) == (
        "These runs differ in lr (0.001 and 0.0003). Their losses say nothing of the strategies."
    )


def test_the_figure_of_a_group_is_the_groups():
    """ "5 of 5 runs: loses 63.8 % of its updates" was one run's figure; the five lost 66.2 % on average."""
    shares = (0.638, 0.65, 0.693, 0.662, 0.668)
    runs = [
        row("plain", 2.5, seed=seed, health="losing updates", short=f"loses {lost:.1%}", lost=lost)
        for seed, lost in enumerate(shares)
    ]
    assert "5 of 5 runs: losing updates, 66.2 % on average" in found([REFERENCE, *runs]).reasons[0]
