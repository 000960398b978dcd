"""What a page says follows from its numbers: other numbers make other sentences."""

from dataclasses import replace

import pytest
from collage_studies.results import stays_below_from
from collage_studies.studies import (
    beta2,
    beyond_adamw,
    counterfactuals,
    diary,
    expansions,
    finetuning,
    layers,
    quality,
    strategies,
)
from collage_studies.study import MarkdownTable, Trial

from tests.studies.records import FP32, LIGHT, PLAIN, RECIPE, record_of, training


def test_onset_is_the_first_step_of_the_end_below_the_bound():
    assert stays_below_from([1, 2, 3, 4], [0.5, 1.0, 0.9, None], 0.95) == 3
    assert stays_below_from([1, 2], [0.9, None], 0.95) == 1
    assert stays_below_from([1, 2], [0.5, 0.95], 0.95) is None
    assert stays_below_from([1, 2], [None, None], 0.95) is None


def by_type(*norms):
    """Trainings whose LayerNorm layers have these EDQ, by seed."""
    return [
        training(PLAIN, seed, curves={f"edq_ratio@{name}": [value] * 3 for name, value in found.items()})
        for seed, norm in enumerate(norms)
        for found in [{"Embedding": 0.95, "Linear": 0.97, "LayerNorm": norm}]
    ]


def test_a_type_of_layer_loses_most_only_where_its_seeds_agree():
    agreeing, others = (layers.page(by_type(*norms)).answer for norms in ((0.5, 0.52, 0.48), (0.2, 0.94, 1.2)))
    assert "LayerNorm layers lose more than every other type, beyond chance." in agreeing
    assert "The seeds do not show which type loses most." in others


@pytest.mark.parametrize(
    ("forecast", "came", "said"),
    [
        ([1.0] * 3, [1.0, 0.5, 0.5], "either the prediction or the run begins to lose, not both"),
        ([1.0] * 3, [1.0] * 3, "neither the prediction nor the run begins to lose"),
        ([1.0, 1.0, 0.5], [1.0, 0.5, 0.5], "begins to lose 10 steps earlier than predicted (1 of 1 seeds)"),
    ],
)
def test_a_forecast_that_fails_is_not_said_to_be_exact(forecast, came, said):
    recipe = replace(RECIPE, schedule="cosine")
    foretold = training(FP32, recipe=recipe, curves={counterfactuals.FORECAST: forecast})
    assert (
        said in counterfactuals.page([foretold, training(PLAIN, recipe=recipe, curves={"edq_ratio": came})]).answer
    )


def test_forecasts_that_are_off_beyond_chance_are_named():
    records = [
        training(FP32, s, merged={counterfactuals.FORECAST: said}) for s, said in enumerate([0.9, 0.91, 0.89])
    ]
    records += [training(PLAIN, seed, merged={"edq_ratio": 0.8}) for seed in range(3)]
    verdict = counterfactuals.page(records).answer
    assert "by at most 0.100 (`plain` at 0.0002)" in verdict
    assert "In 1 of 1 cases the difference is beyond chance" in verdict


def swept(*losses):
    """Trainings with these losses by seed: of fp32 with β₂ = 0.9 and 0.99, and of plain bfloat16."""
    cases = [(plan, decay) for plan in (FP32, PLAIN) for decay in (0.9, 0.99)]
    return [
        training(plan, seed, recipe=replace(RECIPE, betas=(0.9, decay)), loss=loss)
        for (plan, decay), own in zip(cases, losses, strict=True)
        for seed, loss in enumerate(own)
    ]


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (([2.5, 2.6, 2.71], [2.01, 2.1, 2.2]), "the best one moves with precision"),
        (
            ([2.5, 2.6, 2.71], [2.4, 2.7, 2.6]),
            "is not shown to move with precision: under every strategy 0.9 is lowest",
        ),
        (
            ([2.5, 2.6, 2.7], [2.7, 2.8, 2.9]),
            "lowest at β₂ = 0.9 under every strategy. So the best β₂ is not shown to move",
        ),
    ],
)
def test_the_best_beta2_moves_only_where_it_is_told_apart(plain, said):
    assert said in beta2.page(swept([2.0, 2.1, 2.2], [2.5, 2.61, 2.69], *plain)).answer


def test_a_gap_that_nobody_would_see_is_no_verdict():
    """Of thirty gaps over three seeds one read +0.0001, and that was called worse beyond chance."""
    records = swept([2.0, 2.1, 2.2], [], [2.0001, 2.10011, 2.20009], [])
    assert "No strategy is shown to end worse than fp32" in beta2.page(records).answer


def test_strategies_are_told_by_the_settings_in_which_they_end_worse():
    found = [
        training(plan, seed, loss=2.0 + seed + extra * (1 + seed / 10))
        for plan, extra in ((FP32, 0.0), (PLAIN, 0.2), (LIGHT, 0.0))
        for seed in (1, 2, 3)
    ]
    page = strategies.page(found)
    assert page.answer.startswith(
        "These strategies are not shown to end worse than fp32 in one setting: `light`. "
        "`plain` ends worse than fp32 beyond chance in GPT, learning rate 0.0002 (+0.2400)."
    )


