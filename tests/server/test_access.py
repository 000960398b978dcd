"""Who may ask: the token, without one this machine's own pages alone, at which names, and how often in vain."""

from __future__ import annotations

import logging
import stat
import tomllib
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from collage_server.auth import bearer
from collage_server.store.backup import back_up, restore

from collage_monitor import wire
from tests.server.guarded import OWN, guarded_server
from tests.server.sockets import listening

ROOT = Path(__file__).parents[2]
RUNS = "/api/v1/runs"


def test_the_token_decides(tmp_path):
    with guarded_server(tmp_path) as guarded:
        for header, status in (
            (f"Bearer {OWN}", 200),
            (f"bearer {OWN}", 200),
            (f"Bearer {OWN}x", 401),
            (f"Bearer {OWN[:-1]}", 401),
            (f"Basic {OWN}", 401),
            (OWN, 401),
            ("Bearer ", 401),
            ("Bearer \xff", 401),
        ):
            response = guarded.client.get(RUNS, headers={"Authorization": header.encode("latin-1")})
            assert response.status_code == status, header
            assert OWN not in response.text


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
        response = server.client.get(RUNS, headers={"Host": host} | ({"Origin": origin} if origin else {}))
        assert response.status_code == status, (host, origin)
        assert status == 200 or response.json()["error"]["code"] == "forbidden"
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_with_a_token_only_the_names_that_are_stated_are_answered(tmp_path, host):
    with guarded_server(tmp_path, host=host, allowed_hosts=("box.lan", "Other.lan")) as guarded:
        for name, status in (
            ("evil.example", 403),
            ("box.lan", 200),
            ("other.lan:7420", 200),
            ("localhost", 200),
            ("127.0.0.1:7420", 200),
            ("box.lan.evil.example", 403),
        ):
            assert guarded.client.get("/healthz", headers={"Host": name}).status_code == status, name
            answer = guarded.ask("GET", RUNS, Host=name)
            assert (answer.status_code, '"field":"Host"' in answer.text) == (status, status == 403), name


def test_a_project_with_a_slash_in_its_name_is_a_project(tmp_path):
    """Clients send it as %2F; it was answered 404, as an unknown route."""
    with guarded_server(tmp_path) as opened:
        path = "/api/v1/projects/team%2Fvision/runs"
        run = opened.ask("POST", path, message=wire.RunCreate(run_id="r1"))
        assert (run.status_code, run.json()["project"]) == (201, "team/vision")
        allowed, other = (opened.token("ingest", [project])[0] for project in ("team/vision", "team"))
        assert opened.ask("POST", path, allowed, wire.RunCreate(run_id="r2")).status_code == 201
        assert opened.ask("POST", path, other, wire.RunCreate(run_id="r3")).status_code == 403
        [listed] = opened.ask("GET", f"{RUNS}?project=team%2Fvision&limit=1").json()["runs"]
        assert listed["project"] == "team/vision"


def test_the_server_brings_what_its_verbs_import():
    """`token` speaks to a server over HTTP: without the client's library it could not be imported."""
    needed = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text())["project"]["dependencies"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(entry.startswith("collage-monitor[client]==") for entry in needed)
    assert any(entry.startswith("httpx") for entry in extras["client"])


@contextmanager
def reached(folder, **settings):
    """A client that bears the server's own token, at a real socket."""
    headers = {"Authorization": f"Bearer {OWN}"}
    with (
        listening(folder, token=OWN, **settings) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, trust_env=False) as client,
    ):
        yield client


@pytest.mark.slow
def test_unknown_tokens_are_limited_by_address_and_known_ones_pass(tmp_path):
    with reached(tmp_path, trusted_proxies=("127.0.0.1",)) as client:

        def status(token, address="10.9.9.9"):
            headers = {"Authorization": f"Bearer {token}", "X-Forwarded-For": address}
            return client.get(RUNS, headers=headers).status_code

        most = bearer._MOST_FAILURES
        assert [status(f"guess-{number}") for number in range(most + 2)] == [401] * most + [429] * 2
        assert (status(OWN), status("x", "10.9.9.8")) == (200, 401)


@pytest.mark.slow
@pytest.mark.parametrize(("proxies", "address"), [((), "127.0.0.1"), (("127.0.0.1",), "10.1.2.3")])
def test_log_and_audit_name_who_asks(tmp_path, caplog, proxies, address):
    caplog.set_level(logging.DEBUG, "collage_server.requests")
    with reached(tmp_path, trusted_proxies=proxies) as client:
        client.headers["X-Forwarded-For"] = "10.1.2.3"
        create = {"name": "n", "role": "read", "projects": None}
        assert client.post("/api/v1/tokens", json=create).status_code == 201
        page = client.get("/api/v1/audit").content
    [entry] = wire.decode_message(page, wire.AuditLogPage, wire.JSON).acts
    assert (entry.client, entry.actor) == (address, "server-token")
    assert "client address" not in entry.details
    told = {(record.client, record.actor) for record in caplog.records if record.name.endswith("requests")}
    assert told == {(address, "server-token")}


@pytest.mark.slow
def test_files_are_for_their_owner_alone(tmp_path):
    folder = tmp_path / "new" / "data"
    with reached(folder) as client:
        assert client.get("/healthz").status_code == 200
        back_up(folder / "collage.sqlite", tmp_path / "copy.sqlite")
        made = [folder, tmp_path / "copy.sqlite", *folder.rglob("*")]
        assert {path.name for path in made} >= {"collage.sqlite", "collage.sqlite-wal", "collage.sqlite-shm"}
        modes = {path.name: (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in made}
    assert set(modes.values()) == {(True, 0o700), (False, 0o600)}, modes
    (folder / "collage.sqlite").chmod(0o644)
    with listening(folder):
        assert stat.S_IMODE((folder / "collage.sqlite").stat().st_mode) == 0o600, "an earlier release's"
    restore(tmp_path / "copy.sqlite", tmp_path / "restored" / "collage.sqlite")
    assert stat.S_IMODE((tmp_path / "restored" / "collage.sqlite").stat().st_mode) == 0o600
