"""Podman with a store of its own, and podman-compose in an environment of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

__all__ = ["FOLDER", "HERE", "ROOT", "ContainerEngine"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build/containers"
_CONTAINERS = """
[containers]
default_ulimits = [{limits}]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
# Podman refuses a long path of what runs.
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "/run/collage-containers"
"""
_COMPOSE = "podman-compose==1.6.0"
_ASKED_FOR = 32768


def _limits():
    """Podman's default limits are refused where this process may not raise its own so far."""
    for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        limits = [limit for limit in resource.getrlimit(kind) if limit != resource.RLIM_INFINITY]
        yield f'"{name}={min(_ASKED_FOR, *limits)}:{min(_ASKED_FOR, *limits)}"'


class ContainerEngine:
    """Its images, containers and networks lie in `folder`; the machine's own are neither used nor changed."""

    def __init__(self, folder=FOLDER):
        self.folder = folder
        self.checkout = folder / "checkout"
        self.folder.mkdir(parents=True, exist_ok=True)
        # Without systemd nobody asks for a service's health, unless we do.
        self.environment = os.environ | {"DISABLE_HC_SYSTEMD": "true"}
        for name, text in (("containers", _CONTAINERS), ("storage", _STORAGE)):
            file = folder / f"{name}.conf"
            file.write_text(text.format(folder=folder, limits=", ".join(_limits())))
            self.environment[f"CONTAINERS_{'STORAGE_' * (name == 'storage')}CONF"] = str(file)

    def podman(self, *arguments):
        """What podman said on standard output; RuntimeError with all that it said where it fails."""
        return self.run("podman", *arguments)

    def compose(self, *arguments):
        """As `podman`, of podman-compose with the shipped file and the stand-ins' names."""
        program = self.folder / "compose/bin/podman-compose"
        files = [self.checkout / "docker-compose.yml", HERE / "override.yml"]
        return self.run(program, *(part for file in files for part in ("--file", file)), *arguments)

    def install_compose(self):
        """From the package index, once."""
        environment = self.folder / "compose"
        if not (environment / "bin/podman-compose").exists():
            self.run(sys.executable, "-m", "venv", environment)
            self.run(environment / "bin/pip", "install", "--quiet", _COMPOSE)

    def run(self, *arguments):
        done = subprocess.run(
            [str(argument) for argument in arguments],
            # A container that takes too much memory leaves a file called `oom` where Podman was started.
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            said = (done.stdout + done.stderr)[-4000:]
            raise RuntimeError(f"{' '.join(map(str, arguments))} ended with {done.returncode}:\n{said}")
        return done.stdout
