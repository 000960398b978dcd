"""Which strategy is recommended, and what is said for and against each."""

import msgspec
import numpy as np
import pytest

from collage_monitor import wire
from collage_monitor.diagnosis import advice_for
from collage_monitor.recommendation import recommendation, signed, worth
from collage_monitor.strategy_results import loss_name, results_by_strategy, run_results
from tests.dashboard.figures.answers import series

BYTES = {"plain": 8.0, "light": 10.0, "plus": 12.0, "split-master": 12.0, "master-weights": 16.0}


def row(strategy, loss, *, dtype="bfloat16", health="healthy", short="healthy", lost=0.0, seed=None, step=100):
    """A run as the table of runs has it."""
    size = 16.0 if dtype == "float32" else BYTES[strategy]
    logged = {
        "bytes_per_parameter": (1, size),
        "validation_loss": (step, loss),
        "tokens_per_second": (step, 1000.0),
    }
    run_id = f"{strategy}-{dtype}-{seed}"
    moments: dict = {"first_moments": 1, "second_moments": 1, "parameters": {dtype: 100}}
    adamw = wire.Trained(optimizer="AdamW", strategy=strategy, fitting="CollageAdamW", **moments)
    told = advice_for(adamw, "weights") if health == "losing updates" else None
    numbers = {"edq_ratio": 0.9, "lost_update_ratio": lost}
    judged = {"health": health, "short": short, "numbers": numbers, "advice": [told] if told else []}
    stored: dict = {"project": "p", "group": "g", "tags": [], "notes": "", "created_at": 0.0, "updated_at": 0.0}
    return wire.RunRow(
        **stored,
        run_id=run_id,
        name=run_id,
        state="finished",
        strategy=strategy,
        observed_strategy=strategy,
        dtype=dtype,
        last_step=step,
        scalars={name: wire.LoggedScalar(step=at, value=value) for name, (at, value) in logged.items()},
        overview=wire.Overview(run_id=run_id, **judged),
        seed=seed,
        trained=[adamw],
    )


@pytest.mark.parametrize(
    ("lacking", "own", "told"),
    [
        # A scale of a block cannot be cut as a shard is.
        ("weights", {"sharded": True}, [("split-master", 12.0)]),
        ("states", {"parameters": {"float32": 100}}, [("plain", 16.0)]),
        ("weights", {"parameters": {"float32": 100}}, []),
    ],
)
def test_sharded_weights_are_told_no_blocks_and_fp32_weights_no_strategy(lacking, own, told):
    advice = advice_for(msgspec.structs.replace(row("plain", 1.0).trained[0], **own), lacking)
    assert advice is not None
    assert [(choice.strategy, choice.bytes_per_parameter) for choice in advice.choices] == told


def compared(run, steps, values, name="validation_loss"):
    """The same run with the curve of its loss."""
    own = {name: getattr(run, name) for name in ("run_id", "name", "strategy", "dtype", "state", "last_step")}
    told: dict = {"reports": 1, "merged": {}, "mean_scalars": {"tokens_per_second": 1100.0}}
    curve = series(values, name, steps=steps, run_id=run.run_id)
    return wire.ComparedRun(**own, **told, scalars=run.scalars, series=curve)


REFERENCE = row("plain", 2.42, dtype="float32")
LOSING = row("plain", 2.51, health="losing updates", short="loses 57 % of its updates")
STUCK = row("light", 2.421, health="states are stuck", short="exp_avg_sq is stuck")
DEMO = [REFERENCE, LOSING, STUCK, row("plus", 2.419), row("master-weights", 2.42)]


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


def test_a_loss_that_is_noticeably_lower_speaks_for_a_strategy_below_0_too():
    said = found([REFERENCE, row("plus", 2.42 * 0.9), row("master-weights", 2.42)])
    assert said.chosen.strategy == "plus"
    assert "above the reference" not in "".join(said.reasons)
    negative = [*seeds("plain", -2.42, -2.40, -2.44, dtype="float32"), *seeds("plus", -2.419, -2.399, -2.439)]
    assert found(negative).chosen.strategy == "plus"


def test_one_unhealthy_seed_speaks_against_a_strategy():
    unhealthy = row("plus", 2.42, seed=2, health="losing updates", short="EDQ is low", lost=0.3)
    said = found([REFERENCE, row("plus", 2.42, seed=1), unhealthy])
    assert said.chosen.is_reference
    assert "1 of 2 runs: losing updates, 30.0 % on average" in said.reasons[0]
    assert "the only one that keeps its updates" in said.text


