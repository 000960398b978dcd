"""The services of the shipped Compose file, started, asked and stopped; and a training beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

from drills.containers.engine import ROOT
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["ADDRESS", "NAME", "SERVICES", "TAKEN", "TOLD", "Stack"]

NAME, ADDRESS = "monitor.example", "198.51.100.10"
TAKEN = "172.30.74.0/24"
"""The range that the file has by default: here another network has it, that of the training."""
_SETTINGS = {"COLLAGE_NAME": NAME, "COLLAGE_ADDRESS": ADDRESS, "COLLAGE_NETWORK": "172.30.75"}
TOLD = {"COLLAGE_SERVER_ALERT_INTERVAL_SECONDS": "16", "COLLAGE_SERVER_OIDC_SCOPES": "openid groups"}
"""Settings in the file .env."""
SERVICES = ("database", "server", "dashboard", "prometheus", "alertmanager", "proxy")
_ORDER = ("secrets", "database", "tokens", *SERVICES[1:])
"""Podman 4.3 does not wait for the health of what a service depends on."""
_LOG_CHARACTERS = 2000


class Stack:
    """`url` is the server's behind the proxy, `certificate` a file with the one that it shows."""

    url = f"https://{NAME}:7420"

    def __init__(self, engine):
        self._engine = engine
        engine.environment |= _SETTINGS
        (engine.checkout / ".env").write_text("".join(f"{name}='{value}'\n" for name, value in TOLD.items()))
        self.certificate = engine.folder / "certificate.pem"

    @contextmanager
    def alone(self):
        """Removes what an earlier walk left, and at its end all of this one. A failure shows the services' logs."""
        self._remove_all()
        try:
            yield
        except BaseException as error:
            for name in self.containers():
                error.add_note(f"{name}: {self._logs(name)[-_LOG_CHARACTERS:]}")
            raise
        finally:
            self._remove_all()

    def _remove_all(self):
        self._engine.podman("pod", "rm", "--all", "--force")
        self._engine.podman("rm", "--all", "--force", "--time", "0")
        self._engine.podman("volume", "rm", "--all", "--force")
        self._engine.podman("network", "prune", "--force")

    def take_the_default_range(self):
        self._engine.podman("network", "create", "--subnet", TAKEN, "team")

    def up(self):
        """Every service is healthy."""
        for name in _ORDER:
            self._engine.compose("up", "--detach", "--no-deps", "--no-build", name)
            if name in SERVICES:
                self.wait_for(name)
            else:
                status = self._engine.podman("wait", _container(name)).strip()
                assert status == "0", f"{name} ended with {status}: {self._logs(_container(name))}"
        self.certificate.write_text(self.ask("server", "cat", "/secrets/people/certificate.pem"))

    def down(self):
        """Containers and networks are gone; volumes stay."""
        self._engine.compose("down")

    def restart(self, name):
        """The service is healthy again."""
        self._engine.compose("restart", name)
        self.wait_for(name)

    def wait_for(self, name):
        """Until its own health check, from the Compose file, passes."""

        def is_healthy():
            try:
                self._engine.podman("healthcheck", "run", _container(name))
            except RuntimeError:
                return False
            return True

        until(is_healthy, f"the health of {name}")

    def containers(self):
        """Names of all, whether they run or not."""
        return self._engine.podman("ps", "--all", "--format", "{{.Names}}").split()

    def ask(self, name, *command):
        """What a command in a service's container said; RuntimeError with its status where it fails."""
        return self._engine.compose("exec", "-T", name, *command)

    def agents_token(self):
        """As docs/team-server.md reads it."""
        return self.ask("server", "cat", "/secrets/agents/token").strip()

    def make_reader(self):
        """A token for somebody who reads, as docs/team-server.md makes it."""
        made = ("token", "create", "--offline", "--name", "ada", "--role", "read", "--all-projects", "--json")
        return json.loads(self.ask("server", "collage-monitor", *made))["secret"]

    def train(self):
        """On the other network. It sees this machine's files, for torch; what it writes stays in its container."""
        told = {
            "COLLAGE_SERVER_URL": self.url,
            "COLLAGE_TOKEN": self.agents_token(),
            "COLLAGE_DIR": "/run/collage",
            "SSL_CERT_FILE": self.certificate,
            "OMP_NUM_THREADS": "1",
        }
        environment = [part for name, value in told.items() for part in ("--env", f"{name}={value}")]
        place = ["--network", "team", "--volume", f"{ROOT}:{ROOT}:ro", "--workdir", ROOT, "--rootfs", "/:O"]
        command = [sys.executable, "-m", "drills.containers.training"]
        self._engine.podman("run", "--detach", "--name", "training", *environment, *place, *command)

    def stop_training(self):
        """How many steps it took; its last reports have been sent, or are given up."""
        self._engine.podman("stop", "--time", int(PATIENCE_SECONDS), "training")
        return int(self._logs("training").split()[-1])

    def _logs(self, container):
        done = subprocess.run(
            ["podman", "logs", container],
            env=self._engine.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout


def _container(service):
    return f"collage-monitor_{service}_1"
