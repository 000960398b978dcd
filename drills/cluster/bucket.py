"""One bucket whose objects lie on two of three volume servers each (SeaweedFS, replication 001)."""

from __future__ import annotations

import signal
import subprocess

import httpx

from tests.ports import free_port
from tests.server.store.seaweed import ObjectStore
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["VOLUMES", "ReplicatedObjectStore"]

VOLUMES = (1, 2, 3)
_REPLICATION = "001"
"""Another copy on another server of the same rack."""


class ReplicatedObjectStore(ObjectStore):
    """Master, filer and S3 in one process, and each volume server in one of its own."""

    def __init__(self, folder, program):
        super().__init__(folder, program)
        self._program = program
        self._command += ["-volume=false", f"-master.defaultReplication={_REPLICATION}"]
        self._volume_ports = {number: (free_port(), free_port()) for number in VOLUMES}
        self._volumes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self):
        """The volume servers first: whether an object is taken tells that all are there."""
        for number in VOLUMES:
            self.start_volume(number)
        super().start()
        until(lambda: self.volumes_known() == len(VOLUMES), "three volume servers")

    def start_volume(self, number):
        """One volume server, on the same port and data each time."""
        folder = self.folder / f"volume-{number}"
        folder.mkdir(exist_ok=True)
        port, grpc = self._volume_ports[number]
        master = f"127.0.0.1:{self.ports['master.port']}.{self.ports['master.port.grpc']}"
        command = [
            str(self._program),
            "volume",
            f"-dir={folder}",
            f"-master={master}",
            f"-port={port}",
            f"-port.grpc={grpc}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-max=1000",
        ]
        with (self.folder / f"volume-{number}.log").open("ab") as log:
            self._volumes[number] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill_volume(self, number):
        """As a power cut would."""
        process = self._volumes.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)

    def volumes_known(self):
        """How many volume servers the master knows to be there."""
        try:
            address = f"http://127.0.0.1:{self.ports['master.port']}/dir/status"
            racks = httpx.get(address, trust_env=False).json()["Topology"]["DataCenters"] or []
        except httpx.HTTPError:
            return 0
        return sum(len(rack["DataNodes"] or []) for center in racks for rack in center["Racks"])

    def kill(self):
        """All of it."""
        super().kill()
        for number in list(self._volumes):
            self.kill_volume(number)
