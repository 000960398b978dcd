"""The figures of the run page: one zoom for all, the chosen axis, colours that mean the same in every run."""

import csv
import re

import numpy as np
import pytest
from collage_dashboard.figures.style import STRATEGY_COLOURS

from tests.browser.boxes import boxes, drag
from tests.browser.questions import question_of
from tests.browser.test_layout import serious_violations
from tests.dashboard.generated import GeneratedRun, demo_runs

pytestmark = [pytest.mark.slow, pytest.mark.browser]

PLAIN = GeneratedRun("plain", "plain")
STACKED = ("loss", "edq_ratio", "lost_update_ratio", "learning_rate")
SHARES = {0.0: "0 %", 1e-5: "< 0.01 %", 0.0123: "1.2 %", 0.99998: "> 99.99 %", 1.0: "100 %"}
"""Of updates lost, and how all pages tell them."""


def lossy(totals, step):
    """The layers lose these shares of their updates."""
    elements = np.full(len(totals["elements"]), 1e6)
    lost = elements * np.array([*SHARES, *[0.0] * (len(elements) - len(SHARES))])
    none = dict.fromkeys(("idle", "distorted", "reversed"), 0.0 * elements)
    return none | {"elements": elements, "lost": lost, "faithful": elements - lost, "unchanged": lost}


def thorough(totals, step):
    """Windows of 64 steps are measured, the residuals of the weights, and their copies in bfloat16."""
    sums = {"intended_squared": 64, "intended_effective": 48, "effective_squared": 48}
    shares = {"window_active/64": 1, "window_lost/64": 0.25, "residual_elements": 1, "residual_zero": 0.125}
    shares |= {
        "residual_dropped": 0,
        "residual_fill_sum": 0.375,
        "cast_elements/bf16": 1,
        "cast_changed/bf16": 0.0625,
    }
    found = {f"window_{name}_sum/64": factor * totals["intended_squared_sum"] for name, factor in sums.items()}
    return found | {name: share * totals["elements"] for name, share in shares.items()}


@pytest.fixture(scope="module")
def runs():
    own = [GeneratedRun("lossy", "plain", steps=60, sums=lossy), GeneratedRun("thorough", "plus", sums=thorough)]
    return [*demo_runs(), *own]


def plot(kind, metric):
    """What finds a drawn figure of the run page."""
    return f"""document.querySelector(`[id*='"kind":"{kind}","metric":"{metric}"'] .js-plotly-plot`)"""


def zoom(page, metric, begin, end):
    """Zoom a curve from one share of its width to another, and wait until the address says so."""
    address = page.url
    area = page.locator(f'[id*=\'"metric":"{metric}"\'] .nsewdrag')
    drag(area, (begin, 0.5), (end, 0.5))
    page.wait_for_function("before => location.href !== before", arg=address)


def all_have(page, condition):
    """Wait until the x axis of each stacked chart, `axis`, meets the condition."""
    plots = ", ".join(plot("series", metric) for metric in STACKED)
    page.wait_for_function(
        f"[{plots}].every(plot => plot?.data.length && (axis => {condition})(plot._fullLayout.xaxis))"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("axis", "whole"), [("step", 200), ("tokens", 2048 * 200), ("time", 0.5 * 190)])
def test_a_zoom_of_one_curve_is_that_of_all_and_stands_in_the_address(goto, axis, whole):
    page = goto(f"/run/run-plain?axis={axis}&tab=curves")
    all_have(page, f"axis.range[1] > {0.97 * whole}")
    charts = boxes(*(page.locator(f'[id*=\'"metric":"{metric}"\'] .js-plotly-plot') for metric in STACKED))
    assert len({chart["x"] for chart in charts}) == 1, "they stand below each other"
    zoom(page, "loss", 0.2, 0.6)
    page.wait_for_function("location.search.includes('from=') && location.search.includes('to=')")
    address = page.url
    first, last = (float(part.partition("=")[2]) for part in address.split("&")[-2:])
    assert 0.1 * whole < first < 0.3 * whole < 0.5 * whole < last < 0.75 * whole
    exactly = f"axis.range[0] === {first} && axis.range[1] === {last}"
    all_have(page, exactly)
    page.wait_for_function(f"{plot('series', 'edq_ratio')}.data.at(-1).x.length < 14")
    page.goto("about:blank")
    page.goto(address)
    all_have(page, exactly)
    zoom(page, "learning_rate", 0.3, 0.7)
    inner = [float(part.partition("=")[2]) for part in page.url.split("&")[-2:]]
    assert first < inner[0] < inner[1] < last
    all_have(page, f"axis.range[0] === {inner[0]} && axis.range[1] === {inner[1]}")
    page.go_back()
    all_have(page, exactly)
    page.locator('[id*=\'"metric":"edq_ratio"\'] .nsewdrag').dblclick()
    all_have(page, f"axis.range[1] > {0.97 * whole}")
    assert "from=" not in page.url


