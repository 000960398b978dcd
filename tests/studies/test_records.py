"""What is kept of finished trials: found again by what was run, whole after a kill, small."""

import click
import msgspec
import pytest
from collage_demo.recipe import Plan, Recipe
from collage_studies.study import Curve, Record, Trial
from collage_studies.trial_records import RecordFile, compact

TRIALS = [
    Trial(name="first", plan=Plan("plain", "bfloat16"), recipe=Recipe(steps=5), curves=("edq_ratio",)),
    Trial(name="second", settings={"rate": 0.1}),
]


def record_of(trial, **fields):
    return Record(trial=trial, versions={"torch": "2"}, cpu_seconds=1.5, run_id=f"run-{trial.name}", **fields)


@pytest.fixture
def file(tmp_path):
    return RecordFile(tmp_path / "data" / "study.jsonl")


def test_records_are_found_again_in_the_order_of_the_trials(file):
    for trial in reversed(TRIALS):
        file.add(record_of(trial))
    again = RecordFile(file.path)
    assert again.of(TRIALS) == [record_of(trial) for trial in TRIALS]
    assert again.missing(TRIALS) == []


def test_a_trial_with_other_settings_has_no_record(file):
    file.add(record_of(TRIALS[1]))
    other = msgspec.structs.replace(TRIALS[1], settings={"rate": 0.2})
    assert file.missing([*TRIALS, other]) == [TRIALS[0], other]
    assert file.of([other]) == []


def test_a_line_that_a_kill_cut_short_is_dropped_and_the_next_record_stands_whole(file):
    file.add(record_of(TRIALS[0]))
    with file.path.open("ab") as opened:
        opened.write(msgspec.json.encode(record_of(TRIALS[1]))[:-20])
    again = RecordFile(file.path)
    assert again.missing(TRIALS) == [TRIALS[1]]
    again.add(record_of(TRIALS[1]))
    assert RecordFile(file.path).of(TRIALS) == [record_of(trial) for trial in TRIALS]


def test_a_file_of_something_else_is_named(file):
    file.path.parent.mkdir()
    file.path.write_text("not a record\n")
    with pytest.raises(click.ClickException, match=r"study\.jsonl holds a line that is no record"):
        RecordFile(file.path)


def test_numbers_are_kept_to_six_digits_and_values_to_nine():
    record = record_of(TRIALS[0], values={"a": 1 / 3, "b": None}, curves={"e": Curve([1, 2], [2 / 3, None])})
    assert compact(record).values == {"a": 0.333333333, "b": None}
    assert compact(record).curves == {"e": Curve([1, 2], [0.666667, None])}


def test_a_record_counts_though_the_recipe_has_got_a_field_since(file):
    trial = Trial(name="t", plan=Plan("plain", "bfloat16"), recipe=Recipe())
    file.add(record_of(trial))
    said = msgspec.json.decode(file.path.read_bytes())
    del said["trial"]["recipe"]["windows"]
    file.path.write_bytes(msgspec.json.encode(said) + b"\n")
    assert not RecordFile(file.path).missing([trial])
    assert len(RecordFile(file.path).of([trial])) == 1
