"""The list of runs beside what is picked, and what is picked where an address names nothing."""

import re
import zlib
from base64 import b64decode
from html import unescape

import numpy as np
import pytest
from collage_dashboard.figures.heatmap import thumbnails
from collage_dashboard.pages.rail import first_view, newest_answer, rail
from collage_dashboard.view import MAXIMUM_RUNS, View

from tests.dashboard.figures.answers import heatmap_answer
from tests.dashboard.generated import GeneratedRun
from tests.dashboard.walk import attributes, components, text


def entries(shown):
    """By id what the list says of each run, in its order."""
    return {name: text(part) for part in components(shown) if (name := getattr(part, "data-run", None))}


@pytest.mark.slow
def test_the_gravest_stand_first_with_what_they_lose_now_and_live_ones_are_marked(reader):
    listed, told = rail(View(page="run", runs=("run-plain",)), reader)
    assert text(listed[0]) == "6 runs, 2 sick 1 live Layers Table"
    found = entries(listed)
    assert list(found)[:2] == ["run-plain", "run-light"], "losing updates before stuck states"
    assert found["run-plain"] == "! plain Plain · bfloat16 33.2 %"
    assert found["run-light"].endswith("states are stuck")
    assert "live, step 200 · Stochastic rounding" in found["run-live"]
    assert set(told["runs"]) == set(found)


def pixels(content):
    """[rows, columns, RGBA] of a PNG whose lines are stored as they are."""
    if isinstance(content, str):
        content = b64decode(content.removeprefix("data:image/png;base64,"))
    columns, rows = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
    packed = zlib.decompress(content[content.index(b"IDAT") + 4 : content.index(b"IEND") - 8])
    return np.frombuffer(packed, np.uint8).reshape(rows, 1 + 4 * columns)[:, 1:].reshape(rows, -1, 4)


@pytest.mark.slow
def test_the_fleet_shows_each_runs_layers_over_time_the_gravest_first(server, shown):
    links = [part for part in components(shown("/fleet")) if "/run/" in str(getattr(part, "href", ""))]
    assert [link.href for link in links[:2]] == ["/run/run-plain", "/run/run-light"]
    assert len(links) == len(server.runs)
    assert text(links[0]) == "! plain 33.2 % Plain · bfloat16"
    light, dark = (part for part in components(links[0]) if type(part).__name__ == "Img")
    run = server.runs["run-plain"]
    drawn = pixels(light.src)
    assert drawn.shape == (len(run.layers), len(run.measured), 4)
    totals = run.totals(run.steps)
    lost = totals["lost"] / (totals["elements"] - totals["idle"])
    redness = drawn[:, -1, 0].astype(int) - drawn[:, -1, 2]
    assert (redness[lost > 0.25] > 90).all(), "beyond the alert's bound it steps to orange"
    assert (redness[lost <= 0.25] < 0).all()
    assert pixels(dark.src)[0, 0, :3].max() < 90, "on a dark ground little loss is dark"
    assert light.alt == "Updates lost by layer over the run, plain"
    few = attributes(shown("/fleet?q=plus"), "href")
    assert [way for way in few if "/run/" in way] == ["/run/run-plus"]


def unfurled(http, address):
    """What the head of the document says of its page to who makes a preview."""
    document = http.get(address, headers={"User-Agent": "Slackbot-LinkExpanding 1.0"}).get_data(as_text=True)
    return dict(re.findall(r'<meta property="og:(\w+)" content="([^"]*)">', document.partition("</head>")[0]))


@pytest.mark.slow
def test_a_link_to_a_run_unfurls_as_its_sentence_and_its_layers(http, server):
    told = unfurled(http, "/run/run-plain")
    said = server.client().overview("run-plain").headline
    assert (told["title"], unescape(told["description"])) == ("plain", said)
    drawn = pixels(http.get(told["image"].removeprefix("http://localhost")).get_data())
    assert 600 < drawn.shape[0] <= 630
    assert 1100 < drawn.shape[1] <= 1200
    told = unfurled(http, "/compare?run=run-plain&run=run-plus")
    assert (told["title"], told["description"][:8]) == ("Comparison of 2 runs", "Use Coll")
    assert "image" not in told
    document = http.get("/run/run-plain", headers={"User-Agent": "Mozilla/5.0 Firefox"}).get_data(as_text=True)
    assert "og:" not in document, "a reader's head does not wait for the page"
    assert http.get("/picture/nobody.png").status_code == 404


def test_a_thumbnail_of_many_layers_has_the_worst_of_neighbours_and_undefined_cells_are_clear():
    drawn = thumbnails(heatmap_answer([*[[0.0, None]] * 999, [1.0, "NaN"]], "lost_update_ratio"))["light"]
    assert drawn.shape == (64, 2, 4)
    assert drawn[-1, 0].tolist() == [0x7A, 0x2A, 0x08, 255]
    assert drawn[0, 0].tolist() == [0xF1, 0xF4, 0xF8, 255]
    assert (drawn[:, 1, 3] == 0).all()
    assert thumbnails(heatmap_answer([], "lost_update_ratio")) == {}


@pytest.mark.slow
def test_a_picked_run_is_listed_however_many_there_are(server, reader):
    for place in range(MAXIMUM_RUNS):
        server.runs[f"r{place}"] = GeneratedRun(f"r{place}", "plus", steps=10, run_id=f"r{place}")
    last = [*server.runs][-1]
    names = list(entries(rail(View(page="run", runs=(last,)), reader)[0]))
    assert len(names) == MAXIMUM_RUNS + 1
    assert names[0] == last
    assert last not in entries(rail(View(page="first"), reader)[0])


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
        ("/?q=plus&sort=name", "/runs?q=plus&amp;sort=name"),
    ],
)
def test_a_document_says_by_which_address_its_page_goes(http, asked, leads):
    """The last is an old address of the table."""
    [told] = re.findall(r'data-leads="([^"]*)"', http.get(asked).get_data(as_text=True))
    assert told.startswith(leads)
    assert bool(told) == bool(leads)
