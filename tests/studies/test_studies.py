"""Studies from the command line: trials stream to a server, records are kept, and the page is written from them."""

import json
from pathlib import Path

import msgspec
import pytest
from collage_studies.catalogue import STUDY_NAMES, study_named
from collage_studies.study import Record

from tests.forking import run_forked
from tests.ports import free_port

pytestmark = pytest.mark.slow

STUDY = ("collage_monitor.command", "collage_studies.command", "collage_studies.pages")


def run_quick(name, folder):
    """(The page, the records, what was said meanwhile) of a quick run into the folder."""
    ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
    done = run_forked(STUDY, "-m", "collage_studies", name, "--quick", "--json", "--output", folder, *ports)
    assert done.returncode == 0, done.stderr
    (page,) = map(Path, json.loads(done.stdout)["pages"])
    lines = (page.parent / "data" / f"{name}.jsonl").read_bytes().splitlines()
    return page, [msgspec.json.decode(line, type=Record) for line in lines], done.stderr


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
