"""A run that falls at a step: the table's sentence and its page's name that step and the layers that fell."""

import re

import msgspec
import pytest

from collage_monitor import wire
from collage_monitor.client import Client
from tests.dashboard.generated import GeneratedRun

pytestmark = [pytest.mark.slow, pytest.mark.browser]

FELL_AT = 310
NOTE = "<b>cooling</b> failed"
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
    verdict = page.locator(f".runs-grid .verdict-cell[title*='since step {FELL_AT}']")
    verdict.wait_for()
    sentence = verdict.get_attribute("title")
    assert all(name in sentence for name in FALLEN), sentence
    page.get_by_role("link", name="falling", exact=True).click()
    page.locator(".answer .verdict", has_text=f"since step {FELL_AT}").wait_for()
    page.get_by_text("Where, since when, and why").click()
    page.locator(".answer").get_by_text(re.compile(rf"since step {FELL_AT}; .*changed then")).wait_for()
    worst = page.get_by_role("region", name="Layers that lose the most").get_by_role("link")
    assert worst.first.inner_text() in FALLEN


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


def test_a_layer_says_what_it_is_and_its_histogram_what_changed(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-falling?layer={FALLEN[0]}")
    card = page.locator("#run-layer-card")
    card.get_by_text(
        re.compile(r"64 × 32 · 2,048 elements · 8\.3 % of the model · bfloat16 · Linear · ")
    ).wait_for()
    assert "reported by 1 of 1 ranks" in card.inner_text()
    for metric in ("edq_ratio", "lost_update_ratio", "param_norm", "state_decrement_ratio/exp_avg_sq"):
        assert card.locator(f"[data-metric='{metric}'] .value").inner_text() not in {"", "–"}, metric
    page.locator(
        "#run-panel .gtitle", has_text=f"steps {FELL_AT} to 600; line: before the change, steps 10 to 300"
    ).wait_for()
    page.wait_for_function("document.querySelectorAll('#run-panel .scatterlayer .trace').length >= 2")
    page.get_by_role("tab", name="Elements").click()
    page.locator('#run-panel [id*=\'"kind":"classes"\'] .gtitle', has_text=FALLEN[0]).wait_for()
    page.go_back()
    page.go_back()


def test_what_happened_is_marked_in_every_curve(watched, server_url):
    address, token_file = server_url
    with Client(address, token_file.read_text().strip()) as client:
        client.note("run-falling", wire.NoteCreate(text=NOTE, step=FELL_AT))
    page = watched.page
    page.goto(f"{watched.url}/run/run-falling?tab=curves&axis=tokens")
    page.locator("#run-marks", has_text=f"note by server-token: {NOTE} at step {FELL_AT}").wait_for()
    charts = "[...document.querySelectorAll('#run-panel .js-plotly-plot')].filter(p => p.data.length)"
    marks = f"{charts}.map(p => (p.layout.shapes || []).filter(s => s.yref === 'y domain').map(s => s.x0))"
    page.wait_for_function(f"{charts}.length === 7 && {marks}.every(at => at.length === 1)")
    assert {at for [at] in page.evaluate(marks)} <= {2048 * FELL_AT, 2048 * 350}, "where the axis has that step"
    handle = page.locator("#run-panel .annotation-text", has_text="▾").first
    handle.scroll_into_view_if_needed()
    handle.hover()
    page.locator(".hoverlayer", has_text="server-token").first.wait_for()
