"""`up` and `serve` beside what looks for them: trainings and terminals that were told nothing."""

import json

import collage_agent as collage
import httpx
import pytest

from tests.forking import TRAINING, run_command, run_forked
from tests.ports import command, free_port, running

pytestmark = pytest.mark.slow

REPORTING = """
import collage_agent as collage
with collage.init("found", run_id="by-itself"):
    for step in range(1, 4):
        collage.log({"loss": 1.0 / step})
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty state folder and a data folder of the user's that is not the server's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    return tmp_path


def test_trainings_and_terminals_find_a_server_in_a_folder_of_its_own(elsewhere):
    port, page = free_port(), free_port()
    up = command("up", "--dir", elsewhere / "own", "--port", port, "--dashboard-port", page)
    with running(up, f"http://127.0.0.1:{page}/healthz", elsewhere / "log"):
        trained = run_forked(TRAINING, "-c", REPORTING)
        assert trained.returncode == 0, trained.stderr
        assert f"http://127.0.0.1:{page}/run/by-itself" in trained.stdout
        assert httpx.get(f"http://127.0.0.1:{page}/run/by-itself", trust_env=False).is_success
        assert "Reports are kept" not in trained.stderr
        listed = run_command(TRAINING, "list", "--json")
        assert [run["run_id"] for run in json.loads(listed.stdout)["rows"]] == ["by-itself"], listed.stderr
        checked = json.loads(run_command(TRAINING, "doctor", "--json").stdout)
        assert [check["text"] for check in checked["checks"] if check["name"] == "server"] == [
            f"http://127.0.0.1:{port} answers"
        ]
    printed = (elsewhere / "log").read_text()
    assert "find it" in printed
    assert [line.split()[1] for line in printed.splitlines() if line.startswith(("server ", "dashboard "))] == [
        f"http://127.0.0.1:{page}",
        f"http://127.0.0.1:{port}",
    ], "each address once"
    assert list((elsewhere / "state").glob("*/*")) == []


def test_a_server_that_knows_its_dashboard_says_so_to_trainings_and_terminals(elsewhere, monkeypatch, capsys):
    """As on a team's server: neither `up` nor `login` has said anything on this machine."""
    monkeypatch.setenv("COLLAGE_SERVER_DASHBOARD_URL", "https://monitor.example:7421")
    address = f"http://127.0.0.1:{free_port()}"
    serve = command("serve", "--dir", elsewhere / "own", "--port", address.rpartition(":")[2])
    with running(serve, f"{address}/healthz", elsewhere / "log"):
        collage.init("p", run_id="far", server_url=address, dir=elsewhere / "own")
        collage.log({"loss": 1.0}, step=1)
        collage.finish()
        opened = run_command(TRAINING, "open", "--print", "--server-url", address)
    assert "https://monitor.example:7421/run/far\n" in capsys.readouterr().out
    assert opened.stdout == "https://monitor.example:7421\n", opened.stderr


def test_beside_a_server_alone_no_link_is_printed_and_a_token_is_asked_for_in_words(elsewhere, capsys):
    address = f"http://127.0.0.1:{free_port()}"
    serve = command("serve", "--dir", elsewhere / "own", "--port", address.rpartition(":")[2])
    with running(serve, f"{address}/healthz", elsewhere / "log"):
        refused = run_command(TRAINING, "list", "--server-url", address)
        assert refused.returncode == 1
        assert f"{address} asks for a token: set COLLAGE_TOKEN" in refused.stderr
        assert "Bearer" not in refused.stderr
        collage.init("p", server_url=address, dir=elsewhere / "data")
        collage.log({"loss": 1.0}, step=1)
        collage.finish()
        printed = capsys.readouterr()
        assert "set COLLAGE_TOKEN" in printed.err
        assert "Bearer" not in printed.err
        collage.init("p", server_url=address, dir=elsewhere / "own")
        collage.log({"loss": 1.0}, step=1)
        collage.finish()
        printed = capsys.readouterr().out
    assert f"collage-monitor serve dashboard --server-url {address}" in printed
    assert f"{address}/" not in printed
