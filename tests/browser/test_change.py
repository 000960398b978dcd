"""A run that falls at a step: sentences and marks name it and the layers that fell, and a click asks about it."""

import re

import msgspec
import pytest

from tests.browser.boxes import drag
from tests.dashboard.generated import RAISED_AT, GeneratedRun, raised_run
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

FELL_AT = 310
CURVES = "#run-stack .nsewdrag"
STACK = "document.querySelector('#run-stack .js-plotly-plot')"
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
    return [Falling("falling", "plus", steps=600), raised_run()]


def test_the_sentence_names_the_step_and_the_layers(goto):
    page = goto("/runs")
    verdict = page.locator(f".runs-grid .verdict-cell[title*='since step {FELL_AT}']")
    verdict.wait_for()
    sentence = verdict.get_attribute("title")
    assert all(name in sentence for name in FALLEN), sentence
    page.get_by_role("link", name="falling", exact=True).click()
    page.locator(".answer .verdict", has_text=f"since step {FELL_AT}").wait_for()
    page.locator(".answer").get_by_text(re.compile(rf"since step {FELL_AT}; .*changed then")).wait_for()
    page.get_by_role("tab", name="Layers").click()
    assert page.locator(".layers-grid .ag-row[row-index='0'] [col-id='layer']").inner_text() in FALLEN


@pytest.mark.nightly
def test_a_layer_says_what_it_is_and_its_histogram_what_changed_and_layers_are_grouped_by_type(goto):
    page = goto(f"/run/run-falling?layer={FALLEN[0]}&tab=histogram")
    card = page.locator("#run-layer-card")
    told = re.compile(r"64 × 32 · 2,048 elements · 8\.3 % of the model · bfloat16 · Linear · ")
    card.get_by_text(told).wait_for()
    assert "reported by 1 of 1 ranks" in card.inner_text()
    for metric in ("edq_ratio", "lost_update_ratio", "param_norm", "state_decrement_ratio/exp_avg_sq"):
        card.locator(f"[data-metric='{metric}'] .value", has_text=re.compile(r"\d")).wait_for()
    title = f"steps {FELL_AT} to 600; line: before the change, steps 10 to 300"
    page.locator("#run-panel .gtitle", has_text=title).wait_for()
    page.wait_for_function("document.querySelectorAll('#run-panel .scatterlayer .trace').length >= 1")
    page.get_by_role("tab", name="Elements").click()
    page.locator('#run-panel [id*=\'"kind":"classes"\'] .gtitle', has_text=FALLEN[0]).wait_for()
    page.get_by_role("tab", name="Overview").click()
    page.get_by_text("Axes", exact=True).click()
    page.locator("#run-rows").get_by_text("By module type").click()
    page.wait_for_function("location.search.includes('rows=type')")
    rows = "document.querySelector('#run-panel .js-plotly-plot')?.data[0]?.y"
    page.wait_for_function(f"{rows}?.some((name) => String(name).startsWith('▾'))")
    groups = [name for name in page.evaluate(rows) if name.startswith("▾")]
    assert sorted(groups) == ["▾ Embedding", "▾ LayerNorm", "▾ Linear"]


@pytest.fixture
def marked(goto, client):
    """The run's page, its onset marked."""
    until(lambda: [change.step for change in client.overview("run-falling").changes] == [FELL_AT], "the onset")
    page = goto("/run/run-falling")
    page.wait_for_function(f"{STACK}?.layout.shapes?.some(shape => shape.x0 === {FELL_AT})")
    return page


def click_beside(page, pixels):
    """Click so many pixels to the right of the onset's line in the topmost curve."""
    area = page.locator(CURVES).first
    at = page.evaluate(f"{STACK}._fullLayout.xaxis.d2p({FELL_AT})")
    area.click(position={"x": at + pixels, "y": area.bounding_box()["height"] / 2})


ASKED_ABOUT_IT = f"new URLSearchParams(location.search).get('at') === '{FELL_AT}'"
"""Whether the page asks what changed at the onset."""


@pytest.mark.nightly
@pytest.mark.parametrize("pixels", [5, 0, -5])
def test_a_click_beside_a_mark_asks_about_the_mark(marked, pixels):
    """Two measured steps are so near together that one cannot aim between them."""
    marked.set_viewport_size({"width": 390, "height": 900})
    marked.wait_for_function(f"{STACK}._fullLayout.width > 320 && {STACK}._fullLayout.width < 391")
    click_beside(marked, pixels)
    marked.wait_for_function(ASKED_ABOUT_IT)