@pytest.mark.nightly
def test_a_zoom_counts_while_charts_tell_their_size(goto):
    page = goto("/run/run-plain?tab=curves")
    all_have(page, "axis.range[1] > 195")
    plots = "document.querySelectorAll('.js-plotly-plot')"
    page.evaluate(f"setInterval(() => {plots}.forEach((plot) => Plotly.relayout(plot, {{ autosize: true }})), 20)")
    zoom(page, "edq_ratio", 0.2, 0.6)
    all_have(page, "20 < axis.range[0] && axis.range[1] < 140")


@pytest.mark.nightly
def test_curves_are_searched_while_one_types_and_ones_own_stand_in_their_order_in_the_address(goto):
    cards = "document.querySelectorAll('#run-panel .chart-card')"
    plots = "[...document.querySelectorAll('#run-panel .chart-card .js-plotly-plot')]"
    titles = f"{plots}.map((plot) => plot.closest('.chart-card').innerText)"
    page = goto("/run/run-plain?tab=curves")
    page.wait_for_function(f"{cards}.length === 7")
    query = page.locator("#run-query")
    query.fill("tokens per")
    page.wait_for_function(f"{cards}.length === 1")
    assert page.evaluate("new URLSearchParams(location.search).get('q')") == "tokens per"
    assert query.evaluate("(field) => document.activeElement === field")
    page.wait_for_function("document.querySelector('#run-panel .js-plotly-plot')?.data?.length")
    query.fill("")
    page.wait_for_function(f"{cards}.length === 7")
    field = page.get_by_role("textbox", name="Charts of your own, in order")
    for key in ("param_norm", "edq_ratio"):
        field.fill(f"({key})")
        page.get_by_role("option", name=f"({key})").click()
    field.press("Escape")
    page.get_by_role("option").first.wait_for(state="hidden")
    page.wait_for_function("location.search.endsWith('&panel=param_norm&panel=edq_ratio')")
    page.wait_for_function(f"{cards}.length === 2")
    assert serious_violations(page, 1440) == []
    page.reload()
    page.wait_for_function(f"{titles}.length === 2")
    first, second = page.evaluate(titles)
    assert "Weight norm" in first
    assert "EDQ" in second
    page.get_by_role("tab", name="Overview").click()
    for own in (field, query):
        own.wait_for(state="hidden")


@pytest.mark.nightly
@pytest.mark.drawn(by=lambda **_: ["an axis"])
@pytest.mark.parametrize("axis", ["step", "tokens", "time"])
def test_back_undoes_a_zoom_that_was_not_answered_yet(goto, axis):
    page = goto(f"/run/run-plain?axis={axis}&tab=curves&from=20&to=60")
    first = "axis.range[0] === 20 && axis.range[1] === 60"
    all_have(page, first)
    address, held = page.url, []

    def asks_for_the_zoom(request):
        asked = str(question_of(request))
        return "run-answer" in asked and "from=20&to=60" not in asked

    def hold_the_zoom(route):
        held.append(route) if asks_for_the_zoom(route.request) else route.continue_()

    # It stays to the end: a request that is sent while a route is taken away may get no answer at all.
    page.route(re.compile("_dash-update-component"), hold_the_zoom)
    with page.expect_request(asks_for_the_zoom):
        zoom(page, "learning_rate", 0.3, 0.7)
    page.go_back()
    page.wait_for_url(address)
    all_have(page, first)
    assert held
    for late in held:
        late.continue_()
        late.request.response().finished()
    all_have(page, first)


@pytest.mark.nightly
def test_a_curve_is_saved_and_explained_and_all_are_pointed_at_together(goto):
    page = goto("/run/run-plain?tab=curves")
    all_have(page, "axis.range[1] > 195")
    drawn = page.evaluate(f"(p => [p.data.at(-1).x, p.data.at(-1).y])({plot('series', 'edq_ratio')})")
    for kind in ("csv", "png", "svg"):
        with page.expect_download() as found:
            page.get_by_role("button", name=f"EDQ as {kind.upper()}", exact=True).press("Enter")
        assert found.value.suggested_filename == f"collage-plain-edq.{kind}"
        content = found.value.path().read_bytes()
        if kind == "csv":
            rows = list(csv.DictReader(content.decode().splitlines()))
            assert {(row["run"], row["metric"]) for row in rows} == {("plain", "edq_ratio")}
            assert [[float(row[name]) for row in rows] for name in ("step", "value")] == drawn
        else:
            assert content.startswith({"png": b"\x89PNG", "svg": b"<svg"}[kind])

    area = page.locator('[id*=\'"metric":"loss"\'] .nsewdrag')
    area.scroll_into_view_if_needed()
    area.hover()
    beside = f"{plot('series', 'edq_ratio')}.querySelector('.hoverlayer .hovertext')"
    page.wait_for_function(f"{beside} !== null")
    page.mouse.move(1, 1)
    page.wait_for_function(f"{beside} === null")