def test_what_rounding_up_adds_is_not_kept():
    kept = [f"often/{exponent}" for exponent in expansions.EXPONENTS]
    records = [
        record_of(Trial(name=name, settings={}), values={"rounded": 0.1, "once": end, **dict.fromkeys(kept, end)})
        for name, end in (("a", 1.0), ("b", 1.12))
    ]
    assert expansions.page(records).answer == (
        "0.1 is added to 200, 500 times. No format loses more than half. All of it arrives, within 1 %, in `a`. "
        "Rounding goes up, so more than all of it arrives, in `b` (112 %)."
    )


def test_a_number_that_stays_does_not_go_anywhere():
    kinds = [f"{name}/{how}" for name in ("edq_ratio", diary.DECREMENT) for how in ("left alone", "mended")]
    ends = {"loss/left alone": 2.0, "loss/mended": 2.5, "end": 30.0, "steps": 20.0}
    words = dict.fromkeys(("others", "sentence", "terminal", "convert"), "")
    records = [
        record_of(trial, values={**dict.fromkeys(kinds, 1.0), **ends}, words=words)
        for trial in diary.trials(False)
        if trial.plan != diary.REFERENCE
    ]
    verdict = diary.page(records).answer
    assert "EDQ stays at 1, the second moment's decay stays at 1" in verdict
    assert "the validation loss ends higher than if left alone (2.5000 against 2.0000)" in verdict


def test_settings_of_one_rate_are_told_apart_by_their_shape():
    records = [
        training(plan, seed, recipe=replace(RECIPE, width=width), loss=2.0)
        for width in (32, 64)
        for plan in (FP32, PLAIN)
        for seed in (1, 2)
    ]
    assert [entry.setting for entry in quality.configurations(records)] == [
        "GPT, rate 0.0002, β₂ 0.999, 30 steps of width 32",
        "GPT, rate 0.0002, β₂ 0.999, 30 steps of width 64",
    ]
    alone = quality.configurations(records[:4])
    assert [entry.setting for entry in alone] == ["GPT, rate 0.0002, β₂ 0.999"]


def of_lion(plan, seed, edq, **fields):
    return training(plan, seed, settings={"rule": "lion"}, curves={"edq_ratio": edq}, **fields)


def test_a_merged_edq_near_one_does_not_hide_the_end_of_the_run():
    merged = {"edq_ratio": 0.98, "lost_update_ratio": 0.4}
    curves = ((FP32, [1.0] * 3), (PLAIN, [1.0, 1.0, 0.1]))
    page = beyond_adamw.page([of_lion(plan, 1, edq, loss=2.0, merged=merged) for plan, edq in curves])
    assert "In the last third of the steps EDQ is 0.10 (`plain`)." in page.answer
    table = next(entry for entry in page.evidence if isinstance(entry, MarkdownTable))
    assert [dict(zip(table.head, row, strict=True))["EDQ, last third"] for row in table.rows] == ["1.00", "0.10"]


def test_the_best_rate_stands_beside_the_table_of_the_other():
    records = [
        of_lion(
            plan,
            seed,
            [1.0] * 3,
            recipe=replace(RECIPE, learning_rate=rate),
            loss=2.0 + apart * seed * (plan == FP32),
            merged={"edq_ratio": 0.98, "lost_update_ratio": lost},
        )
        for rate, apart in ((3e-4, 0.0), (1e-3, 0.2))
        for plan, lost in ((FP32, 0.0), (PLAIN, 0.34))
        for seed in (1, 2, 3)
    ]
    page = beyond_adamw.page(records)
    (told,) = (entry for entry in page.evidence if isinstance(entry, str) and not entry.startswith("#"))
    assert told.startswith(
        "At 0.001, the best rate in fp32 with seed 1, the seeds of fp32 alone end 0.40 nats apart."
    )
    assert "No difference from fp32 is shown for `plain`" in told
    assert told.endswith("The share of updates lost is 34.0% (`plain`).")
    assert page.answer == beyond_adamw.page(records[:6]).answer


def tuned(loss):
    way = finetuning.WAYS["all"]
    curves = {f"{metric}@{way.types[0]}": [0.5] * 3 for metric in finetuning.METRICS}
    curves |= {f"edq_ratio@{way.types[1]}": [1.0] * 3}
    return [
        training(
            plan,
            seed,
            settings={"rank": way.rank, "checkpoint_steps": 10},
            loss=2.0 + more + seed / 100 * (plan == LIGHT),
            values={"start_loss": 3.0},
            curves=curves,
        )
        for plan, more in ((FP32, 0.0), (LIGHT, loss))
        for seed in (1, 2, 3)
    ]


def test_fine_tuning_says_of_whom_a_worse_loss_is_shown():
    page = finetuning.page(tuned(0.25))
    assert "`light` (+0.2700) ends worse than fp32 beyond chance." in page.answer
    assert "lose updates under `light` at 0.0002 (EDQ" in page.answer
    assert "; a worse loss is shown for `light` at 0.0002." in page.answer
    assert "; a worse loss is shown for none of them." in finetuning.page(tuned(-0.01)).answer
