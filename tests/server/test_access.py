"""Who may ask: the token, without one this machine's own pages alone, at which names, and how often in vain.

Tokens are shown once, stored hashed, revoked everywhere within five seconds, confined to their projects.
"""

import asyncio
import logging
import sqlite3
import stat
import tomllib
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from collage_server.auth import bearer
from collage_server.auth.administration import create_token, revoke_token
from collage_server.auth.principals import SERVER_TOKEN, TokenDirectory, digest_of
from collage_server.errors import Busy
from collage_server.store import SqliteStore
from collage_server.store.backup import back_up, restore

from collage_monitor import wire
from tests.server.conftest import Clock
from tests.server.guarded import OWN, guarded_server
from tests.server.migrated import put_migrated
from tests.server.sockets import listening
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
RUNS = "/api/v1/runs"


@pytest.fixture
def guarded(tmp_path):
    with guarded_server(tmp_path) as opened:
        yield opened


def test_the_token_decides(guarded):
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


def test_a_project_with_a_slash_in_its_name_is_a_project(guarded):
    """Clients send it as %2F; it was answered 404, as an unknown route."""
    path = "/api/v1/projects/team%2Fvision/runs"
    run = guarded.ask("POST", path, message=wire.RunCreate(run_id="r1"))
    assert (run.status_code, run.json()["project"]) == (201, "team/vision")
    allowed, other = (guarded.token("ingest", [project])[0] for project in ("team/vision", "team"))
    assert guarded.ask("POST", path, allowed, wire.RunCreate(run_id="r2")).status_code == 201
    assert guarded.ask("POST", path, other, wire.RunCreate(run_id="r3")).status_code == 403
    [listed] = guarded.ask("GET", f"{RUNS}?project=team%2Fvision&limit=1").json()["runs"]
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


@pytest.fixture
def reader(guarded):
    """The secret of a reader of the project p; runs p-1 and q-1 are in p and in q."""
    for project in ("p", "q"):
        guarded.fill(project, f"{project}-1")
    return guarded.token("read", ["p"])[0]


def listed(guarded):
    page = guarded.ask("GET", "/api/v1/tokens").content
    return {token.token_id: token for token in wire.decode_message(page, wire.TokenList, wire.JSON).tokens}


def test_the_secret_is_shown_once_and_stored_nowhere(guarded, tmp_path):
    secret, token = guarded.token("operate", ["p", "p", "q"])
    assert len(secret) >= 43
    assert token.projects == ["p", "q"]
    assert listed(guarded)[token.token_id] == token
    for path in ("/api/v1/tokens", "/api/v1/audit"):
        assert secret not in guarded.ask("GET", path).text
    with closing(sqlite3.connect(tmp_path / "collage.sqlite")) as connection:
        [[digest]] = connection.execute("SELECT digest FROM token").fetchall()
        assert digest == digest_of(secret)
    assert not [p for p in tmp_path.iterdir() if secret.encode() in p.read_bytes()]


@pytest.mark.slow
def test_a_revoked_token_is_refused_at_once_and_stays_listed(guarded):
    secret, token = guarded.token("read", ["p"])
    assert guarded.ask("GET", "/api/v1/runs", secret).status_code == 200
    guarded.clock.now += 1
    for _ in range(2):
        answer = guarded.ask("DELETE", f"/api/v1/tokens/{token.token_id}")
        assert answer.json()["revoked_at"] == guarded.clock.now
    assert guarded.ask("GET", "/api/v1/runs", secret).status_code == 401
    assert listed(guarded)[token.token_id].revoked_at == guarded.clock.now
    assert [entry.action for entry in guarded.audit_log()] == ["token.revoke", "token.create"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"name": "n", "role": "root", "projects": null}', "role"),
        (b'{"name": "", "role": "read", "projects": null}', "name"),
        (b'{"name": "n", "role": "read", "projects": []}', "projects"),
        (b'{"name": "n", "role": "read", "projects": [""]}', "projects[0]"),
        (b'{"name": "n", "role": "admin", "projects": ["p"]}', "projects"),
    ],
)
def test_bad_tokens(guarded, body, field):
    headers = {"Authorization": f"Bearer {OWN}", "Content-Type": wire.JSON}
    answer = guarded.client.post("/api/v1/tokens", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)
    assert listed(guarded) == {}