@pytest.mark.nightly
def test_a_heatmaps_colour_means_the_same_in_runs_of_different_ranges_and_it_runs_over_the_chosen_axis(goto):
    drawn = plot("heatmap", "edq_ratio")
    scales, worst = [], []
    for run in ("plus", "plain"):
        page = goto(f"/run/run-{run}?metric=edq_ratio", "#run-panel .hm image")
        scale = "(({ zmin, zmax, zauto, colorscale }) => ({ zmin, zmax, zauto, colorscale }))"
        scales.append(page.evaluate(f"{scale}({drawn}._fullData[0])"))
        worst.append(page.evaluate(f"Math.min(...{drawn}.data[0].z.flat())"))
    assert worst[1] < 0.95 < worst[0]
    assert scales[0] == scales[1]
    assert (scales[0]["zmin"], scales[0]["zmax"], scales[0]["zauto"]) == (0.5, 1.5, False)
    tokens, seconds = 2048 * 200, 0.5 * 190
    page.get_by_text("Axes", exact=True).click()
    for axis, last, title in (("Tokens", tokens, "tokens"), ("Time", seconds, "seconds"), ("Step", 200, "step")):
        page.locator("#run-axis").get_by_text(axis).click()
        page.wait_for_function(f"{drawn}?.data[0]?.x.at(-1) === {last}")
        page.wait_for_function(f"{drawn}.querySelector('.xtitle').textContent.includes('{title}')")


def test_a_layer_is_chosen_by_a_click_in_the_heatmap_or_by_name_and_its_row_is_framed(goto):
    page = goto("/run/run-plain?metric=edq_ratio", "#run-panel .hm image")
    area = page.locator("#run-panel .nsewdrag").first
    box = area.bounding_box()
    area.click(position={"x": box["width"] * 0.99, "y": box["height"] * 0.99})
    page.wait_for_function("location.search.includes('layer=head.weight')")
    page.wait_for_function("document.querySelector('#run-layer').value === 'head.weight'")
    page.wait_for_function("document.querySelector('#run-panel').textContent.includes('▸ head.weight')")
    box_of = "document.querySelector('#run-layer-card .layer-facts')?.getBoundingClientRect()"
    page.wait_for_function(f"(box => box && box.top >= 0 && box.top < innerHeight - 80)({box_of})")
    assert "at step 200" in page.locator("#run-layer-card .layer-facts").inner_text()
    value = page.locator('#run-layer-card [data-metric="edq_ratio"] .value').inner_text()
    last = page.evaluate(f"{plot('heatmap', 'edq_ratio')}.data[0].z.at(-1).at(-1)")
    assert float(value) == pytest.approx(last, abs=1e-3)

    page.get_by_text("Axes", exact=True).click()
    page.locator("#run-layer").click()
    page.keyboard.press("Control+A")
    page.keyboard.type("1.mlp.up")
    page.get_by_role("option", name="blocks.1.mlp.up.weight").click()
    page.wait_for_function("location.search.includes('layer=blocks.1.mlp.up.weight')")
    page.get_by_text("Axes", exact=True).click()
    label = page.locator("#run-panel .ytick", has_text="▸ blocks.1.mlp.up.weight")
    frame = page.locator("#run-panel .shapelayer path[data-index='0']").first
    row, framed, cells = boxes(label, frame, page.locator("#run-panel .hm image").first)
    assert framed["y"] < row["y"] + row["height"] / 2 < framed["y"] + framed["height"]
    assert framed["height"] < 2.5 * cells["height"] / 12, "one row of twelve, and its line"
    assert framed["width"] >= cells["width"]
    assert frame.evaluate("path => getComputedStyle(path).strokeWidth") == "2px"


