"""No word is false on any way to keep a weight, whole or broken; docs/optimizers.md shows what is said."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.keepers.table import all_words, cases, judged, rows, verdict_of
from tests.keepers.ways import FP16, ways

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
WHOLE = ("Rounded", "Fraction", "CollageAdamW, light")
CASES = list(cases())
FEW = [case for case in CASES if case.dtype is not FP16 and (case.way.name in WHOLE or case.condition == "healthy")]


@pytest.mark.drawn(by=lambda case: (case.condition, case.dtype, case.healthy, case.way.who.partition(" ")[0]))
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_no_word_is_false(case):
    with torch.compiler.set_stance("force_eager"):
        found = judged(case)
    known = case.way.name != "Scrambled"
    assert verdict_of(case, found.health) == ("right" if known else "unknown"), found.text


def test_each_way_is_on_the_page():
    text = PAGE.read_text()
    for way in ways():
        assert f"| {way.who} | {way.name} |" in text


@pytest.mark.nightly
def test_the_page_says_what_is_said():
    words = all_words()
    counted = Counter(verdict_of(case, word) for case, word in words.items())
    assert counted["false"] == 0
    assert counted["unknown"] <= 0.1 * counted.total()
    text = PAGE.read_text()
    assert "\n".join(rows(words)) in text
    told = f"{counted.total()} trainings: {counted['right']} right words, {counted['unknown']} unknown, 0 false"
    assert told in text