def test_who_did_what_stands_in_the_audit_log(guarded):
    secret, token = guarded.token("operate", ["p"], name="night shift")
    guarded.fill("p", "r1", secret)
    guarded.clock.now += 5
    answer = guarded.ask("DELETE", "/api/v1/runs/r1", secret, **{"X-Request-Id": "req-7"})
    assert answer.status_code == 200
    assert guarded.ask("POST", "/api/v1/runs/r1/restore", secret).status_code == 410, "nothing was kept"
    deleted, created = guarded.audit_log()
    told = [(act.actor, act.action, act.subject, act.project) for act in (deleted, created)]
    assert told == [
        (token.token_id, "run.delete", "r1", "p"),
        ("server-token", "token.create", token.token_id, created.project),
    ]
    assert (deleted.request_id, deleted.time) == ("req-7", guarded.clock.now)
    assert created.details == {"name": "night shift", "role": "operate", "projects": ["p"]}


def test_a_deletion_is_undone_by_who_may_delete_and_both_stand_in_the_audit_log(guarded):
    secret, token = guarded.token("operate", ["p"])
    other, _ = guarded.token("operate", ["q"])
    guarded.fill("p", "r1", secret)
    before = guarded.ask("GET", "/api/v1/runs/r1", secret).json()
    assert guarded.ask("DELETE", "/api/v1/runs/r1?undo_seconds=600", secret).status_code == 200
    assert guarded.ask("GET", "/api/v1/runs/r1", secret).status_code == 410
    guarded.state.maintenance.once()
    assert guarded.ask("POST", "/api/v1/runs/r1/restore", other).status_code in {403, 404}
    guarded.clock.now += 599
    for _ in range(2):
        assert guarded.ask("POST", "/api/v1/runs/r1/restore", secret).json()["run_id"] == "r1"
    assert guarded.ask("GET", "/api/v1/runs/r1", secret).json() == before | {"changed_at": 1_700_000_599.0}
    acts = sorted((act.action, act.actor) for act in guarded.audit_log() if act.subject == "r1")
    assert acts == [("run.delete", token.token_id), ("run.restore", token.token_id)], "a second time does nothing"
    assert guarded.ask("DELETE", "/api/v1/runs/r1?undo_seconds=600", secret).status_code == 200
    guarded.clock.now += 600
    guarded.state.maintenance.once()
    answer = guarded.ask("POST", "/api/v1/runs/r1/restore", secret)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "gone")
    assert guarded.ask("DELETE", "/api/v1/runs/r1?undo_seconds=86401", secret).status_code == 422


@pytest.mark.slow
def test_runs_of_other_projects_are_not_listed_nor_exposed(guarded, reader):
    runs = guarded.ask("GET", "/api/v1/runs", reader).json()["runs"]
    assert [run["run_id"] for run in runs] == ["p-1"]
    assert guarded.ask("GET", "/api/v1/runs?project=q", reader).json()["runs"] == []
    guarded.state.summariser.keep_points()
    text = guarded.ask("GET", "/metrics", reader).text
    assert 'run_id="p-1"' in text
    assert "q-1" not in text
    assert "collage_server_reports" not in text
    everything = guarded.ask("GET", "/metrics", guarded.token("read")[0]).text
    assert 'run_id="q-1"' in everything
    assert "collage_server_reports_total" in everything


def test_of_other_projects_nothing_is_compared_or_told_however_it_is_written(guarded, reader):
    many = "&".join(f"run=x{i}" for i in range(1001))
    for path, status in (
        ("compare?metric=loss&run=p-1", 200),
        ("compare?metric=loss&run=p-1&run=q-1", 404),
        ("compare?metric=loss&run=p-1&r%75n=q-1", 404),
        (f"compare?metric=loss&{many}", 422),
        ("runs/%71-1", 404),
        ("runs/p%2F..%2Fq-1", 404),
    ):
        answer = guarded.ask("GET", f"/api/v1/{path}", reader)
        assert answer.status_code == status, path
        assert status != 404 or answer.json()["error"]["field"] in ("run_id", None), path


def test_who_creates_a_run_again_learns_nothing_of_it_in_another_project_or_as_a_sender(guarded):
    guarded.fill("q", "q-1")
    secret, _ = guarded.token("operate", ["p"])
    answers = []
    for _ in range(2):
        answers.append(guarded.ask("POST", "/api/v1/projects/p/runs", secret, wire.RunCreate(run_id="q-1")))
        guarded.ask("DELETE", "/api/v1/runs/q-1")
    first, second = answers
    assert (first.status_code, second.status_code) == (409, 409)
    assert first.json()["error"]["message"] == second.json()["error"]["message"]
    assert guarded.ask("GET", "/api/v1/runs/q-1", secret).status_code == 404
    assert guarded.ask("GET", "/api/v1/runs/q-1").status_code == 410
    create = wire.RunCreate(run_id="r1", config={"lr": 1.0}, notes="n")
    guarded.ask("POST", "/api/v1/projects/p/runs", message=create)
    guarded.fill("p", "r1")
    sender, _ = guarded.token("ingest", ["p"])
    run = guarded.ask("POST", "/api/v1/projects/p/runs", sender, wire.RunCreate(run_id="r1")).json()
    assert (run["config"], run["notes"], run["latest"]) == ({}, "", {}), "who only sends learns nothing"
    assert guarded.ask("GET", "/api/v1/runs/r1").json()["config"] == {"lr": 1.0}


