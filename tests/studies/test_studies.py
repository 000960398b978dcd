"""Studies from the command line: trials stream to a server, records are kept, and the page is written from them.

What is kept of finished trials is found again by what was run, whole after a kill, and small.
"""

import json
from pathlib import Path

import click
import msgspec
import pytest
from collage_demo.recipe import Recipe
from collage_studies.catalogue import STUDY_NAMES, study_named
from collage_studies.study import Curve, Record, Trial
from collage_studies.trial_records import RecordFile, compact

from tests.forking import run_forked
from tests.ports import free_port
from tests.studies.records import PLAIN, record_of

STUDY = ("collage_monitor.command", "collage_studies.command", "collage_studies.pages")


def run_quick(name, folder):
    """(The page, the records, what was said meanwhile) of a quick run into the folder."""
    ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
    done = run_forked(STUDY, "-m", "collage_studies", name, "--quick", "--json", "--output", folder, *ports)
    assert done.returncode == 0, done.stderr
    (page,) = map(Path, json.loads(done.stdout)["pages"])
    lines = (page.parent / "data" / f"{name}.jsonl").read_bytes().splitlines()
    return page, [msgspec.json.decode(line, type=Record) for line in lines], done.stderr


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", STUDY_NAMES)
def test_a_study_runs_through_agent_server_and_page(name, tmp_path):
    page, records, _ = run_quick(name, tmp_path)
    trials = study_named(name).trials(True)
    assert sorted(record.trial.name for record in records) == sorted(trial.name for trial in trials)
    for record in records:
        assert record.values
        assert set(record.curves) >= set(record.trial.curves)
    text = page.read_text()
    assert "**Answer.**" in text
    pictures = [line.rpartition("(")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert pictures
    for picture in pictures:
        assert (page.parent / picture).read_bytes().startswith(b"\x89PNG")
    before = records, text
    page, records, said = run_quick(name, tmp_path)
    assert (records, page.read_text()) == before
    assert "dashboard" not in said, "nothing was missing, and yet a server was started"


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_trials_have_names_of_their_own_and_quick_ones_are_few(name):
    study = study_named(name)
    whole, quick = ([trial.name for trial in study.trials(kind)] for kind in (False, True))
    assert len(set(whole)) == len(whole)
    assert 0 < len(quick) <= 4 < len(whole)


TRIALS = [
    Trial(name="first", plan=PLAIN, recipe=Recipe(steps=5), curves=("edq_ratio",)),
    Trial(name="second", settings={"rate": 0.1}),
]


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
    trial = Trial(name="t", plan=PLAIN, recipe=Recipe())
    file.add(record_of(trial))
    said = msgspec.json.decode(file.path.read_bytes())
    del said["trial"]["recipe"]["windows"]
    file.path.write_bytes(msgspec.json.encode(said) + b"\n")
    assert not RecordFile(file.path).missing([trial])
    assert len(RecordFile(file.path).of([trial])) == 1
