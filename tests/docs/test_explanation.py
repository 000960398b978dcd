"""docs/explanation and docs/how-to: code prints what its page says, and figures show what it claims."""

import re

import pytest
import torch

from tests.docs.blocks import DOCS, blocks, outputs
from tools.figures import BETA2, DECAYS, FIGURES, STEPS, additions, decays, grid

PAGE = "explanation/bf16-rounding.md"


@pytest.mark.parametrize(("page", "count"), [(PAGE, None), ("how-to/choose-a-strategy.md", 3)])
def test_the_code_prints_what_the_page_says(page, count, capsys):
    """The first blocks of a page that has others: `test_adopt.py` runs those."""
    namespace = {"torch": torch, "model": torch.nn.Linear(4, 4).bfloat16()}
    for code in blocks(page)[:count]:
        exec(compile(code, page, "exec"), namespace)
    assert capsys.readouterr().out == "".join(outputs(page))


def test_the_figures_show_what_the_page_says():
    text = (DOCS / PAGE).read_text()
    assert sorted(re.findall(r"images/(\w+)\.svg", text)) == sorted(FIGURES)
    for name in FIGURES:
        assert (DOCS / "explanation/images" / f"{name}.svg").read_text().startswith("<?xml"), (
            "python -m tools.figures"
        )
    numbers = grid(1.0, 2.0)
    assert (numbers[1], len(numbers) - 1) == (1.0078125, 128)
    found = additions()
    assert set(found["plain"]) == {1.0}, "every update is lost"
    assert found["pair"][STEPS] == pytest.approx(found["exact"][STEPS], abs=2.0**-13)
    assert len(set(found["visible"])) == 4, "the visible weight moves by whole gaps"
    moments = decays()
    assert set(moments["bfloat16"]) == {1.0}
    assert moments["exact"][DECAYS] == pytest.approx(BETA2**DECAYS)


@pytest.mark.parametrize(
    ("weight", "half", "arrives"), [(1.0, 0.0039, False), (0.1, 0.00024, False), (0.01, 0.00003, True)]
)
def test_the_table_of_half_gaps(weight, half, arrives):
    number = torch.tensor(weight, dtype=torch.bfloat16)
    gap = torch.nextafter(number, 2 * number).double() - number.double()
    assert gap.item() / 2 == pytest.approx(half, rel=0.05)
    assert ((number + 1e-4) != number).item() is arrives