@pytest.mark.nightly
def test_a_click_further_away_asks_about_the_step_itself_and_keys_about_the_marks(marked):
    page = marked
    click_beside(page, 40)
    page.wait_for_function("new URLSearchParams(location.search).has('at')")
    assert f"at={FELL_AT}" not in page.url
    place = page.locator("#run-stack [data-curves], #run-stack[data-curves]").first
    assert "n and p ask what changed at the next and the previous mark" in place.get_attribute("aria-label")
    place.focus()
    page.keyboard.press("n")
    page.wait_for_function(ASKED_ABOUT_IT)
    page.locator("#run-change", has_text="Before, steps").wait_for()
    page.keyboard.press("p")
    page.wait_for_function(ASKED_ABOUT_IT)


READY = f"{STACK}?.data?.length > 0"


def rows(page, title):
    """The rows that changed, of the card of this title."""
    card = page.get_by_role("region", name=title)
    card.wait_for()
    return [row.split("\t") for row in card.locator("table").first.locator("tbody tr").all_inner_texts()]


def field(page):
    """Where a step or a range is typed."""
    menu = page.locator(".tabs-line .menu")
    if menu.get_attribute("open") is None:
        menu.locator("summary").click()
    return page.get_by_label("What changed at this step, or in this range of steps")


def ask(page, text):
    """Type a step or a range in place of what stands in the field."""
    page.keyboard.press("Control+a")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def test_a_link_arrives_at_what_changed_and_a_typed_step_or_range_stands_in_the_address(goto):
    page = goto("/run/run-raised?at=1200")
    page.get_by_role("region", name="What changed at step 1,200").wait_for()
    page.wait_for_function(
        "document.querySelector('#run-change')?.getBoundingClientRect().bottom <= window.innerHeight + 1"
    )
    page.wait_for_function(READY)
    field(page).focus()
    ask(page, "now")
    page.get_by_text("Give a step, such as 800, or a range of steps, such as 800-900").wait_for()
    ask(page, "800")
    [row] = rows(page, "What changed at step 800")
    assert (row[0], row[3]) == ("Learning rate", "× 3.00")
    assert "at=800" in page.url
    ask(page, "400-600")
    page.get_by_role("region", name="What changed in steps 400 to 600").get_by_text("No reported value").wait_for()
    marks = "document.querySelector('#run-stack .js-plotly-plot').layout.shapes?.map((shape) => shape.x0)"
    page.wait_for_function(f"{marks}?.includes(400) && {marks}.includes(600)")
    page.go_back()
    page.get_by_role("region", name="What changed at step 800").wait_for()
    assert field(page).input_value() == "800"
    page.get_by_role("button", name="Close").click()
    page.wait_for_function("!document.querySelector('#run-change > *') && !location.search.includes('at=')")
    assert field(page).input_value() == ""


def test_a_click_on_a_curve_asks_there_and_a_double_click_shows_all_steps_and_asks_nothing(goto):
    page = goto("/run/run-raised?from=400&to=1200")
    page.wait_for_function(READY)
    curve = page.locator(CURVES).nth(1)
    curve.dblclick()
    page.wait_for_function("!location.search.includes('from=')")
    box = curve.bounding_box()
    curve.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    page.wait_for_function("location.search.includes('at=')")
    at = int(page.url.rpartition("at=")[2])
    assert abs(at - RAISED_AT) <= 40
    page.get_by_role("region", name=f"What changed at step {at}").wait_for()
    page.go_back()
    page.wait_for_function("!location.search.includes('at=')")


@pytest.mark.nightly
def test_the_steps_that_a_zoom_shows_are_held_against_as_many_before(goto):
    page = goto("/run/run-raised")
    page.wait_for_function(READY)
    button = page.get_by_role("button", name="What changed in the steps shown")
    drag(page.locator(CURVES).first, (0.55, 0.5), (0.9, 0.5))
    field(page)
    button.click()
    page.wait_for_function("location.search.includes('at=')")
    said = {row[0]: row[3] for row in rows(page, "What changed in steps")}
    assert said["Learning rate"].startswith("×")
