"""A repeat with other seeds: the same trials with others, and what its numbers say of the first."""

from dataclasses import replace

import click
import pytest
from click.testing import CliRunner
from collage_studies.catalogue import STUDY_NAMES, study_named
from collage_studies.command import study
from collage_studies.repeats import Repeat, record_file, repeat_section, repeats_of, reseeded, seed_of
from collage_studies.study import MarkdownTable, Page, Study
from collage_studies.trial_records import RecordFile

from tests.studies.records import FP32, PLAIN, record_of, training

LOSSES = {1: {FP32: 2.0, PLAIN: 2.11}, 2: {FP32: 2.5, PLAIN: 2.60}, 3: {FP32: 1.7, PLAIN: 1.79}}
"""By seed: losses that differ far more between seeds than between plans."""


def trials(quick=False):
    return [training(plan, seed).trial for seed in LOSSES for plan in (FP32, PLAIN)]


def study_of(records):
    return Study(
        name="losses",
        title="",
        short="",
        question="",
        method="",
        trials=trials,
        run=lambda trial, reporting: records[0],
        page=lambda records: Page(f"{len(records)} records.", []),
        repeat_metrics=("validation_loss",),
    )


def records_of(wanted, extra=0.0):
    return [
        record_of(trial, values={"validation_loss": LOSSES[(trial.recipe.seed - 1) % 100 + 1][trial.plan] + more})
        for trial in wanted
        for more in [extra * (trial.plan == PLAIN)]
    ]


def test_only_seeds_and_names_are_others():
    for old, new in zip(trials(), reseeded(trials(), 101), strict=True):
        assert old.recipe
        assert new.recipe == replace(old.recipe, seed=old.recipe.seed + 100)
        assert new.name == old.name.replace(f"seed {seed_of(old)}", f"seed {seed_of(new)}")
        assert new.plan == old.plan


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_every_study_can_be_repeated_or_says_why_not(name):
    old = study_named(name).trials(False)
    if any(seed_of(trial) is None for trial in old):
        with pytest.raises(ValueError, match="without a seed"):
            reseeded(old, 1001)
        return
    new = reseeded(old, 1001)
    assert {seed_of(trial) for trial in new}.isdisjoint({seed_of(trial) for trial in old})
    assert len({trial.name for trial in [*old, *new]}) == 2 * len(old)


def test_seeds_of_its_own_are_refused():
    with pytest.raises(ValueError, match="overlap its own, 1 to 3"):
        reseeded(trials(), 2)


def test_the_command_says_why_a_study_cannot_be_repeated(tmp_path):
    done = CliRunner().invoke(study, ["expansions", "--first-seed", "9", "--output", str(tmp_path)])
    assert done.exit_code == click.UsageError.exit_code
    assert "expansions cannot be repeated with --first-seed 9: it has trials without a seed" in done.output


def test_a_repeat_is_found_when_it_is_whole(tmp_path):
    wanted = records_of(reseeded(trials(), 101))
    file = record_file("losses", tmp_path, 101)
    for record in wanted[:-1]:
        file.add(record)
    assert repeats_of(study_of(wanted), trials(), tmp_path) == []
    file.add(wanted[-1])
    (found,) = repeats_of(study_of(wanted), trials(), tmp_path)
    assert (found.file, list(found.records)) == (file.path, wanted)
    assert RecordFile(tmp_path / "data" / "losses.jsonl").of(trials()) == []


@pytest.mark.parametrize(("extra", "agrees"), [(0.002, True), (0.2, False)])
def test_gaps_to_fp32_are_compared_not_losses(tmp_path, extra, agrees):
    first, again = records_of(trials()), records_of(reseeded(trials(), 101), extra=extra)
    said, *more = repeat_section(study_of(first), first, Repeat(tmp_path / "losses-seed-101.jsonl", again))
    assert isinstance(said, str)
    assert "seeds 101, 102 and 103" in said
    verdict = "agrees: 1 of 1" if agrees else "does not agree: 0 of 1"
    assert f"The repeat {verdict} means differ from the first run's by no more than" in said
    assert more[0] == "**The repeat's answer.** 6 records."
    outside = [[row[:2] for row in table.rows] for table in more if isinstance(table, MarkdownTable)]
    assert outside == ([] if agrees else [[["plain bfloat16", "gap of validation_loss to fp32"]]])
