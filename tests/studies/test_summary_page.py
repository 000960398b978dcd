"""The studies' first page: written from records alone, says what is missing, and is not older than the records."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from collage_studies.catalogue import STUDY_NAMES, study_named
from collage_studies.command import study
from collage_studies.pages import write_page
from collage_studies.study import Page
from collage_studies.summary import CLAIMS, records_of, summary_text

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
WRITTEN = [name for name in STUDY_NAMES if (STUDIES / f"{name}.md").exists()]


@pytest.fixture(scope="module")
def found():
    return {name: records_of(name, STUDIES) for name in STUDY_NAMES}


@pytest.mark.slow
def test_the_page_is_what_its_records_say():
    text = (STUDIES / "README.md").read_text()
    assert text == summary_text(STUDIES), "python -m collage_studies all --pages-only --output docs/studies"


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_the_answer_of_a_study_is_what_its_records_say(name, found):
    study = study_named(name)
    others = [record for other in study.reads for record in found[other]]
    text = (STUDIES / f"{name}.md").read_text()
    assert f"**Answer.** {study.page([*found[name], *others]).answer}\n" in text


def test_a_page_says_if_its_trials_left_products_in_bfloat16(found, tmp_path):
    study, page = study_named("layers"), Page(answer="None.", evidence=())
    old = found["layers"]
    new = [msgspec.structs.replace(entry, versions={**entry.versions, "products": "in fp32"}) for entry in old]
    texts = [write_page(study, page, records, tmp_path).read_text() for records in (old, new)]
    assert ["left products of bfloat16 weights to torch" in text for text in texts] == [True, False]
    assert "products in fp32, torch" in texts[1]


def test_what_has_not_been_run_is_said_to_be_missing(tmp_path):
    text = summary_text(tmp_path)
    for name in STUDY_NAMES:
        assert f"- **{study_named(name).title}**: not run yet (`python -m collage_studies {name}`)." in text
    for claim in CLAIMS:
        assert f"| {claim.said} | not run yet: `python -m collage_studies {claim.study}` |" in text


def test_pages_alone_start_no_training(tmp_path):
    done = CliRunner().invoke(study, ["all", "--pages-only", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    for name in STUDY_NAMES:
        assert f"no page of {name}: it has not been run whole under {tmp_path}" in done.output


@pytest.mark.slow
def test_records_on_disk_make_a_page_without_running(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "expansions.jsonl").write_bytes((STUDIES / "data" / "expansions.jsonl").read_bytes())
    done = CliRunner().invoke(study, ["expansions", "--pages-only", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "expansions.md").read_text() == (STUDIES / "expansions.md").read_text()
    assert "[What an expansion keeps](expansions.md)" in (tmp_path / "README.md").read_text()


def test_a_repeat_is_summed_up_once_it_is_whole(tmp_path):
    (tmp_path / "data").mkdir()
    first, repeat = (STUDIES / "data" / f"layers{more}.jsonl" for more in ("", "-seed-1001"))
    (tmp_path / "data" / first.name).write_bytes(first.read_bytes())
    lines = repeat.read_bytes().splitlines(keepends=True)
    (tmp_path / "data" / repeat.name).write_bytes(b"".join(lines[:-1]))
    assert "Repeated with other seeds" not in summary_text(tmp_path)
    (tmp_path / "data" / repeat.name).write_bytes(b"".join(lines))
    assert "| Which layers lose first | 1001, 1002 and 1003 | yes | 8 of 9 | 2 |" in summary_text(tmp_path)
