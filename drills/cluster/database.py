"""Three nodes of PostgreSQL under Patroni and etcd, and HAProxy before them and before the servers.

What ships in server/deploy/cluster runs here, filled by its own script with this machine's ports.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx

from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["NODES", "SHIPPED", "DatabaseCluster", "fill", "values"]

SHIPPED = Path(__file__).parents[2] / "server/deploy/cluster"
NODES = (1, 2, 3)
_HOST = "127.0.0.1"
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def values(programs, servers):
    """What `cluster.env` holds, for three nodes on this machine; `servers`: the ports of ours."""
    found = {
        "NETWORK": f"{_HOST}/32",
        "SUPERUSER_PASSWORD": secrets.token_hex(24),
        "REPLICATION_PASSWORD": secrets.token_hex(24),
        "DATABASE_FRONT": f"{_HOST}:{free_port()}",
        "SERVER_FRONT": f"{_HOST}:{free_port()}",
        "PROGRAMS": str(programs),
    }
    for node, server in zip(NODES, servers, strict=True):
        found |= {f"{name}_{node}": f"{_HOST}:{free_port()}" for name in ("ETCD", "PEER", "PATRONI", "DATABASE")}
        found |= {f"HOST_{node}": _HOST, f"SERVER_{node}": f"{_HOST}:{server}"}
    return found


def fill(node, folder, given):
    """The shipped files of a node into `folder`, by the shipped script; raises where one value is missing."""
    folder.mkdir(exist_ok=True)
    here = {"ETCD_DATA": f"{folder}/etcd", "DATABASE_DATA": f"{folder}/data", "SOCKETS": str(folder)}
    filled = folder / "cluster.env"
    filled.write_text("".join(f"{name}='{value}'\n" for name, value in {**given, **here}.items()))
    environment = {"PATH": _PATH, "CLUSTER_ENV": str(filled)}
    subprocess.run(["sh", SHIPPED / "fill.sh", str(node), folder], env=environment, check=True)


class DatabaseCluster:
    """All pieces as processes of this one, by name: etcd1, patroni1, haproxy and so on."""

    def __init__(self, folder, programs, servers):
        self.folder = Path(folder)
        self.programs = programs
        self.values = values(programs, servers)
        self.server_url = f"http://{self.values['SERVER_FRONT']}"
        root = os.geteuid() == 0
        self._user = "postgres" if root else pwd.getpwuid(os.geteuid()).pw_name
        self._identity: dict[str, Any] = (
            {"user": self._user, "group": self._user, "extra_groups": []} if root else {}
        )
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self):
        """All of it; on the first call it makes its data."""
        self.folder.chmod(0o755)
        for node in NODES:
            self._fill(node)
            self.start_piece(f"etcd{node}")
        for node in NODES:
            self.start_piece(f"patroni{node}")
        self.start_piece("haproxy")
        until(self.is_whole, "a primary and two standbys")
        password = self.values["SUPERUSER_PASSWORD"]
        until(lambda: self._answers("SELECT 1"), "the primary behind HAProxy")
        self.execute(f"CREATE USER collage PASSWORD '{password}'")
        self.execute("CREATE DATABASE collage OWNER collage")

    def _fill(self, node):
        folder = self._home(node)
        fill(node, folder, self.values)
        if self._identity:
            for path in (folder, *folder.iterdir()):
                shutil.chown(path, self._user, self._user)

    def _home(self, node):
        return self.folder / f"node{node}"

    def start_piece(self, name):
        """One process, as an init system would start it again."""
        kind, node = (name, 1) if name == "haproxy" else (name[:-1], int(name[-1]))
        home = self._home(node)
        command = {
            "etcd": ["etcd", "--config-file", str(home / "etcd.yml")],
            "patroni": ["patroni", str(home / "patroni.yml")],
            "haproxy": ["haproxy", "-W", "-f", str(home / "haproxy.cfg")],
        }[kind]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env={"PATH": _PATH, "LANG": "C.UTF-8", "HOME": str(home)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._identity,
            )

    def kill_piece(self, name):
        """SIGKILL; HAProxy's worker, too, as a machine that is lost takes both."""
        process = self._running.pop(name)
        if name == "haproxy":
            os.killpg(process.pid, signal.SIGKILL)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)

    def kill_postgres(self, node):
        """SIGKILL of the postmaster: its children notice and end."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):
            os.kill(int((self._home(node) / "data/postmaster.pid").read_text().split()[0]), signal.SIGKILL)

    def says(self, node):
        """What its Patroni says of a node now: role, state, timeline, who follows it; {} if there is no answer."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(
                f"http://{self.values[f'PATRONI_{node}']}/patroni", trust_env=False, timeout=5.0
            ).json()
        return {}

    def leader(self):
        """The number of the node that is primary and takes reports, or None."""
        for node in NODES:
            with contextlib.suppress(httpx.HTTPError):
                address = f"http://{self.values[f'PATRONI_{node}']}/primary"
                if httpx.get(address, trust_env=False, timeout=5.0).is_success:
                    return node
        return None

    def is_whole(self):
        """A primary, and two standbys on its timeline, one of them behind every commit.

        A primary that is killed while the one before it is still being rewound leaves that one unusable.
        """
        said = [self.says(node) for node in NODES]
        primary: dict[str, Any] = next((entry for entry in said if entry.get("role") in {"master", "primary"}), {})
        followers = primary.get("replication", [])
        return (
            {entry.get("state") for entry in said} == {"running"}
            and len({entry.get("timeline") for entry in said}) == 1
            and [entry["state"] for entry in followers] == ["streaming"] * (len(NODES) - 1)
            and any(entry.get("sync_standby") for entry in said)
        )

    def url(self, database):
        """The SQLAlchemy URL of a database, of whoever is primary."""
        return (
            f"postgresql://collage:{self.values['SUPERUSER_PASSWORD']}@{self.values['DATABASE_FRONT']}/{database}"
        )

    def execute(self, statement, database="postgres"):
        """Run one statement on the primary, as superuser."""
        host, port = self.values["DATABASE_FRONT"].split(":")
        command = [self.programs / "psql", "-h", host, "-p", port, "-U", "postgres", "-d", database]
        environment = {"PATH": _PATH, "PGPASSWORD": self.values["SUPERUSER_PASSWORD"], "PGCONNECT_TIMEOUT": "10"}
        options = ["-v", "ON_ERROR_STOP=1", "-qAtc", statement]
        done = subprocess.run([*command, *options], env=environment, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def _answers(self, statement):
        try:
            return self.execute(statement)
        except subprocess.CalledProcessError:
            return ""

    def logs(self):
        """The end of each log."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self.folder.glob("*.log")
        )

    def stop(self):
        """All of it, also what a killed Patroni left behind."""
        for name in list(self._running):
            self.kill_piece(name)
        for node in NODES:
            self.kill_postgres(node)