@pytest.mark.nightly
def test_titles_say_layer_and_steps_and_colours_are_the_strategys_and_those_of_the_pages_ground(goto):
    page = goto("/run/run-plain?layer=blocks.0.mlp.up.weight&step=100")
    titles = page.locator("#run-stack .gtitle", has_text="mlp.up.weight")
    titles.nth(1).wait_for()
    edq, lost = titles.all_text_contents()
    assert edq == "blocks.0.mlp.up.weight"
    assert re.fullmatch(r"…mlp\.up\.weight: .* % → .* % since 100", lost), "of a clicked cell, what changed there"
    page.get_by_role("heading", name="Updates lost by layer").wait_for()
    page.wait_for_selector("#run-panel .hm image")
    map_ = f"{plot('heatmap', 'lost_update_ratio')}.data[0]"
    for scheme in ("dark", "light"):
        page.get_by_role("button", name="Light or dark").click()
        page.wait_for_function(f"'' + {map_}.colorscale === '' + {map_}.meta['{scheme}']")
    traces = "[...document.querySelectorAll('#run-stack .js-plotly-plot')].flatMap(plot => plot.data ?? [])"
    is_plain = f"trace.type === 'scatter' && trace.line?.color === '{STRATEGY_COLOURS['plain']}'"
    page.wait_for_function(f"{traces}.some(trace => {is_plain})")
    page.get_by_role("tab", name="Histogram").click()
    page.wait_for_selector("#run-panel .barlayer .point", state="attached")
    page.locator(".gtitle", has_text="blocks.0.mlp.up.weight, step 100").wait_for()


def said(page, metric, row, column):
    """What the label of a cell says, its layer and step left out."""
    drawn = plot("heatmap", metric)
    layer, step = page.evaluate(
        f"""([row, column]) => {{
            const plot = {drawn};
            const {{ x, y }} = plot.data[0];
            Plotly.Fx.hover(plot, {{ xval: x.at(column), yval: row }}, "xy");
            return [y[row], x.at(column)];
        }}""",
        [row, column],
    )
    label = page.locator("#run-panel .hoverlayer .hovertext tspan")
    label.filter(has_text=layer).wait_for()
    assert label.all_text_contents()[-2] == f"step {step}"
    return label.all_text_contents()[-1]


@pytest.mark.nightly
def test_a_small_share_is_told_as_on_all_pages_to_a_mouse_too(goto):
    page = goto("/run/run-lossy?tab=layers&metric=lost_update_ratio", "#run-panel .hm image")
    told = [said(page, "lost_update_ratio", row, 3).partition(";")[0] for row in range(len(SHARES))]
    assert [share.replace("\u00a0", " ") for share in told] == [*SHARES.values()]
    area = page.locator("#run-panel .nsewdrag").first
    box = area.bounding_box()
    area.hover(position={"x": box["width"] * 0.99, "y": box["height"] * 1.5 / 12})
    page.locator("#run-panel .hoverlayer .hovertext", has_text="< 0.01").wait_for()


@pytest.mark.nightly
def test_a_column_that_came_later_is_told_too(goto, growing):
    page = goto("/run/run-growing?metric=edq_ratio", "#run-panel .hm image")
    growing(steps=200)
    page.wait_for_function(f"{plot('heatmap', 'edq_ratio')}.data[0].x.at(-1) === 200")
    value = page.evaluate(f"{plot('heatmap', 'edq_ratio')}.data[0].z[2].at(-1)")
    assert said(page, "edq_ratio", 2, -1) == f"{value:.3f}"


def shares(first, last):
    """By layer its share of what the model loses between two steps, from the totals that were sent."""
    sent = [PLAIN.totals(step) for step in PLAIN.measured if first <= step <= last]
    lost = np.maximum(sum(own["intended_squared_sum"] - own["intended_effective_sum"] for own in sent), 0.0)
    return dict(zip((layer.name for layer in PLAIN.layers), lost / lost.sum(), strict=True))


def test_the_first_sentence_is_the_headline_and_one_table_has_every_layer_with_its_share(goto, evaluated):
    overview = evaluated.overview("run-plain")
    page = goto("/run/run-plus")
    page.locator(".answer .verdict", has_text="Healthy.").wait_for()
    goto("/run/run-plain")
    sentence = page.locator(".answer .verdict").inner_text().replace("!", "").strip()
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
    rows.nth(2).wait_for(state="detached")
    assert rows.count() == 2


@pytest.mark.nightly
def test_a_chosen_layers_card_stands_at_its_side_with_the_numbers_of_the_step_and_the_tabs_in_sight(goto):
    page = goto("/run/run-plain?tab=table")
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
def test_a_layer_tells_its_windows_residuals_and_copies(goto):
    page = goto("/run/run-thorough?layer=blocks.1.mlp.up.weight")
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
