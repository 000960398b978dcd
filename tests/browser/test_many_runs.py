"""The table of runs on a server with 5,000 of them: its first rows, its end, and what is searched for."""

import re

import pytest

from benchmarks._population import UnsyncedStore, copy_often, evaluate, seal_run, twenty
from collage_monitor import wire
from tests.browser.questions import question_of
from tests.system import chromium

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.browser]

RUNS = 5_000
NOW = 1.7e9
APART, PROJECT = "run-apart", "scaling-laws"
"""A run in a project of its own."""
TAG = "warmup-fixed"
TAGGED = f"run-{RUNS // 2}"
NAMES = sorted(["run", APART, *(f"run-{number}" for number in range(1, RUNS - 1))])


@pytest.fixture(scope="module")
def server_url(served, tmp_path_factory):
    """One run went through journal and evaluation, the others are its copies, and one is in another project."""
    chromium()
    folder = tmp_path_factory.mktemp("server")
    store = UnsyncedStore(folder / "collage.sqlite", stale_after_seconds=1e9)
    store.open()
    seal_run(store, "run", twenty(0), 8)
    store.runs.update("run", wire.RunUpdate(state="finished"), NOW)
    evaluate(store)
    copy_often(store, "run", RUNS - 2)
    store.runs.create(PROJECT, wire.RunCreate(run_id=APART), NOW)
    store.runs.update(APART, wire.RunUpdate(state="finished"), NOW)
    store.runs.update(TAGGED, wire.RunUpdate(tags=[TAG]), NOW)
    # What is evaluated already changes no more, and the table is not read anew.
    evaluate(store, RUNS)
    store.close()
    with served(folder) as server:
        yield server


@pytest.fixture
def listed(page, goto):
    """The table by name, and the first row of each block of rows that it asked for."""
    asked: list[int] = []

    def note(request):
        for given in (question_of(request) or {"inputs": []})["inputs"]:
            if given.get("id") == "runs-wanted" and given["value"]:
                asked.append(given["value"]["startRow"])

    page.on("request", note)
    goto("/?sort=name")
    row_says(page, 0, NAMES[0])
    return page, asked


def row_says(page, place, name):
    row = f'.ag-pinned-left-cols-container .ag-row[row-index="{place}"]'
    page.locator(row).get_by_role("link", name=name, exact=True).wait_for()


def scroll_to(page, place):
    """By the grid's own call: it ignores one lone scroll of its rows that falls within 0.5 s of one of its bar."""
    page.evaluate(f"dash_ag_grid.getApi('runs-grid').ensureIndexVisible({place}, 'top')")


def test_it_says_how_many_there_are_and_is_scrolled_to_its_end_and_no_answer_is_thrown_away(listed):
    page, asked = listed
    page.locator("#runs-count").get_by_text(re.compile(r"of 5,000 runs\.")).wait_for()
    for place in range(5):
        row_says(page, place, NAMES[place])
    assert asked == [], "the first rows came with the page"
    lost = []
    page.on("requestfailed", lambda request: lost.append(request.url))
    scroll_to(page, 2510)
    scroll_to(page, RUNS - 1)
    row_says(page, RUNS - 1, NAMES[-1])
    scroll_to(page, 2510)
    row_says(page, 2515, NAMES[2515])
    scroll_to(page, RUNS - 1)
    row_says(page, RUNS - 1, NAMES[-1])
    scroll_to(page, 0)
    row_says(page, 0, NAMES[0])
    assert lost == []
    assert sorted(asked) == sorted(set(asked)), "what was read already was asked for again"
    assert set(asked) <= {2500, RUNS - 50}


def test_a_search_finds_a_tag_and_a_project(listed):
    page, _ = listed
    for word, name in ((TAG, TAGGED), (PROJECT, APART), (TAG, TAGGED), (PROJECT[:5].upper(), APART)):
        page.get_by_label("Search names, projects, tags and ids").fill(word)
        row_says(page, 0, name)
        page.locator("#runs-count", has_text=re.compile(r"\b1\b.* run")).wait_for()
        page.wait_for_function("document.querySelectorAll('.ag-pinned-left-cols-container .ag-row').length === 1")
