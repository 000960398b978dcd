"""Starting services: a port in use is named before anything starts, and a service that ends is reported."""

import socket

import click
import pytest

from collage_monitor.command.up import Services
from tests.ports import free_port


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
        processes = list(services._processes)
        assert [process.poll() for process in processes] == [None, None]
        processes[1].kill()
        with pytest.raises(click.ClickException, match="dashboard ended with status -9"):
            services.watch()
    assert all(process.poll() is not None for process in processes)
