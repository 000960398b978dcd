"""The list of runs beside what is picked, and what is picked where an address names nothing."""

import re

import pytest
from collage_dashboard.pages.rail import first_view, newest_answer, rail
from collage_dashboard.view import MAXIMUM_RUNS, View

from tests.dashboard.generated import GeneratedRun
from tests.dashboard.walk import components, text


def entries(shown):
    """(id, what it says) of each run in the list."""
    return [(name, text(part)) for part in components(shown) if (name := getattr(part, "data-run", None))]


def test_the_gravest_stand_first_with_what_they_lose_now_and_live_ones_are_marked(reader):
    shown, told = rail(View(page="run", runs=("run-plain",)), reader)
    assert text(shown[0]) == "6 runs, 2 sick 1 live Table"
    found = dict(entries(shown))
    assert list(found)[:2] == ["run-plain", "run-light"], "losing updates before stuck states"
    assert found["run-plain"] == "! plain Plain · bfloat16 33.2 %"
    assert found["run-light"].endswith("states are stuck")
    assert "live, step 200 · Stochastic rounding" in found["run-live"]
    assert set(told["runs"]) == set(found)


def test_a_picked_run_is_listed_however_many_there_are(server, reader):
    for place in range(MAXIMUM_RUNS):
        server.runs[f"r{place}"] = GeneratedRun(f"r{place}", "plus", steps=10, run_id=f"r{place}")
    last = [*server.runs][-1]
    names = [name for name, _ in entries(rail(View(page="run", runs=(last,)), reader)[0])]
    assert len(names) == MAXIMUM_RUNS + 1
    assert names[0] == last
    assert last not in dict(entries(rail(View(page="first"), reader)[0]))


def test_without_a_pick_the_worst_live_run_is_shown_else_the_newest_projects_answer(server, reader):
    server.runs["run-bad"] = GeneratedRun("bad", "plain", run_id="run-bad", state="running")
    assert first_view(reader) == View(page="run", runs=("run-bad",))
    for name in ("run-bad", "run-live"):
        del server.runs[name]
    assert first_view(reader) == newest_answer(reader) == View(page="compare", runs=tuple(server.runs))
    server.runs = {"run-plus": server.runs["run-plus"]}
    assert first_view(reader) == View(page="run", runs=("run-plus",))
    server.runs.clear()
    assert first_view(reader) == View(page="runs")


@pytest.mark.parametrize(
    ("asked", "leads"),
    [
        ("/", "/run/run-live"),
        ("/compare", "/compare?run=run-plain&amp;run=run-light"),
        ("/run/run-plain?tab=about", ""),
        ("/runs", ""),
    ],
)
def test_a_document_says_by_which_address_its_page_goes(app, asked, leads):
    document = app.server.test_client().get(asked).get_data(as_text=True)
    [told] = re.findall(r'data-leads="([^"]*)"', document)
    assert told.startswith(leads)
    assert bool(told) == bool(leads)


def test_an_old_address_of_the_table_goes_on_under_its_own(app):
    document = app.server.test_client().get("/?q=plus&sort=name").get_data(as_text=True)
    assert 'data-leads="/runs?q=plus&amp;sort=name"' in document
