"""The data folder and its token."""

import json
import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from collage_monitor.errors import CollageError
from collage_monitor.local import (
    LocalServer,
    announced,
    data_folder,
    ensure_token,
    find_token,
    local_server,
    read_token,
    require_free,
    server_address,
    token_path,
    web_address,
)
from tests.forking import SERVER, run_command

pytestmark = pytest.mark.slow


def test_the_folder_comes_from_argument_environment_and_home(tmp_path):
    assert data_folder(tmp_path, {"COLLAGE_DIR": "/x"}) == tmp_path
    assert str(data_folder(None, {"COLLAGE_DIR": "/x"})) == "/x"
    assert str(data_folder(None, {"XDG_DATA_HOME": "/y"})) == "/y/collage-monitor"
    assert data_folder(None, {}).parts[-2:] == ("share", "collage-monitor")


def test_a_token_is_made_once_and_private(tmp_path):
    folder = tmp_path / "new"
    assert read_token(folder) is None
    token = ensure_token(folder)
    assert len(token) >= 43
    assert ensure_token(folder) == read_token(folder) == token
    assert stat.S_IMODE(token_path(folder).stat().st_mode) == 0o600


def test_several_that_start_together_share_one_token(tmp_path):
    for attempt in range(20):
        folder, together = tmp_path / str(attempt), Barrier(4)

        def start(_, folder=folder, together=together):
            together.wait()
            return ensure_token(folder)

        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(start, range(4)))) == 1
        assert [path.name for path in folder.iterdir()] == ["token"]


@pytest.mark.parametrize("content", [b"", "tök".encode()])
def test_a_file_without_a_token_is_named(tmp_path, content):
    token_path(tmp_path).write_bytes(content)
    assert read_token(tmp_path) is None
    with pytest.raises(PermissionError, match="remove it to make a new token"):
        ensure_token(tmp_path)


@pytest.fixture
def places(tmp_path):
    """An environment whose state folder is empty, and a server over a folder of its own."""
    folder = tmp_path / "elsewhere"
    environment = {"XDG_STATE_HOME": str(tmp_path / "state"), "COLLAGE_DIR": str(tmp_path / "data")}
    server = LocalServer("http://127.0.0.1:5000", "http://127.0.0.1:5001", str(folder), os.getpid())
    return environment, server, ensure_token(folder)


def test_a_server_is_found_with_its_token_while_it_is_announced(places):
    environment, server, token = places
    state = data_folder(None, {"XDG_DATA_HOME": environment["XDG_STATE_HOME"]})
    assert (local_server(environment), server_address(environment)) == (None, "http://127.0.0.1:7420")
    with announced(server, environment) as found:
        assert found
        assert (local_server(environment), server_address(environment)) == (server, server.server_url)
        assert find_token("http://localhost:5000", environment=environment) == token
        (path,) = state.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert token not in path.read_text()
    assert local_server(environment) is None
    assert list(state.iterdir()) == []


def test_the_first_server_stays_the_one_that_is_found_and_its_token_is_for_it_alone(places):
    environment, server, token = places
    own = ensure_token(data_folder(None, environment))
    with announced(server, environment):
        assert find_token("http://collage.example:5000", environment=environment) is None
        assert find_token("http://127.0.0.1:7420", environment=environment) == own != token
        with announced(replace(server, server_url="http://127.0.0.1:6000"), environment) as found:
            assert not found
        assert local_server(environment) == server


def test_a_server_that_is_gone_is_not_found(places):
    environment, server, _ = places
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with announced(replace(server, process_id=int(done.stdout)), environment):
        assert local_server(environment) is None
        with announced(server, environment) as found:
            assert found
    path = data_folder(None, {"XDG_DATA_HOME": environment["XDG_STATE_HOME"]}) / "server.json"
    for content in ("", "[]", json.dumps({"server_url": 3}), "{"):
        path.write_text(content)
        assert local_server(environment) is None


@pytest.mark.parametrize(
    ("host", "written"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]"), ("[::1]", "[::1]")],
)
def test_an_ipv6_address_stands_in_brackets(host, written):
    assert web_address(host, 7421) == f"http://{written}:7421"


def test_a_port_that_is_taken_is_named_with_the_option_to_change(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CollageError, match=f"127.0.0.1:{port} cannot be listened on .*another --port"):
            require_free("127.0.0.1", port, "--port")
        told = run_command(SERVER, "serve", "--port", port, "--dir", tmp_path)
    assert told.returncode == 1
    assert "cannot be listened on" in told.stderr
    require_free("127.0.0.1", port, "--port")
