"""`up`: server and dashboard on this machine in one command, each in a process of its own.

`demo`, studies and `offline.py` start their servers by `Services` too. It owns both processes and ends them
(`tests/contract/test_up.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, MappingProxyType

import click

from collage_monitor.client import Client
from collage_monitor.local import (
    DASHBOARD_PORT,
    SERVER_PORT,
    LocalServer,
    announced,
    data_folder,
    ensure_token,
    read_login,
    require_free,
    token_path,
)

__all__ = ["Services", "environment_without_settings", "up"]

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


class Services:
    """Server and dashboard as child processes: entering starts the server, leaving stops both, dashboard first.

    Their log is shown, but not the addresses that they print.

    `alone`: they ignore settings of the environment, such as another database.
    `defaults`: settings that hold unless the environment overrides them.
    """

    def __init__(
        self,
        folder: Path,
        server_port: int,
        dashboard_port: int,
        *,
        alone: bool = False,
        defaults: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.token = ensure_token(folder)
        self.server_url = f"http://127.0.0.1:{server_port}"
        self.dashboard_url = f"http://127.0.0.1:{dashboard_port}"
        self._ports = (server_port, dashboard_port)
        self._alone = alone
        # Messages about incidents link to the dashboard's pages.
        self._defaults = {"COLLAGE_SERVER_DASHBOARD_URL": self.dashboard_url, **defaults}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Services:
        server_port, dashboard_port = self._ports
        # Another program on this port would be mistaken for the new service.
        require_free("127.0.0.1", server_port, "--port")
        require_free("127.0.0.1", dashboard_port, "--dashboard-port")
        try:
            self._start("serve", "--dir", str(self.folder), "--port", str(server_port))
            self._wait_for(self.server_url)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_dashboard(self) -> None:
        """Return when the dashboard answers."""
        self._start("serve", "dashboard", "--port", str(self._ports[1]), "--server-url", self.server_url)
        self._wait_for(self.dashboard_url)

    def watch(self) -> None:
        """Block until one of the processes ends, which is an error, or the user interrupts."""
        while True:
            self._check()
            time.sleep(0.5)

    def stop(self) -> None:
        """Ask every process to end, and end it after ten seconds if it does not."""
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _start(self, *arguments: str) -> None:
        with_token = [*arguments, "--token-file", str(token_path(self.folder))]
        command = [sys.executable, "-c", "from collage_monitor.command import main; main()", *with_token]
        settings = environment_without_settings() if self._alone else dict(os.environ)
        environment = {**self._defaults, **settings}
        silent = subprocess.DEVNULL
        self._processes.append(
            subprocess.Popen(command, stdin=silent, stdout=silent, env=environment, start_new_session=True)
        )

    def _wait_for(self, address: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with Client(address, timeout_seconds=2.0) as client:
            while not client.healthy():
                self._check()
                if time.monotonic() > deadline:
                    raise click.ClickException(f"nothing answered at {address} within {_START_SECONDS:.0f} seconds")
                time.sleep(0.1)

    def _check(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                words = process.args[3:5] if isinstance(process.args, list) else ["a service"]
                verb = " ".join(word for word in words if not word.startswith("-"))
                raise click.ClickException(
                    f"{verb} ended with status {process.returncode}; its last lines, above, say why"
                )


def environment_without_settings() -> dict[str, str]:
    """This process's environment without Collage Monitor's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COLLAGE_")}


@click.command("up")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder: database, spool, token.")
@click.option("--port", default=SERVER_PORT, show_default=True, help="Port of the server.")
@click.option("--dashboard-port", default=DASHBOARD_PORT, show_default=True, help="Port of the dashboard.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
def up(folder: Path | None, port: int, dashboard_port: int, as_json: bool) -> None:
    """Start server and dashboard; Ctrl-C stops them."""
    where = data_folder(folder).resolve()
    signal.signal(signal.SIGTERM, _interrupt)
    with Services(where, port, dashboard_port) as services:
        server = LocalServer(services.server_url, services.dashboard_url, str(where), os.getpid())
        # Announce the server first: once the dashboard answers, trainings must be able to find the server.
        with announced(server) as found:
            services.start_dashboard()
            _say(server, found, as_json=as_json)
            try:
                services.watch()
            except KeyboardInterrupt:
                click.echo("stopping")


def _say(server: LocalServer, found: bool, *, as_json: bool) -> None:
    if as_json:
        addresses = {
            "dashboard_url": server.dashboard_url,
            "server_url": server.server_url,
            "dir": server.folder,
        }
        click.echo(json.dumps(addresses))
        return
    click.echo(f"dashboard  {server.dashboard_url}\nserver     {server.server_url}\ndata       {server.folder}")
    login = read_login()
    if found and login is None:
        click.echo("Your trainings on this machine that call collage_agent.init() find it. Ctrl-C stops.")
    else:
        first = f"You are logged in at {login.server_url}, which" if login else "Another `collage-monitor up`"
        click.echo(
            f"{first} is found first. For this one, in the training's terminal:\n"
            f"  export COLLAGE_SERVER_URL={server.server_url} COLLAGE_DIR={server.folder}\nCtrl-C stops."
        )


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
