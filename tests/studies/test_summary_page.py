"""The studies' first page: written from records alone, says what is missing, and is not older than the records.

Each study opens with two sentences for a tired reader, and its own numbers bear them out.
"""

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from collage_studies.catalogue import STUDY_NAMES, study_named
from collage_studies.command import study
from collage_studies.pages import write_page
from collage_studies.study import Page
from collage_studies.summary import CLAIMS, records_of, summary_text

from tools.prose import sentences

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


BEARS_OUT = {
    "expansions": [
        r"500 times\. More than half of it is lost in `bfloat16`,.* `float8_e4m3fn, pair`,.* `float8_e5m2, pair`",
        r"All of it arrives, within 1 %, in `bfloat16, pair`,",
    ],
    "accumulation": [
        r"At a rate of 0\.0003,[^.]* is off by more than 10 % under `plain` \(9\d",
        r"At a rate of 1e-05,[^.]* is off by more than 10 % under `plain` \(9\d",
        r"At a rate of 0\.0003,.*by at most 1 % under.* `split-master`,.*At a rate of 1e-05,.*"
        r"by at most 1 % under [^.]*`split-master`,",
    ],
    "strategies": [
        r"^These strategies are not shown to end worse than fp32 in any of the 4 settings: `stochastic`, "
        r"[^.]*`split-master`,[^.]* and `master-weights`\.",
        r"`plain` ends worse than fp32 beyond chance in 3 of 4 settings",
        r"`fp32-states` ends worse than fp32 beyond chance in 3 of 4 settings",
    ],
    "layers": [
        r"EDQ is 0\.[0-4]\d \[[^]]*\] in LayerNorm layers",
        r"LayerNorm layers lose more than every other type, beyond chance",
        r"Under `light` the lowest EDQ of any type is 1\.000 in the first two thirds",
        r"Under `plus` the lowest EDQ of any type is 1\.000 in the first two thirds",
    ],
    "beta2": [
        r"plain bfloat16 \(from β₂ = 0\.999\).*light bfloat16 \(from β₂ = 0\.999\)",
        r"lowest at β₂ = 0\.95 under every strategy,.* the best β₂ is not shown to move with precision",
    ],
    "counterfactuals": [
        r"differs from the measured one by at most 0\.011 ",
        r"begins to lose \d+ to \d+ steps earlier",
    ],
    "finetuning": [
        r"\*Learning rate 1e-05\.\* `plain` \(\+0\.\d+\) and [^:*]* end worse than fp32",
        r"\*Learning rate 3e-05\.\* `plain` \(\+0\.\d+\) and [^:*]* end worse than fp32",
        r"\*Learning rate 0\.0001\.\* `plain` \(\+0\.\d+\) ends worse than fp32",
        r"lose updates under `light` at 1e-05 .*`plus` at 1e-05 .*a worse loss is shown for none of them",
    ],
    "beyond-adamw": [
        r"SGD[^`]*`plain` \(\+0\.\d+\) ends worse[^`]*No difference from fp32 is shown for `light`,"
        r"[^:]*`split-master-16bit`",
        r"Lion[^`]*`plain` \(\+0\.\d+\) ends worse[^`]*No difference from fp32 is shown for `light`, "
        r"`split-master-16bit`",
        r"Muon[^`]*`plain` \(\+0\.\d+\) and [^:]* end worse[^`]*No difference from fp32 is shown for `bf16 pair",
    ],
    "eight-bit": [
        r"`e4m3 pair` \(\+[^:]* end worse than fp32 beyond chance",
        r"No difference from fp32 is shown for `split-master-8bit`,[^:]* `e4m3 pair, rounded at random`",
    ],
    "coupled-rounding": [
        r"At β₂ = 0\.999 `coupled-8` ends within 0\.5 % of fp64's path on 9 of 10 streams",
        r"At β₂ = 0\.999 `split-master-8bit, not coupled` ends 0\.7 to 5\.2 % off",
        r"coupled-8` is -2\.3 % .*coupled-8` is 0\.049 % .*coupled-8` is 0 % .*coupled-8` is 0\.91 % of that of",
    ],
    "quality": [
        r"predict the order of the final gaps: EDQ of one step \(\+[^:]*share of updates lost \(\+",
        r"The size of the gaps correlates with these early numbers: EDQ of one step \(\+[^:]*"
        r"share of updates lost \(\+",
    ],
    "memory": [
        r"take 37\.5 % \(`light`\) and 25 % \(`plus`\) less memory",
        r"an eager step takes from 1\.\d+ \(",
    ],
    "diary": [
        r"A small rate\.\*\* `\w+` fired .* EDQ goes from 0\.\d+ to 1,.* lower than if left alone",
        r"A resume\.\*\* `\w+` fired .* EDQ stays at 1, the second moment's decay stays at 1",
        r"A second moment\.\*\* `\w+` fired .* EDQ stays at 1, the second moment's decay goes from 0 to 1",
    ],
}
"""What the computed answer of each study must hold for its two sentences to be true."""


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_a_page_opens_with_two_sentences_that_its_numbers_bear_out(name):
    study = study_named(name)
    text = (STUDIES / f"{name}.md").read_text()
    assert text.startswith(f"# {study.title}\n\n{study.short}\n\n## What was found\n")
    assert len(sentences(study.short)) == 2
    assert "](images/" in text or name == "expansions"
    answer = re.search(r"^\*\*Answer\.\*\* (.*)$", text, re.MULTILINE)
    assert answer is not None
    for pattern in BEARS_OUT[name]:
        assert re.search(pattern, answer[1]), pattern
