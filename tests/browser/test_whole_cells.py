"""What stands in a table is read whole: a cell that is cut says all of it to who points at it."""

from contextlib import suppress

import msgspec
import pytest
from playwright.sync_api import TimeoutError

from collage_monitor.strategies import STRATEGIES, strategy_title
from tests.dashboard.generated import GeneratedRun, demo_runs

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.browser]

LAYER = "decoder.layers.11.attention.query_key_value_projection.weight"


class Stored(GeneratedRun):
    """A run of any strategy, with a layer of a long name."""

    def __post_init__(self):
        super().__post_init__()
        kind = "ColumnParallelLinearWithGather"
        self.layers[1] = msgspec.structs.replace(self.layers[1], name=LAYER, module_type=kind)


@pytest.fixture(scope="module")
def runs():
    """The demo's, and one of each strategy."""
    return [*demo_runs(), *(Stored(f"of {name}", name, steps=60) for name in STRATEGIES)]


HEAD = ".ag-header-cell-label, .ag-header-cell-text"
CUT = """(cells, inner) => {
    const cut = (part) => part.scrollWidth > part.clientWidth + 1 || part.scrollHeight > part.clientHeight + 1;
    const isCut = (part) => !part.closest("svg") && getComputedStyle(part).overflow !== "visible" && cut(part);
    const parts = (cell) => (inner ? cell.querySelectorAll(inner) : [cell, ...cell.querySelectorAll("*")]);
    const firsts = new Set();
    return cells.flatMap((cell, place) => {
        if (![...parts(cell)].some(isCut) || cell.querySelector("[title]")) return [];
        const column = cell.getAttribute("col-id");
        return firsts.has(column) ? [] : firsts.add(column) && [place];
    });
}"""
"""The place of each column's first cell of which a part is cut and has no title."""


def untold(page, cells, inner=None):
    """The columns with cells that are cut, in the parts `inner`, and told by no tooltip either."""
    cut = [cells.nth(place) for place in cells.evaluate_all(CUT, inner)]
    return [(cell.get_attribute("col-id"), cell.inner_text()) for cell in cut if not is_told(page, cell)]


def is_told(page, cell):
    """A pointer that rests on it is shown the whole; where a row is drawn anew meanwhile, the next one."""
    for _ in range(3):
        page.mouse.move(0, 0)
        cell.hover()
        with suppress(TimeoutError):
            page.locator(".ag-tooltip", has_text=cell.inner_text().split("\n")[0]).wait_for(timeout=5000)
            return True
    return False


RUNS = "#runs-grid .ag-row:has(.verdict-cell) .ag-cell[col-id='notes']"
LAYERS = ".layers-grid .ag-row"


@pytest.mark.parametrize(
    ("path", "width", "row"),
    [("/runs", 2060, RUNS), ("/runs?by=strategy", 2060, RUNS), ("/run/run-of-kahan?tab=table", 1280, LAYERS)],
)
def test_no_cell_of_a_table_is_cut_untold(goto, path, width, row):
    page = goto(path, width=width)
    page.locator(row).nth(4).wait_for()
    grid = page.locator(row.partition(" ")[0])
    assert untold(page, grid.locator(".ag-cell")) == []
    assert untold(page, grid.locator(".ag-header-row-column .ag-header-cell"), HEAD) == []


def test_the_names_of_strategies_are_whole(goto):
    page = goto("/runs?q=of ", width=1280, height=1400)
    cells = page.locator(".ag-cell[col-id='strategy']")
    cells.nth(len(STRATEGIES) - 1).wait_for()
    page.locator(".ag-row .verdict-cell").nth(4).wait_for()
    titles = {strategy_title(name, "bfloat16") for name in STRATEGIES}
    assert titles <= {text.split(" (observed")[0] for text in cells.all_inner_texts()}
    cut = "(c) => c.scrollHeight > c.clientHeight + 1 || c.scrollWidth > c.clientWidth"
    assert cells.evaluate_all(f"cells => cells.filter({cut}).map((c) => c.textContent)") == []
