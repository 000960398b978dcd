"""Starting services: a port in use is named before anything starts, and a service that ends is reported."""

import signal
import socket

import click
import pytest
from click.testing import CliRunner

from collage_monitor.command.up import Services, up
from collage_monitor.local import local_server
from tests.ports import free_port

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("option", ["--port", "--dashboard-port"])
def test_a_port_in_use_is_named(tmp_path, option):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = (port, free_port()) if option == "--port" else (free_port(), port)
        with (
            pytest.raises(click.ClickException, match=f"127.0.0.1:{port} .* another {option}"),
            Services(tmp_path, *ports),
        ):
            pytest.fail("services started")


def test_both_services_answer_and_end(tmp_path):
    with Services(tmp_path, free_port(), free_port()) as services:
        services.start_dashboard()
        processes = list(services._processes)
        assert [process.poll() for process in processes] == [None, None]
        processes[1].kill()
        with pytest.raises(click.ClickException, match="dashboard ended with status -9"):
            services.watch()
    assert all(process.poll() is not None for process in processes)


def test_the_server_is_announced_before_the_dashboard_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    port, page = free_port(), free_port()
    announced, wait_for = {}, Services._wait_for

    def asked(services, address):
        wait_for(services, address)
        announced[address] = local_server()

    def interrupted(_services):
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(Services, "_wait_for", asked)
    monkeypatch.setattr(Services, "watch", interrupted)
    arguments = ["--dir", str(tmp_path / "data"), "--port", str(port), "--dashboard-port", str(page)]
    assert CliRunner().invoke(up, arguments).exit_code == 0
    assert announced[f"http://127.0.0.1:{port}"] is None
    found = announced[f"http://127.0.0.1:{page}"]
    assert found is not None
    assert found.server_url == f"http://127.0.0.1:{port}"
