"""A run that falls at a step: the table's sentence and its page's name that step and the layers that fell."""

import msgspec
import pytest

from tests.dashboard.generated import GeneratedRun

pytestmark = pytest.mark.browser

FELL_AT = 310
FALLEN = ("blocks.1.attention.qkv.weight", "blocks.1.attention.output.weight")


class Falling(GeneratedRun):
    """Its updates arrive, until two layers lose most of theirs. Its layers know their modules' types."""

    def __post_init__(self):
        super().__post_init__()
        kinds = {"embedding": "Embedding", "norm": "LayerNorm"}
        self.layers = [
            msgspec.structs.replace(layer, module_type=kinds.get(layer.name.split(".")[-2], "Linear"))
            for layer in self.layers
        ]

    def totals(self, step):
        totals = super().totals(step)
        if step >= FELL_AT:
            for place, layer in enumerate(self.layers):
                if layer.name in FALLEN:
                    totals["intended_effective_sum"][place] *= 0.3
        return totals


@pytest.fixture(scope="module")
def runs():
    return [Falling("falling", "plus", run_id="run-falling", steps=600)]


def test_the_sentence_names_the_step_and_the_layers(watched):
    page = watched.page
    page.goto(watched.url)
    verdict = page.locator(".runs-grid .verdict-cell", has_text=f"since step {FELL_AT}")
    verdict.wait_for()
    sentence = verdict.text_content()
    assert all(name in sentence for name in FALLEN), sentence
    page.get_by_role("link", name="falling", exact=True).click()
    page.locator(".answer", has_text=f"since step {FELL_AT}").wait_for()


def test_the_heatmap_is_grouped_by_module_type(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-falling")
    page.wait_for_selector("#run-panel .hm image")
    page.locator("#run-rows").get_by_text("By module type").click()
    page.wait_for_function("location.search.includes('rows=type')")
    rows = "document.querySelector('#run-panel .js-plotly-plot')?.data[0]?.y"
    page.wait_for_function(f"{rows}?.some((name) => name.startsWith('▾'))")
    groups = [name for name in page.evaluate(rows) if name.startswith("▾")]
    assert sorted(groups) == ["▾ Embedding", "▾ LayerNorm", "▾ Linear"]