def test_seeds_are_paired_and_a_wide_interval_asks_for_more():
    rows = [*seeds("plain", 2.40, 2.44, 2.42, dtype="float32"), *seeds("plus", 2.41, 2.44, 2.44)]
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
    ours = compared(late, [48, 72, 91], [2.6, 2.43, 2.30])
    theirs = compared(REFERENCE, [48, 72, 96], [2.6, 2.42, 2.2])
    plus, reference = results([REFERENCE, late], [theirs, ours])
    assert plus.gap.value == pytest.approx(0.01)
    assert plus.runs[0].loss_step == reference.runs[0].loss_step == 72
    apart = compared(late, [50, 91], [2.6, 2.30])
    plus, reference = results([REFERENCE, late], [theirs, apart])
    assert (plus.runs[0].loss_step, reference.runs[0].loss_step) == (91, 72), "each says where its own was logged"


def test_a_training_loss_is_the_mean_of_the_last_tenth_of_its_steps():
    logged = {"loss": wire.LoggedScalar(step=100, value=9.0)}
    noisy = msgspec.structs.replace(REFERENCE, scalars=logged, run_id="noisy")
    assert loss_name([REFERENCE, noisy]) == "loss"
    for last, loss in (([5.0, 2.0, 3.0], 2.5), ([5.0, 5.0, "NaN"], None)):
        [result] = run_results([noisy], [compared(noisy, list(range(10, 101, 10)), [5.0] * 7 + last, "loss")])
        assert result.loss == loss


def configured(run, suffix="", **config):
    """The run with these entries of its configuration, in which it differs from others."""
    told = "/".join(f"{name}={value}" for name, value in config.items())
    own = run.run_id + suffix
    return msgspec.structs.replace(run, run_id=own, name=own, config=config, configuration=told)


def test_runs_that_differ_in_more_than_their_seed_are_rows_of_their_own_and_nothing_is_recommended_across_them():
    slow = [configured(row("plus", loss, seed=seed), lr=3e-4) for seed, loss in enumerate((2.40, 2.42))]
    fast = [configured(row("plus", loss, seed=seed), "f", lr=1e-3) for seed, loss in enumerate((2.50, 2.52))]
    reference = configured(REFERENCE, lr=3e-4)
    rows = {result.title: result for result in results([*slow, *fast, reference])}
    titles = ["Collage plus · bfloat16 · lr 0.0003", "Collage plus · bfloat16 · lr 0.001", "Plain · float32"]
    assert list(rows) == titles
    assert rows[titles[0]].gap.value == pytest.approx(-0.01)
    assert rows[titles[1]].gap is None, "its reference has another learning rate"
    said = found([*slow, *fast, reference])
    assert said.chosen is None
    differ = "These runs differ in lr (0.0003 and 0.001). "
    assert said.text.startswith(f"{differ}No strategy is recommended across them")
    both = found([*slow, *fast])
    assert both.text == f"{differ}The loss with lr 0.0003 is lower by 0.1 (95 %: +0.1 to +0.1)."
    assert both.brief == "The loss with lr 0.0003 is lower by 0.1."
    one_each = found([slow[0], fast[0]])
    assert one_each.brief == "The loss with lr 0.0003 is lower by 0.1; it may be chance."
    unjudged = [configured(row("plus", 2.4, health="unknown"), own, lr=rate) for own, rate in (("", 1), ("f", 2))]
    assert found(unjudged).brief == "Their losses are equal. 0 of 2 runs are known to keep updates."
    across = [reference, configured(row("plus", 2.42), lr=1e-3)]
    assert found(across).chosen is None, "a strategy is not compared at another learning rate"
    projects = [msgspec.structs.replace(entry, project=f"p{place}") for place, entry in enumerate(DEMO)]
    assert "These runs differ in project (5 values)." in found(projects).text


def test_rows_are_told_apart_by_what_they_state_and_by_what_they_do_not():
    told = [configured(row("plus", 2.4)), *(configured(row("plus", 2.5), str(a), lr=3e-4, a=a) for a in (1, 2))]
    assert [result.apart for result in results(told)] == ["not stated", "lr 0.0003, a 1", "lr 0.0003, a 2"]


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
    apart = "plus-bfloat16-3: residuals are off; plus-bfloat16-4: resumed at step 170"
    assert f"not counted: {apart}" in said.reasons[0]
    assert said.chosen.is_reference, "one of its runs is not well, whether it counts or not"
    plain = [row("plain", 2.5 + seed, seed=seed, health="losing updates", short="loses") for seed in range(2)]
    assert results(plain)[0].loss.value == 3.0, "what befalls all is the strategy's own"


