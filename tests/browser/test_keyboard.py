"""All that a mouse does, done with the keyboard alone: no click, and no focus but what the Tab key gives."""

import pytest

from tests.browser.test_incidents import overflowed
from tests.browser.test_layout import serious_violations
from tests.dashboard.generated import GeneratedRun
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.usefixtures("evaluated", "fired")]

MOST_TABS = 120
MOST_ROWS = 30


@pytest.fixture(scope="module")
def runs():
    """Four to compare, and one that makes an alert fire."""
    names = ("plain", "light", "plus", "master-weights")
    return [*(GeneratedRun(name, name) for name in names), overflowed()]


@pytest.fixture(scope="module")
def fired(client):
    until(lambda: client.incidents(alert="CollageNotFinite").events, "the server's evaluation")


class Keyboard:
    """A reader without a mouse."""

    def __init__(self, page):
        self.page = page

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)

    def on(self, selector, text=""):
        """Whether the focus stands on this, which says `text` or is labelled so."""
        return self.page.evaluate(
            """([selector, text]) => {
                const own = document.activeElement;
                const said = `${own.getAttribute("aria-label")} ${own.textContent}`;
                return own.matches(selector) && said.includes(text);
            }""",
            [selector, text],
        )

    def reach(self, selector, text="", key="Tab"):
        """Press Tab until the focus stands on this."""
        for _ in range(MOST_TABS):
            if self.on(selector, text):
                return self
            self.press(key)
        here = self.page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
        raise AssertionError(f"Tab never comes to {selector} {text!r}; it stands on {here}")

    def write(self, selector, text, *keys, key="Tab"):
        """Reach a field, type into it, and press these keys."""
        self.reach(selector, key=key)
        self.page.keyboard.type(text)
        self.press(*keys)

    def into_rows(self, grid):
        """From above a table into the cells of its first row."""
        self.reach(f"{grid} .ag-header-cell, {grid} .ag-cell, {grid} .ag-floating-filter input")
        for _ in range(4):
            if self.on(f"{grid} .ag-cell"):
                return self
            self.press("ArrowDown")
        raise AssertionError("the arrow keys do not lead from the heads into the rows")

    def down_to(self, grid, name):
        """Down to the row that says this."""
        for _ in range(MOST_ROWS):
            row = self.page.evaluate("document.activeElement.closest('.ag-row').getAttribute('row-index')")
            if name in self.page.locator(f"{grid} .ag-row[row-index='{row}']").all_inner_texts()[0].split("\n"):
                return self
            self.press("ArrowDown")
        raise AssertionError(f"no row says {name}")


@pytest.fixture
def keyboard(goto):
    """A reader at the table of runs."""
    return Keyboard(goto("/runs", ".ag-row .run-cell a"))


def search_has(page, text):
    page.wait_for_function("text => decodeURIComponent(location.search).includes(text)", arg=text)


@pytest.mark.nightly
def test_runs_are_ticked_compared_and_a_line_is_hidden(keyboard):
    page = keyboard.page
    for name in ("plain", "light", "plus"):
        keyboard.press(*["ArrowUp"] * MOST_ROWS)
        keyboard.into_rows("#runs-grid").down_to("#runs-grid", name).press("Space")
    page.get_by_role("link", name="Compare 3 runs").wait_for()
    keyboard.reach("a", "Compare 3 runs", key="Shift+Tab").press("Enter")
    page.wait_for_selector("#compare-chart-0 .scatterlayer .trace", state="attached")
    keyboard.reach("#compare-legend .line", "plain").press("Enter")
    page.locator("#compare-legend .line[aria-pressed=false]", has_text="plain").wait_for()
    keyboard.reach("input[aria-label='Metric']").press("Control+A")
    keyboard.write("input[aria-label='Metric']", "Weight norm", "ArrowDown", "Enter")
    search_has(page, "metric=param_norm")
    keyboard.reach("input[aria-label='Strategy B']", key="Shift+Tab").press("ArrowDown")
    page.get_by_role("option", name="Collage plus").wait_for()
    keyboard.press("ArrowDown", "Enter")
    search_has(page, "pair=")
    keyboard.reach("summary", "Axes", key="Shift+Tab").press("Enter")
    keyboard.reach("#compare-axis input").press("ArrowRight")
    search_has(page, "axis=tokens")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("path", "chart"),
    [("/run/run-plain", "#run-stack"), ("/compare?run=run-plain&run=run-plus", "#compare-chart-0")],
)
def test_curves_are_zoomed_moved_and_shown_whole(goto, path, chart):
    page = goto(path, f"{chart} .scatterlayer .trace")
    keyboard = Keyboard(page)

    def ends():
        given = page.evaluate("Object.fromEntries(new URLSearchParams(location.search))")
        return float(given["from"]), float(given["to"])

    keyboard.reach("[data-curves]").press("+")
    search_has(page, "from=")
    first, last = ends()
    assert 40 < first < 60
    assert 140 < last < 160
    axis = f"document.querySelector('{chart} .js-plotly-plot')._fullLayout.xaxis"
    page.wait_for_function(f"{axis}.range[0] === {first} && {axis}.range[1] === {last}")
    keyboard.press("ArrowRight")
    page.wait_for_function(f"!location.search.includes('from={first:g}&')")
    assert ends()[0] == pytest.approx(first + 0.25 * (last - first), abs=1)
    keyboard.press("0")
    page.wait_for_function("!location.search.includes('from=')")


