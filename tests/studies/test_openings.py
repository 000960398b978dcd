"""Each study opens with two sentences for a tired reader, and its own numbers bear them out."""

import re
from pathlib import Path

import pytest
from collage_studies.catalogue import STUDY_NAMES, study_named

from tools.prose import sentences

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
BEARS_OUT = {
    "expansions": [
        r"500 times, more than half is lost by: bfloat16;.* float8_e4m3fn, pair;.* float8_e5m2, pair;",
        r"All of it, within 1 %, arrives with: bfloat16, pair;",
    ],
    "accumulation": [
        r"at a rate of 0\.0003, off by more than 10 %: plain \(9\d",
        r"at a rate of 1e-05, off by more than 10 %: plain \(9\d",
        r"at a rate of 0\.0003,.*within 1 %:.* split-master,.*at a rate of 1e-05,.*within 1 %:.* split-master,",
    ],
    "strategies": [
        r"^In 4 settings, never shown to end worse than fp32: stochastic, .*split-master,.* and master-weights\.",
        r"Worse beyond chance: plain in 3 of them .* and fp32-states in 3 of them",
    ],
    "layers": [
        r"EDQ is 0\.[0-4]\d \[[^]]*\] in LayerNorm layers",
        r"LayerNorm layers lose more than each other type, beyond chance",
        r"under light 1\.000 in the first two thirds .* and under plus 1\.000 in the first two thirds",
    ],
    "beta2": [
        r"plain bfloat16 \(from β₂ = 0\.999\).*light bfloat16 \(from β₂ = 0\.999\)",
        r"lowest at β₂ = 0\.95 under each strategy,.* that the best β₂ moves with precision is not shown",
    ],
    "counterfactuals": [r"differs from what came by at most 0\.011 ", r"begins to lose \d+ to \d+ steps earlier"],
    "finetuning": [
        r"At 1e-05, worse beyond chance: plain .*At 3e-05, worse beyond chance: plain ",
        r"At 0\.0001, worse beyond chance: plain ",
        r"are lost by light at 1e-05 .*plus at 1e-05 .*a worse loss is shown for none of them",
    ],
    "beyond-adamw": [
        r"SGD[^:]*: worse beyond chance: plain [^;]*; no difference is shown for light,.* split-master-16bit",
        r"Lion[^:]*: worse beyond chance: plain [^;]*; no difference is shown for light, split-master-16bit",
        r"Muon[^:]*: worse beyond chance: plain [^;]*; no difference is shown for bf16 pair",
    ],
    "eight-bit": [
        r"worse beyond chance: [^;]*e4m3 pair \(\+",
        r"no difference is shown for split-master-8bit,.* e4m3 pair, rounded at random",
    ],
    "quality": [
        r"foretold early by the EDQ of one step .*share of updates lost \(\+",
        r"Their size goes with the EDQ of one step",
    ],
    "memory": [
        r"by 37\.5 % \(light\) and 25 % \(plus\)",
        r"an eager step takes from 1\.\d+ \(",
    ],
    "diary": [
        r"A small rate: `\w+` fired .* EDQ goes from 0\.\d+ to 1,.* lower than if left alone",
        r"A resume: `\w+` fired .* EDQ stays at 1, the second moment's decay stays at 1",
        r"A second moment: `\w+` fired .* EDQ stays at 1, the second moment's decay goes from 0 to 1",
    ],
}
"""What the computed answer of each study must hold for its two sentences to be true."""


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_a_page_opens_with_two_sentences_and_then_shows(name):
    study = study_named(name)
    text = (STUDIES / f"{name}.md").read_text()
    assert text.startswith(f"# {study.title}\n\n{study.short}\n\n## What was found\n")
    assert len(sentences(study.short)) == 2
    assert "](images/" in text or name == "expansions"


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_its_numbers_bear_them_out(name):
    answer = re.search(r"^\*\*Answer\.\*\* (.*)$", (STUDIES / f"{name}.md").read_text(), re.MULTILINE)
    assert answer is not None
    for pattern in BEARS_OUT[name]:
        assert re.search(pattern, answer[1]), pattern