def test_nothing_is_recommended_or_said_to_lose_that_is_not_known_to():
    unknown = [msgspec.structs.replace(entry, overview=None) for entry in DEMO]
    assert found(unknown).text == "No strategy can be named yet: no run is known to keep its updates."
    losing = found([DEMO[1]])
    assert losing.chosen is None
    assert '"split-master") (12 bytes a parameter) or "coupled-8" (8), before' in losing.text
    assert found([]).text == "No run to compare yet."
    assert found([LOSING]).brief
    assert not found([LOSING, row("plus", 2.42, health="unknown", short="no step")]).brief


def test_without_a_reference_the_loss_is_said_to_be_unknown():
    said = found([row("plus", 2.42)])
    assert "keeps its updates (12 bytes a parameter); nothing is compared with it." in said.text
    assert "What it costs in loss is not known" in said.text
    assert found([row("split-master", 2.42)]).reasons[1:] == (), "the most exact one is already there"


def test_the_answer_has_fifteen_words_at_most_and_differences_a_true_minus():
    said = found(DEMO)
    assert said.brief == "Use Collage plus · bfloat16: all 3 keep their updates (12 bytes a parameter)."
    for answer in (said, found([REFERENCE, LOSING]), found([LOSING])):
        assert 0 < len(answer.brief.split()) <= 15
    assert [signed(value) for value in (0.09312, -0.002, 0.0)] == ["+0.0931", "−0.002", "0"]


def pair(losses, others):
    by_name = {result.strategy: result for result in results([*seeds("plain", *others), *seeds("plus", *losses)])}
    one, other = by_name["plus"], by_name["plain"]
    assert worth(one, other) == worth(other, one), "whichever comes first"
    return worth(one, other)


def test_two_strategies_are_held_against_each_other_with_how_sure_that_is():
    differences = np.array([0.010, 0.012, 0.011])
    half = 4.302652729911275 * np.std(differences, ddof=1) / np.sqrt(3)
    low, high = (f"{differences.mean() + side * half:.3g}" for side in (-1, 1))
    others = np.array([2.50, 2.60, 2.40])
    than = "than Plain · bfloat16's for 4 bytes more"
    interval = f"(95 %: {low} to {high}, 3 pairs)"
    lower = pair(others - differences, others)
    assert lower == f"Collage plus · bfloat16's loss is 0.011 lower {than} {interval}."
    assert f"'s loss is 0.011 higher {than}" in pair(others + differences, others)
    assert "'s loss equals Plain · bfloat16's for 4 bytes more" in pair(others, others)
    assert ", which may be chance (95 %: −" in pair(others + np.array([0.01, -0.01, 0.002]), others)
    assert f"'s loss is 0.1 lower {than}. One run each: repeat with other seeds." in pair([2.4], [2.5])
    sick = [row("plain", 2.5, seed=1, health="losing updates"), row("plus", 2.4, seed=1)]
    one, other = results(sick)
    assert worth(one, other).endswith(" Plain · bfloat16: losing updates.")
    both = results([sick[0], row("plus", 2.4, seed=1, health="states are stuck")])
    assert worth(*both).endswith(": losing updates. Take neither.")
    one, other = results([configured(row("plus", 2.4), lr=1e-3), configured(row("plain", 2.5), lr=3e-4)])
    said = worth(one, other)
    assert said == "These runs differ in lr (0.001 and 0.0003). Their losses say nothing of the strategies."


def test_the_figure_of_a_group_is_the_groups():
    """ "5 of 5 runs: loses 63.8 % of its updates" was one run's figure; the five lost 66.2 % on average."""
    shares = (0.638, 0.65, 0.693, 0.662, 0.668)
    losing = {"health": "losing updates", "short": "loses"}
    runs = [row("plain", 2.5, seed=seed, lost=lost, **losing) for seed, lost in enumerate(shares)]
    assert "5 of 5 runs: losing updates, 66.2 % on average" in found([REFERENCE, *runs]).reasons[0]
