"""Starting services: a port in use is named before anything starts, and a service that ends is reported."""

import signal
import socket

import click
import pytest
from click.testing import CliRunner

from collage_monitor.command.up import Services, up
from collage_monitor.errors import CollageError
from collage_monitor.local import local_server
from tests.ports import free_port

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("option", ["--port", "--dashboard-port"])
def test_a_port_in_use_is_named(tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = (port, free_port()) if option == "--port" else (free_port(), port)
        with (
            pytest.raises(CollageError, match=f"127.0.0.1:{port} .* another {option}"),
            Services(tmp_path, *ports),
        ):
            pytest.fail("services started")


def test_both_services_answer_and_end_and_the_server_is_announced_once_they_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    port, page = free_port(), free_port()
    announced, processes, wait_for, watch = {}, [], Services._wait_for, Services.watch

    def asked(services, address):
        wait_for(services, address)
        announced[address] = local_server()

    def killed(services):
        processes.extend(services._processes)
        assert [process.poll() for process in processes] == [None, None]
        processes[1].kill()
        with pytest.raises(click.ClickException, match="dashboard ended with status -9"):
            watch(services)
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(Services, "_wait_for", asked)
    monkeypatch.setattr(Services, "watch", killed)
    arguments = ["--dir", str(tmp_path / "data"), "--port", str(port), "--dashboard-port", str(page)]
    result = CliRunner().invoke(up, arguments)
    assert result.exit_code == 0, result.output
    assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)
    assert announced[f"http://127.0.0.1:{port}"] is None
    found = announced[f"http://127.0.0.1:{page}"]
    assert found is not None
    assert found.server_url == f"http://127.0.0.1:{port}"
