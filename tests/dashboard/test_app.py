"""The application as an object: no side effects at import, all files local, foreign hosts and origins refused."""

import ast
import gzip
import json
import re
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import collage_dashboard.figures
import httpx
import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.components import IDLE_MILLISECONDS, LIVE_MILLISECONDS
from collage_dashboard.pages import comparison
from collage_dashboard.pages.comparison import CHARTS, DEFAULT_METRIC

from collage_monitor.local import LOOPBACK_HOSTS
from tests.dashboard.asking import answered, question, routing
from tests.dashboard.fake_server import _error

pytestmark = pytest.mark.slow


@pytest.fixture
def http(server):
    """A test client that speaks to the application directly, as a page on this machine does."""
    return create_dashboard(server.client, allowed_hosts=LOOPBACK_HOSTS).server.test_client()


CALM = {"at": "before", "failed": False, "gone": []}


def comparing(search):
    return {"pathname": "/compare", "search": search, "zooms": 0}


def charts(search, looked, drawn=()):
    """What is asked for the curves and the table of a comparison, after a look, where `drawn` stands already."""
    revision = looked["compare-revision"]["data"]
    kept = looked.get("compare-rows", {"data": "[]"})["data"]
    sections = ("table", "advice", "strategies", "counterfactuals", "pair")
    outputs = [("compare-drawn", "data"), *((f"compare-{name}", "children") for name in sections)]
    outputs += [("compare-cost", "figure"), *((f"compare-answer-{place}", "data") for place in range(4))]
    inputs = [("compare-shown", "data", comparing(search)), ("compare-revision", "data", revision)]
    return question(outputs, inputs, [("compare-rows", "data", kept), ("compare-drawn", "data", list(drawn))])


def look(search, known=CALM):
    """What is asked at each tick, and where other runs are chosen."""
    outputs = [(f"compare-{name}", "data") for name in ("revision", "rows", "choices")]
    outputs += [(f"compare-{name}", "children") for name in ("alert", "pace", "legend")]
    inputs = [("tick", "data", 1), ("compare-shown", "data", comparing(search)), ("compare-treated", "data", None)]
    return question(outputs, inputs, [("compare-revision", "data", known)])


def test_importing_starts_nothing_and_loads_no_heavy_room():
    code = (
        "import sys, threading, socket\n"
        "socket.socket.connect = None\n"
        "before = threading.active_count()\n"
        "import collage_dashboard, collage_dashboard.command\n"
        "assert threading.active_count() == before\n"
        "assert not {'torch', 'sqlalchemy', 'fastapi', 'collage_server', 'collage_agent'} & set(sys.modules)\n"
        "import dash\n"
        "assert not dash.page_registry and not dash._callback.GLOBAL_CALLBACK_LIST\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


FORBIDDEN = r"(dash|httpx|flask|collage_monitor\.client|collage_dashboard\.(server_reader|pages))(\.|$)"


def test_no_figure_imports_a_query_or_an_application():
    """Figures are functions from data to figure."""
    for path in Path(collage_dashboard.figures.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert names
        assert not [name for name in names if re.match(FORBIDDEN, name)], path


def test_two_dashboards_do_not_know_each_other_and_creating_one_asks_nothing(server):
    first, second = (create_dashboard(server.client).server for _ in range(2))
    assert server.asked == []
    assert first is not second
    assert [made.test_client().get("/").status_code for made in (first, second)] == [200, 200]


def test_no_question_holds_the_rows_of_a_table(app):
    """A live page of 100 layers sent 18.7 kB of them with each new step."""
    states = [state for entry in app._callback_list for state in entry["state"]]
    assert {"run-record", "run-shown"} <= {state["id"] for state in states}
    assert [state for state in states if state["property"] in {"rowData", "virtualRowData"}] == []


def test_every_file_of_the_page_is_local_and_there(http):
    html = http.get("/").get_data(as_text=True)
    addresses = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert len(addresses) > 10
    for address in addresses:
        assert address.startswith("/"), address
        with http.get(address) as response:
            assert response.status_code == 200, address
            if re.search(r"/assets/.*\.(css|js)", address):
                assert address.endswith(f"?m={blake2b(response.get_data(), digest_size=8).hexdigest()}")
    assert "connect-src 'self'" in http.get("/").headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path", ["../secret", "none/x.js", "dash/none.js", "%2e%2e/%2e%2e/etc/passwd", "dash/../x"]
)
def test_a_file_that_no_component_has_is_not_found(http, path):
    """Dash raised, which was answered 500, with a traceback in the log for each."""
    assert http.get(f"/_dash-component-suites/{path}").status_code == 404


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/", "localhost"),
        ("/healthz", "127.0.0.1"),
        ("/", "127.0.0.1:7421"),
        ("/", "[::1]:7421"),
        ("/", "evil.example"),
    ],
)
def test_a_foreign_host_is_refused_and_every_answer_says_what_a_browser_may_do_with_it(http, path, host):
    answer = http.get(path, headers={"Host": host, "X-Forwarded-Proto": "https"})
    assert answer.status_code == (403 if host == "evil.example" else 200)
    assert answer.headers["Content-Security-Policy"] == (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    )
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Strict-Transport-Security" not in answer.headers


