"""A run's first sentence, and its layers: one table beside the heatmap, and the card of the one that is chosen."""

from dataclasses import dataclass

import numpy as np
import pytest

from collage_monitor.client import Client
from tests.browser.boxes import boxes
from tests.dashboard.generated import GeneratedRun
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

PLAIN = GeneratedRun("plain", "plain", run_id="run-plain")


@dataclass
class Thorough(GeneratedRun):
    """It measures windows of 64 steps, the residuals of its weights, and their copies in bfloat16."""

    def totals(self, step):
        found = super().totals(step)
        elements, intended = found["elements"], found["intended_squared_sum"]
        return found | {
            "window_intended_squared_sum/64": 64 * intended,
            "window_intended_effective_sum/64": 48 * intended,
            "window_effective_squared_sum/64": 48 * intended,
            "window_active/64": elements,
            "window_lost/64": 0.25 * elements,
            "residual_elements": elements,
            "residual_zero": 0.125 * elements,
            "residual_dropped": 0 * elements,
            "residual_fill_sum": 0.375 * elements,
            "cast_elements/bf16": elements,
            "cast_changed/bf16": 0.0625 * elements,
        }


@pytest.fixture(scope="module")
def runs():
    thorough = Thorough("thorough", "plus", run_id="run-thorough")
    return [PLAIN, GeneratedRun("plus", "plus", run_id="run-plus"), thorough]


@pytest.fixture(scope="module")
def overview(server_url):
    address, token_file = server_url
    with Client(address, token_file.read_text().strip()) as client:
        until(lambda: all(row.overview for row in client.run_table().rows), "the evaluation of all runs")
        yield client.overview("run-plain")


def shares(first, last):
    """By layer its share of what the model loses between two steps, from the totals that were sent."""
    sent = [PLAIN.totals(step) for step in PLAIN.measured if first <= step <= last]
    lost = np.maximum(sum(own["intended_squared_sum"] - own["intended_effective_sum"] for own in sent), 0.0)
    return dict(zip((layer.name for layer in PLAIN.layers), lost / lost.sum(), strict=True))


def test_the_first_sentence_is_the_headline_and_one_table_has_every_layer_with_its_share(watched, overview):
    page = watched.page
    page.goto(f"{watched.url}/run/run-plus")
    page.locator(".answer .verdict", has_text="Healthy.").wait_for()
    page.goto(f"{watched.url}/run/run-plain")
    said = page.locator(".answer .verdict")
    said.wait_for()
    sentence = said.inner_text().replace("!", "").strip()
    assert sentence == overview.headline
    assert sentence.startswith(f"Loses {100 * overview.now['lost_update_ratio']:.1f} % of its updates now")
    assert page.get_by_text(overview.text).is_hidden()
    page.get_by_text("Why", exact=True).click()
    page.get_by_text(overview.text).wait_for()
    page.get_by_role("tab", name="Layers").click()
    rows = page.locator(".layers-grid .ag-center-cols-container .ag-row")
    rows.nth(len(PLAIN.layers) - 1).wait_for(state="attached")
    found = {}
    for row in rows.all():
        cells = {name: row.locator(f"[col-id='{name}']").inner_text() for name in ("layer", "share", "since")}
        found[cells["layer"]] = float(cells["share"].replace("\u00a0%", "")) / 100
    wanted = shares(overview.first_step, overview.last_step)
    assert found == pytest.approx(wanted, abs=6e-4)
    assert list(wanted) != sorted(wanted, key=wanted.get, reverse=True), "the order says something"
    first = page.locator(".layers-grid .ag-row[row-index='0'] [col-id='layer']")
    assert first.inner_text() == max(wanted, key=wanted.get) == overview.worst[0].layer
    page.locator(".layers-grid .ag-floating-filter input").first.fill("mlp.up")
    page.wait_for_function(
        "document.querySelectorAll('.layers-grid .ag-center-cols-container .ag-row').length === 2"
    )


def test_a_chosen_layers_card_stands_at_its_side_with_the_numbers_of_the_step_and_the_tabs_in_sight(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-plain?tab=table")
    row = page.locator(".layers-grid .ag-row", has_text="blocks.1.mlp.up.weight")
    row.locator(".ag-cell").first.click()
    card = page.locator("#run-layer-card")
    card.get_by_role("heading", name="blocks.1.mlp.up.weight").wait_for()
    page.wait_for_function("location.search.includes('layer=blocks.1.mlp.up.weight')")
    shown, panel = boxes(card, page.locator("#run-panel"))
    assert shown["x"] >= panel["x"] + panel["width"], "beside, not above"
    assert 0 <= shown["y"] < page.viewport_size["height"], "where it is looked for"
    page.get_by_role("tab", name="Overview").click()
    page.wait_for_selector("#run-panel .hm image")
    page.locator("[data-map]").focus()
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    page.wait_for_function("location.search.includes('step=')")
    step = int(page.evaluate("new URLSearchParams(location.search).get('step')"))
    card.get_by_text(f"at step {step:,}").wait_for()
    plots = "document.querySelectorAll('#run-stack .js-plotly-plot, #run-panel .js-plotly-plot')"
    marked = f"[...{plots}].filter((plot) => plot.layout.shapes?.some(({{x0}}) => x0 === {step}))"
    page.wait_for_function(f"{marked}.length === 4")
    layer = page.evaluate("new URLSearchParams(location.search).get('layer')")
    place = [known.name for known in PLAIN.layers].index(layer)
    totals = PLAIN.totals(step)
    edq = totals["intended_effective_sum"][place] / totals["intended_squared_sum"][place]
    assert float(card.locator("[data-metric='edq_ratio'] .value").inner_text()) == pytest.approx(edq, abs=5e-4)
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    tab = page.get_by_role("tab", name="Norms").bounding_box()
    assert 0 <= tab["y"] < 80


@pytest.mark.nightly
def test_a_layer_tells_its_windows_residuals_and_copies(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-thorough?layer=blocks.1.mlp.up.weight")
    card = page.locator("#run-layer-card")
    card.get_by_role("heading", name="blocks.1.mlp.up.weight").wait_for()
    told = {
        "edq_window_ratio/64": ("EDQ over a window, 64", "0.750"),
        "lost_window_ratio/64": ("Updates lost over a window, 64", "25.0 %"),
        "residual_fill_ratio": ("Residual", "0.3750"),
        "residual_zero_ratio": ("Residual", "12.5 %"),
        "residual_dropped_ratio": ("Residual", "0 %"),
        "cast_changed_ratio/bf16": ("Copies changed, bf16", "6.2 %"),
    }
    for metric, (title, value) in told.items():
        own = card.locator(f"[data-metric='{metric}']")
        assert own.get_by_role("heading").inner_text().startswith(title), metric
        assert own.locator(".value").inner_text() == value, metric
    page.get_by_role("tab", name="States").click()
    for metric in ("residual_fill_ratio", "residual_zero_ratio"):
        page.wait_for_selector(f"""#run-panel [id*='"metric":"{metric}"'] .scatterlayer .trace""", state="attached")
