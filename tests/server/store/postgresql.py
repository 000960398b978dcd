"""A PostgreSQL cluster of the tests' own: made in a temporary folder, ended with the session."""

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.system import lacking
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["Cluster", "find_programs", "programs_or_skip"]

PROGRAMS = ("initdb", "postgres", "pg_isready", "psql", "pg_dump", "pg_restore")
SETTINGS = ("max_connections=80", "shared_buffers=64MB", "listen_addresses=", "log_min_messages=fatal")


def find_programs() -> Path | None:
    """The folder that holds the programs, or None; Debian keeps them off the path, by version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    found += [Path(on_path).resolve().parent] if on_path else []
    return next((folder for folder in found if all((folder / name).exists() for name in PROGRAMS)), None)


def programs_or_skip():
    """The programs; without them the test is skipped, under CI it fails."""
    return find_programs() or lacking("no PostgreSQL programs (initdb, postgres); install postgresql")


_REFUSES = 1
"""What pg_isready ends with where a server answers that it takes no connections now."""


class Cluster:
    """One server process on a Unix socket in `folder`; PostgreSQL refuses root, so root hands it to `postgres`.

    `wrap` is a command that runs the server, strace for one.
    """

    def __init__(self, folder: str | Path, programs: Path, settings: Sequence[str] = SETTINGS) -> None:
        self.folder = Path(folder)
        self.programs = programs
        self.settings = settings
        self.wrap: list[str] = []
        self.user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self.process: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        """initdb."""
        if os.geteuid() == 0:
            shutil.chown(self.folder, self.user)
        arguments = ["-D", str(self.folder / "data"), "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync"]
        subprocess.run([self.programs / "initdb", *arguments], check=True, capture_output=True, **self._identity())

    def start(self, *, until_ready: bool = True) -> None:
        """Start, and wait until it accepts connections, or, without `until_ready`, until it refuses them."""
        options = [part for setting in self.settings for part in ("-c", setting)]
        folder = str(self.folder)
        command = [*self.wrap, str(self.programs / "postgres"), "-D", f"{folder}/data", "-k", folder, *options]
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._identity()
        )
        self.process = process
        ready = [str(self.programs / "pg_isready"), "-h", folder, "-t", "1", "-q"]

        def answers() -> bool:
            assert process.poll() is None, "postgres ended at once"
            return subprocess.run(ready).returncode == (0 if until_ready else _REFUSES)

        until(answers, "the first answer of postgres")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Made, started, and stopped at the end."""
        self.create()
        self.start()
        try:
            yield
        finally:
            self.stop()

    def promote(self) -> None:
        """Let a standby take connections, once it has read that it is one."""
        command = [str(self.programs / "pg_ctl"), "promote", "-D", str(self.folder / "data")]
        until(
            lambda: subprocess.run(command, capture_output=True, **self._identity()).returncode == 0,
            "the promotion of a standby",
        )

    def kill(self) -> None:
        """As a power cut would: no shutdown checkpoint. Its children notice and end."""
        self.end(signal.SIGKILL)

    def stop(self) -> None:
        """Fast shutdown."""
        self.end(signal.SIGINT)

    def end(self, number: int) -> None:
        """Signal the postmaster (SIGQUIT: immediate shutdown), and wait until it is gone."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            os.kill(int((self.folder / "data" / "postmaster.pid").read_text().split()[0]), number)
            process.wait(PATIENCE_SECONDS)

    def url(self, database: str) -> str:
        """The SQLAlchemy URL of a database."""
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def execute(self, statement: str, database: str = "postgres") -> str:
        """Run one statement with psql."""
        given = ("-h", str(self.folder), "-U", "postgres", "-d", database, "-v", "ON_ERROR_STOP=1", "-qAtc")
        command = [str(self.programs / "psql"), *given, statement]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def _identity(self) -> dict[str, Any]:
        return {"user": self.user, "cwd": "/"} if os.geteuid() == 0 else {"cwd": "/"}