def test_it_is_shown_in_a_frame_by_the_named_origins_alone(server):
    origins = ["https://wiki.example.org", "http://localhost:*"]
    headers = create_dashboard(server.client, embed_in=origins).server.test_client().get("/").headers
    assert headers["Content-Security-Policy"].endswith(f"; frame-ancestors {' '.join(origins)}")
    assert "X-Frame-Options" not in headers
    alone = create_dashboard(server.client).server.test_client().get("/").headers
    assert alone["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize(("origin", "status"), [("http://evil", 403), ("http://localhost", 200)])
def test_a_callback_from_a_foreign_page_is_refused(http, origin, status):
    asked = {"json": look("?run=run-plain"), "headers": {"Origin": origin}}
    assert http.post("/_dash-update-component", **asked).status_code == status


def test_a_refresh_fills_the_page_and_rests_when_all_runs_are_finished(http, monkeypatch):
    # However long the answers took.
    monkeypatch.setattr(comparison, "time", SimpleNamespace(monotonic=lambda: 0.0))
    search = "?run=run-plain&run=run-plus"
    looked = answered(http, look(search))
    assert "plus" in str(looked["compare-legend"])
    drawn = answered(http, charts(search, looked))
    assert len(drawn["compare-answer-0"]["data"]["data"]) >= 2
    assert "Collage plus" in str(drawn["compare-table"])
    assert looked["compare-alert"]["children"] is None
    assert int(looked["compare-pace"]["children"]) == IDLE_MILLISECONDS
    assert int(answered(http, look("?run=run-live"))["compare-pace"]["children"]) == LIVE_MILLISECONDS


def test_what_has_not_changed_does_not_travel_again(http):
    search = "?run=run-plain"
    looked = answered(http, look(search))
    assert answered(http, look(search, looked["compare-revision"]["data"])) is None
    drawn = answered(http, charts(search, looked))["compare-drawn"]["data"]
    assert answered(http, charts(search, looked, drawn)) is None
    changed = {**looked, "compare-revision": {"data": CALM}}
    again = answered(http, charts(search, changed, drawn))
    assert not [name for name in again if "answer" in name], "the same figures"


def test_all_curves_come_from_one_question_and_another_metric_asks_for_itself_alone(http, server):
    search = "?run=run-plain&run=run-plus"
    looked = answered(http, look(search))
    server.asked.clear()
    drawn = answered(http, charts(search, looked))["compare-drawn"]["data"]
    other = answered(http, charts(f"{search}&metric=param_norm", looked, drawn))
    asked = [httpx.URL(question).params.get_list("metric") for question in server.asked]
    assert asked == [[*CHARTS, DEFAULT_METRIC], ["param_norm"]]
    assert [name for name in other if "answer" in name] == ["compare-answer-3"]


def test_a_look_without_an_answer_changes_nothing_but_the_notice(http, server):
    server.down = True
    looked = answered(http, look("?run=run-plain"))
    assert "does not answer" in str(looked["compare-alert"])
    assert int(looked["compare-pace"]["children"]) == LIVE_MILLISECONDS
    failed = looked["compare-revision"]["data"]
    assert answered(http, charts("?run=run-plain", looked)) is None, "what was read stays"
    server.down = False
    back = answered(http, look("?run=run-plain", failed))
    assert back["compare-alert"]["children"] is None
    assert back["compare-revision"]["data"] != failed


def test_a_run_that_is_gone_is_named_and_the_others_are_compared(http):
    search = "?run=run-gone&run=run-plain"
    looked = answered(http, look(search))
    assert "run-gone" in str(looked["compare-alert"])
    assert "plain" in str(looked["compare-legend"])
    assert answered(http, charts(search, looked))["compare-answer-0"]["data"]["data"]


def test_a_metric_that_the_server_refuses_spoils_only_its_own_chart(http, server, monkeypatch):
    asked = server._compare

    def refuse(query):
        return _error(422, "unknown_metric") if "nonsense" in query.get_list("metric") else asked(query)

    monkeypatch.setattr(server, "_compare", refuse)
    address = "?run=run-plain&metric=nonsense"
    looked = answered(http, look(address))
    assert looked["compare-alert"]["children"] is None
    drawn = answered(http, charts(address, looked))
    assert drawn["compare-answer-0"]["data"]["data"]
    refused = drawn["compare-answer-3"]["data"]
    assert "unknown_metric" in refused["layout"]["annotations"][0]["text"]


def test_answers_travel_compressed_and_files_with_a_version_are_kept_for_good(http):
    html = http.get("/").get_data(as_text=True)
    [style] = re.findall(r'href="(/assets/style.css[^"]+)"', html)
    scripts = re.findall(r'src="(/_dash-component-suites/[^"]+)"', html)

    def sent(address):
        with http.get(address, headers={"Accept-Encoding": "br, gzip"}) as answer:
            assert answer.headers["Content-Encoding"] == "br"
            return answer.headers, len(answer.get_data())

    first = [sent(address) for address in (style, *scripts)]
    assert all("max-age=31536000" in headers["Cache-Control"] for headers, _ in first)
    # What scripts load later has no version in its name.
    names = ("dash/dcc/async-graph.js", "plotly/package_data/plotly.min.js")
    later = [sent(f"/_dash-component-suites/{name}") for name in names]
    assert all(headers["ETag"] for headers, _ in later)
    assert sum(size for _, size in first) < 1_500_000
    assert sum(size for _, size in first + later) < 2_500_000


def test_a_question_may_come_packed(http):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}

    def posted(body):
        return http.post("/_dash-update-component", data=body, headers=headers)

    asked = routing("/run/run-plain")
    packed = gzip.compress(json.dumps(asked).encode())
    assert "run-tab" in posted(packed).text
    assert posted(packed).get_json() == http.post("/_dash-update-component", json=asked).get_json()
    assert posted(b"no gzip").status_code == 400
    assert posted(packed[:-9]).status_code == 413, "cut"
    assert posted(gzip.compress(bytes(64 * 2**20))).status_code == 413, "a megabyte that unpacks to a thousand"
