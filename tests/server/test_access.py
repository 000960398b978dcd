"""Who may ask: the token, and without one only this machine's own pages."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from collage_server.app import create_app
from collage_server.settings import Settings, SettingsError
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.guarded import guarded_server

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-some-length"


@pytest.fixture
def guarded(tmp_path):
    with TestClient(create_app(Settings(folder=tmp_path, token=TOKEN))) as client:
        yield client


def test_the_token_decides(guarded):
    for header, status in (
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        (f"Basic {TOKEN}", 401),
        (TOKEN, 401),
        ("Bearer ", 401),
        ("Bearer \xff", 401),
    ):
        response = guarded.get("/api/v1/runs", headers={"Authorization": header.encode("latin-1")})
        assert response.status_code == status, header
        assert TOKEN not in response.text


def test_without_a_token_only_this_machine_and_no_foreign_page(server):
    for host, origin, status in (
        ("127.0.0.1:7420", None, 200),
        ("localhost", None, 200),
        ("[::1]:7420", None, 200),
        ("evil.example", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("", None, 403),
        ("[bad", None, 403),
        ("localhost:7420", "http://localhost:7420", 200),
        ("localhost", "http://localhost:7421", 403),
        ("localhost:7420", "http://127.0.0.1:7420", 403),
        ("localhost", "https://evil.example", 403),
        ("localhost", "http://evil-localhost", 403),
        ("localhost", "null", 403),
    ):
        response = server.client.get(
            "/api/v1/runs", headers={"Host": host} | ({"Origin": origin} if origin else {})
        )
        assert response.status_code == status, (host, origin)
        if status == 403:
            assert response.json()["error"]["code"] == "forbidden"


def test_no_cross_origin_header_is_ever_sent(server):
    response = server.client.get("/api/v1/runs", headers={"Origin": "http://localhost:7421"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_no_token_and_no_flag_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="--token-file"):
        Settings(folder=tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_no_auth_is_refused_beyond_loopback(tmp_path, host):
    with pytest.raises(SettingsError, match="loopback"):
        Settings(folder=tmp_path, host=host, no_auth=True)


def test_a_project_with_a_slash_in_its_name_is_a_project(tmp_path):
    """Clients send it as %2F; it was answered 404, as an unknown route."""
    with guarded_server(tmp_path) as opened:
        path = "/api/v1/projects/team%2Fvision/runs"
        run = opened.ask("POST", path, message=wire.RunCreate(run_id="r1"))
        assert (run.status_code, run.json()["project"]) == (201, "team/vision")
        allowed, other = (opened.token("ingest", [project])[0] for project in ("team/vision", "team"))
        assert opened.ask("POST", path, allowed, wire.RunCreate(run_id="r2")).status_code == 201
        assert opened.ask("POST", path, other, wire.RunCreate(run_id="r3")).status_code == 403
        [listed] = opened.ask("GET", "/api/v1/runs?project=team%2Fvision&limit=1").json()["runs"]
        assert listed["project"] == "team/vision"


@pytest.mark.parametrize(
    ("path", "page"),
    [("/", "https://box.lan:7421/"), ("/runs/a%20run%3Fx", "https://box.lan:7421/run/a%20run%3Fx")],
)
def test_the_addresses_of_pages_lead_to_the_dashboard_that_the_settings_name(tmp_path, path, page):
    settings = Settings(folder=tmp_path, token=TOKEN, dashboard_url="https://box.lan:7421/")
    with TestClient(create_app(settings), follow_redirects=False) as client:
        answer = client.get(path)
    assert (answer.status_code, answer.headers["location"]) == (307, page)


def test_a_browser_that_asks_the_server_for_a_run_is_told_where_pages_are(guarded):
    for path in ("/", "/runs/a-run"):
        response = guarded.get(path)
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/html")
        assert "collage-monitor serve dashboard --server-url" in response.text


def test_the_server_brings_what_its_verbs_import():
    """`token` speaks to a server over HTTP: without the client's library it could not be imported."""
    needed = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text())["project"]["dependencies"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(entry.startswith("collage-monitor[client]==") for entry in needed)
    assert any(entry.startswith("httpx") for entry in extras["client"])


def test_with_a_token_too_only_the_names_that_are_given_are_served(tmp_path):
    settings = Settings(folder=tmp_path, token=TOKEN, allowed_hosts=("box.lan",))
    with TestClient(create_app(settings)) as client:
        found = [
            client.get("/api/v1/runs", headers={"Authorization": f"Bearer {TOKEN}", "Host": host}).status_code
            for host in ("box.lan", "localhost", "evil.example")
        ]
    assert found == [200, 200, 403]
