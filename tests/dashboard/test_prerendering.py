"""The document as it is sent: the page's words for people, the same page as the application's first answers."""

import gzip
import json
import re
from typing import Any

import dash_mantine_components as dmc
import pytest
from collage_dashboard.prerendering import static_html
from dash import dcc, html

from tests.dashboard.generated import GeneratedRun

HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'
HIDDEN: Any = {"aria-hidden": "true"}


def answers_in(document):
    """What the document holds for the application."""
    [found] = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', document)
    return json.loads(found)


def test_words_are_text_links_and_tables_and_what_needs_the_application_is_left_out():
    tree = html.Div(
        [
            dmc.Title("A run", order=1, className="big"),
            dmc.Tooltip(html.H2("EDQ"), label="its help"),
            dcc.Link("to it", href="/run/a?layer=b&c"),
            html.Span("dot", style={"--run-colour": "#123456", "marginTop": "2px"}, **HIDDEN),
            dmc.Select(data=["x"], value="x"),
            html.P("not shown", hidden=True),
            None,
        ],
        id="place",
    )
    assert static_html(tree) == (
        '<div><h1 class="big">A run</h1><h2>EDQ</h2><a class="link-words" href="/run/a?layer=b&amp;c">to it</a>'
        '<span aria-hidden="true" style="--run-colour:#123456;margin-top:2px">dot</span></div>'
    )
    assert static_html(html.P(HOSTILE, title=HOSTILE)).count("<") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/runs", ["Runs", "Plain · bfloat16", "/run/run-plain", "of its updates"]),
        ("/run/run-plain", ["of its updates", "Updates lost", "numbers-line"]),
        ("/compare?run=run-plain&run=run-plus", ["healthy", "losing updates", "Use ", "Collage plus", "6 runs, "]),
        ("/run/never-existed", ["Nothing is stored under this address"]),
    ],
)
def test_a_document_says_its_page_and_brings_what_the_application_asks_first(http, address, said):
    answer = http.get(address)
    document = answer.get_data(as_text=True)
    opening = document.partition('<div id="opening"')[2].partition('<script type="application/json"')[0]
    for text in said:
        assert text in opening
    found = answers_in(document)
    pathname, _, search = address.partition("?")
    properties = [part["props"] for part in found["_dash-layout"]["props"]["children"]]
    [told] = [own for own in properties if own.get("id") == "address"]
    assert (told["pathname"], told["search"]) == (pathname, f"?{search}" if search else "")
    assert found["_dash-dependencies"] == http.get("/_dash-dependencies").get_json()
    assert answer.headers["Cache-Control"] == "no-store"


def test_hostile_names_neither_close_the_answers_nor_become_elements(http, server):
    server.runs["run-x"] = GeneratedRun(HOSTILE, "plain", run_id="run-x")
    document = http.get("/run/run-x").get_data(as_text=True)
    assert "<img src=x" not in document
    assert "<script>alert" not in document
    assert HOSTILE in str(answers_in(document))


@pytest.mark.slow
def test_the_table_opens_with_the_rows_that_its_address_asks_for(http, server):
    server.asked.clear()
    layout = str(answers_in(http.get("/?sort=edq_ratio").get_data(as_text=True)))
    assert layout.index("/run/run-plain") < layout.index("/run/run-plus")
    assert sum("run-table" in asked for asked in map(str, server.asked)) == 1, "rows and revision in one answer"


@pytest.mark.slow
def test_a_document_comes_packed_where_the_browser_takes_it(http):
    plain, packed = (http.get("/", headers={"Accept-Encoding": kind}) for kind in ("", "gzip"))
    assert packed.headers["Content-Encoding"] == "gzip"
    assert "Runs" in gzip.decompress(packed.get_data()).decode()
    assert len(packed.get_data()) < len(plain.get_data()) / 3


def test_the_beginning_is_sent_before_the_page_is_made_and_a_failure_leaves_the_application(app, http):
    made = []

    def fail(pathname, search):
        made.append(pathname)
        raise RuntimeError("no page")

    app.layout_for = fail
    parts = iter(http.get("/run/x", buffered=False).response)
    assert b"Waiting for the server" in next(parts)
    assert made == []
    rest = b"".join(parts)
    assert made == ["/run/x"]
    assert b'id="answers"' not in rest
    assert b"new DashRenderer()" in rest