def test_last_use_is_written_at_most_once_a_minute(guarded):
    secret, token = guarded.token("read", ["p"])
    store, directory = guarded.store.access, guarded.state.directory
    written = store.note_uses = Mock(wraps=store.note_uses)
    for _ in range(20):
        guarded.ask("GET", "/api/v1/runs", secret)
        directory._loaded_at -= 2.0
    assert written.call_count <= 1
    guarded.client.portal.call(directory.close, 5.0)
    assert listed(guarded)[token.token_id].last_used_at == guarded.clock.now


@pytest.fixture
def store(tmp_path):
    opened = SqliteStore(put_migrated(tmp_path), stale_after_seconds=600.0)
    opened.open()
    yield opened.access
    opened.close()


def made(store, role="read", projects=None):
    return create_token(store, wire.TokenCreate(name="n", role=role, projects=projects), 1.0, "host")


def test_a_revocation_by_another_process_is_in_force_within_five_seconds(store):
    created, elapsed = made(store), Clock(100.0)
    directory = TokenDirectory(store, OWN, clock=lambda: 1.0, monotonic=elapsed)

    async def scenario():
        secret = created.secret.encode()
        known = await directory.principal(secret)
        assert known is not None
        assert known.actor == created.token.token_id
        assert await directory.principal(OWN.encode()) is SERVER_TOKEN
        revoke_token(store, created.token.token_id, 2.0, "host")
        elapsed.now += 5.0
        assert await directory.principal(secret) is None

    asyncio.run(scenario())


def test_an_old_copy_is_not_trusted_when_the_database_is_away(store):
    created, elapsed = made(store), Clock(100.0)
    directory = TokenDirectory(store, OWN, clock=lambda: 1.0, monotonic=elapsed)

    async def scenario():
        secret = created.secret.encode()
        assert await directory.principal(secret) is not None
        store.unrevoked_tokens = lambda: 1 / 0
        elapsed.now += 2.0
        assert await directory.principal(secret) is not None
        elapsed.now += 3.0
        with pytest.raises(Busy):
            await directory.principal(secret)
        assert await directory.principal(OWN.encode()) is SERVER_TOKEN

    asyncio.run(scenario())


def test_a_token_made_elsewhere_is_known_soon_and_guesses_cost_few_reads(store):
    elapsed = Clock(100.0)
    directory = TokenDirectory(store, None, clock=lambda: 1.0, monotonic=elapsed)
    reads = store.unrevoked_tokens = Mock(wraps=store.unrevoked_tokens)

    async def scenario():
        for _ in range(100):
            assert await directory.principal(b"guess") is None
        assert reads.call_count == 1
        secret = made(store, "ingest", ["p"]).secret.encode()
        elapsed.now += 0.3
        found = await directory.principal(secret)
        assert found is not None
        assert (found.role, found.projects) == ("ingest", frozenset({"p"}))

    asyncio.run(scenario())


def test_a_change_here_is_in_force_although_an_older_read_was_under_way(store):
    created = made(store)
    directory = TokenDirectory(store, None, clock=lambda: 1.0, monotonic=Clock(100.0))
    valid = store.unrevoked_tokens

    async def scenario():
        loop = asyncio.get_running_loop()
        read, go = asyncio.Event(), asyncio.Event()

        def slow():
            found = valid()
            loop.call_soon_threadsafe(read.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(PATIENCE_SECONDS)
            return found

        store.unrevoked_tokens = slow
        asking = asyncio.create_task(directory.principal(created.secret.encode()))
        await read.wait()
        revoke_token(store, created.token.token_id, 2.0, "host")
        directory.forget()
        go.set()
        assert await asking is None

    asyncio.run(scenario())


def test_views_are_those_of_projects_within_reach(guarded):
    operator, _ = guarded.token("operate")
    for project in ("p", "q"):
        path, view = f"/api/v1/projects/{project}/views", wire.SavedViewCreate(name=f"of {project}", search="x=1")
        assert guarded.ask("POST", path, operator, view).status_code == 201

    def seen(projects, asked=""):
        secret, _ = guarded.token("read", projects=projects)
        return [view["name"] for view in guarded.ask("GET", f"/api/v1/views{asked}", secret).json()["views"]]

    assert seen(None) == ["of p", "of q"]
    assert seen(["q"]) == ["of q"]
    assert seen(["q"], "?project=p") == []