@pytest.mark.nightly
def test_a_cell_of_the_heatmap_and_a_layer_of_the_table_are_chosen(goto):
    page = goto("/run/run-plain?metric=edq_ratio", "#run-panel .hm image")
    keyboard, rows = Keyboard(page), page.locator(".layers-grid .ag-center-cols-container .ag-row")
    keyboard.reach("[data-map]").press("ArrowDown", "ArrowDown", "ArrowLeft")
    assert page.locator("#map-cell").inner_text().startswith("blocks.0.attention.output.weight, step 190: 0.")
    keyboard.press("Enter")
    search_has(page, "layer=blocks.0.attention.output.weight&step=190")
    card = page.locator("#run-layer-card")
    card.get_by_text("at step 190").wait_for()
    goto("/run/run-plain?tab=table")
    rows.nth(3).wait_for()
    keyboard.into_rows(".layers-grid").down_to(".layers-grid", "head.weight").press("Enter")
    search_has(page, "layer=head.weight")
    card.get_by_role("heading", name="head.weight").wait_for()
    page.reload()
    rows.nth(3).wait_for()
    keyboard.reach(".layers-grid .ag-header-cell", "Lost").press("Enter")
    page.locator(".layers-grid .ag-header-cell[col-id=lost_update_ratio][aria-sort=ascending]").wait_for()
    keyboard.reach(".layers-grid .ag-header-cell", "Layer", key="Shift+Tab").press("ArrowDown", "Enter")
    assert keyboard.on(".layers-grid .ag-floating-filter input")
    page.keyboard.type("mlp.up")
    until(lambda: rows.count() == 2, "the layers that match")


@pytest.mark.nightly
def test_incidents_are_filtered_opened_and_acknowledged(keyboard, client):
    page = keyboard.page
    keyboard.reach("a.nav", "Incidents").press("Enter")
    page.locator(".incident-table a").first.wait_for()
    keyboard.write("#incidents-by-alert", "CollageNotFinite", "ArrowDown", "Enter")
    search_has(page, "alert=CollageNotFinite")
    page.get_by_role("button", name="Acknowledge it").wait_for()
    keyboard.reach(".incident-table a", "CollageNotFinite").press("Enter")
    page.get_by_role("region", name="Before and after").wait_for()
    keyboard.write("input[aria-label^='Note for']", "seen", "Enter")
    page.get_by_role("region", name="Timeline").get_by_text("server-token: seen").wait_for()
    page.go_back()
    page.get_by_role("button", name="Acknowledge it").wait_for()
    keyboard.reach("button", "Acknowledge it").press("Enter")
    page.get_by_text("acknowledged by server-token").wait_for()
    (incident,) = client.incidents(alert="CollageNotFinite").events
    assert incident.acknowledged_by == "server-token"


def rows_are(page, *names):
    links = page.locator("#runs-grid .ag-pinned-left-cols-container .ag-row a")
    until(lambda: sorted(links.all_text_contents()) == sorted(names), f"the rows {names}")


@pytest.mark.nightly
def test_the_table_is_searched_filtered_and_sorted(keyboard):
    page = keyboard.page
    keyboard.reach(".show-filters input").press("Space")
    keyboard.write("#runs-strategy", "light", "ArrowDown", "Enter")
    rows_are(page, "light")
    keyboard.reach("#runs-strategy", key="Shift+Tab").press("Control+A", "Delete", "Tab")
    keyboard.write("input[aria-label^='Conditions on']", "edq < 0.9", "Enter")
    search_has(page, "where=edq")
    keyboard.write("#runs-query", "overflowed", key="Shift+Tab")
    page.get_by_text("No run matches these filters.").wait_for()
    keyboard.reach("button", "Clear filters").press("Enter")
    rows_are(page, "plain", "light", "plus", "master-weights", "overflowed")
    keyboard.reach("#runs-grid .ag-header-cell", "Run").press("Enter")
    search_has(page, "sort=name")


def test_a_view_is_saved_for_all_who_see_the_project_opened_and_deleted(goto, client):
    page = goto("/?strategy=plus&where=last_step+%3E+1&column=health&column=last_step")
    keyboard = Keyboard(page)
    rows_are(page, "plus", "overflowed")
    keyboard.reach("summary", "Views").press("Enter")
    page.get_by_text("No view is saved yet").wait_for()
    keyboard.write("#runs-view-name", "plus alone")
    keyboard.reach("button", "Save this view").press("Enter")
    page.get_by_role("link", name="plus alone").wait_for()
    [view] = client.views("demo")
    assert (view.name, "last_step" in view.search) == ("plus alone", True)
    goto("/runs")
    rows_are(page, "plain", "light", "plus", "master-weights", "overflowed")
    keyboard.reach("summary", "Views").press("Enter")
    page.get_by_role("link", name="plus alone").wait_for()
    keyboard.reach("a", "plus alone").press("Enter")
    rows_are(page, "plus", "overflowed")
    page.locator(".filters").get_by_text("last_step > 1").wait_for()
    assert page.locator(".ag-header-cell[col-id='loss']").count() == 0
    keyboard.reach("button", "Delete the view plus alone").press("Enter")
    page.get_by_text("No view is saved yet").wait_for()
    assert client.views() == []


@pytest.mark.nightly
def test_a_link_to_what_is_shown_is_copied_by_the_keyboard(page, goto):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    keyboard = Keyboard(goto("/run/run-plus?metric=edq_ratio&order=worst"))
    page.get_by_role("button", name="Copy link").wait_for()
    keyboard.reach("button", "Copy link", key="Shift+Tab").press("Enter")
    said = page.locator(".crumbs [role=status]").first
    said.filter(has_text="copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    assert keyboard.on("button", "Copy link")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')) }")
    keyboard.press("Enter")
    said.filter(has_text="Copy it from the address bar").wait_for()
    assert serious_violations(page, 1440) == []
