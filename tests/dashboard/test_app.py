"""The application as an object: no side effects at import, all files local, foreign hosts and origins refused."""

import re
import subprocess
import sys

import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.guard import LOOPBACK_HOSTS

ROUTED = {
    "output": "page.children",
    "outputs": {"id": "page", "property": "children"},
    "inputs": [{"id": "address", "property": "pathname", "value": "/run/run-plain"}, []],
    "changedPropIds": ["address.pathname"],
    "state": [{"id": "address", "property": "search", "value": ""}],
}


@pytest.fixture
def http(server):
    """A test client that speaks to the application directly, as a page on this machine does."""
    return create_dashboard(server.client, allowed_hosts=LOOPBACK_HOSTS).server.test_client()


def refresh(search):
    """The request that a browser makes to refresh the comparison."""
    names = ("compare-alert", "compare-numbers", "compare-verdicts", "compare-table")
    outputs = [{"id": name, "property": "children"} for name in names]
    outputs += [{"id": "compare-figures", "property": "data"}]
    outputs += [{"id": "compare-tick", "property": name} for name in ("disabled", "interval")]
    joined = "...".join(f"{entry['id']}.{entry['property']}" for entry in outputs)
    return {
        "output": f"..{joined}..",
        "outputs": outputs,
        "inputs": [
            {"id": "compare-shown", "property": "data", "value": search},
            {"id": "compare-tick", "property": "n_intervals", "value": 1},
        ],
        "changedPropIds": ["compare-shown.data"],
    }


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


def test_two_dashboards_do_not_know_each_other(server):
    first, second = create_dashboard(server.client), create_dashboard(server.client)
    assert first.server is not second.server
    assert first.server.test_client().get("/").status_code == 200
    assert second.server.test_client().get("/").status_code == 200


def test_creating_asks_nothing(server):
    create_dashboard(server.client)
    assert server.asked == []


def test_health_needs_no_server(http, server):
    server.down = True
    assert http.get("/healthz").status_code == 200


def test_every_file_of_the_page_is_local_and_there(http):
    html = http.get("/").get_data(as_text=True)
    addresses = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert len(addresses) > 10
    for address in addresses:
        assert address.startswith("/"), address
        with http.get(address) as response:
            assert response.status_code == 200, address
    assert "connect-src 'self'" in http.get("/").headers["Content-Security-Policy"]


@pytest.mark.parametrize(("path", "host"), [("/", "localhost"), ("/healthz", "127.0.0.1"), ("/", "evil.example")])
def test_every_answer_says_what_a_browser_may_do_with_it(http, path, host):
    answer = http.get(path, headers={"Host": host, "X-Forwarded-Proto": "https"})
    assert answer.status_code == (403 if host == "evil.example" else 200)
    assert answer.headers["Content-Security-Policy"] == (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
    )
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Strict-Transport-Security" not in answer.headers


def test_a_foreign_host_name_is_refused(http):
    assert http.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/", headers={"Host": "127.0.0.1:7421"}).status_code == 200
    assert http.get("/", headers={"Host": "[::1]:7421"}).status_code == 200


def test_a_callback_from_a_foreign_page_is_refused(http):
    foreign = http.post(
        "/_dash-update-component", json=refresh("?run=run-plain"), headers={"Origin": "http://evil"}
    )
    assert foreign.status_code == 403
    own = http.post(
        "/_dash-update-component", json=refresh("?run=run-plain"), headers={"Origin": "http://localhost"}
    )
    assert own.status_code == 200


def test_a_refresh_fills_the_page_and_stops_when_all_runs_are_finished(http):
    answer = http.post("/_dash-update-component", json=refresh("?run=run-plain&run=run-plus")).get_json()[
        "response"
    ]
    assert answer["compare-alert"]["children"] is None
    assert answer["compare-tick"]["disabled"] is True
    assert len(answer["compare-figures"]["data"][0]["data"]) >= 2
    live = http.post("/_dash-update-component", json=refresh("?run=run-live")).get_json()["response"]
    assert live["compare-tick"]["disabled"] is False


def test_a_refresh_without_an_answer_changes_nothing_but_the_notice(http, server):
    server.down = True
    answer = http.post("/_dash-update-component", json=refresh("?run=run-plain")).get_json()["response"]
    assert set(answer) == {"compare-alert", "compare-tick"}
    assert answer["compare-tick"]["disabled"] is False
    assert "does not answer" in str(answer["compare-alert"])


def test_a_metric_that_the_server_refuses_spoils_only_its_own_chart(http, server, monkeypatch):
    asked = server._compare

    def refuse(query):
        from tests.dashboard.fake_server import _error

        return _error(422, "unknown_metric") if query["metric"] == "nonsense" else asked(query)

    monkeypatch.setattr(server, "_compare", refuse)
    address = "?run=run-plain&metric=nonsense"
    answer = http.post("/_dash-update-component", json=refresh(address)).get_json()["response"]
    assert answer["compare-alert"]["children"] is None
    assert answer["compare-figures"]["data"][0]["data"]
    assert "unknown_metric" in answer["compare-figures"]["data"][3]["layout"]["annotations"][0]["text"]


def test_the_address_leads_to_the_page(http):
    answer = http.post("/_dash-update-component", json=ROUTED).get_json()["response"]
    assert "run-tab" in str(answer["page"]["children"])
