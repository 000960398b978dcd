"""A server process of a benchmark's own, and a keep-alive connection that costs its client little."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

from collage_monitor import wire

__all__ = ["Connection", "Server", "cpu_seconds", "request_of", "run_server"]

_SOCKET_SECONDS: Final = 60.0
_CLOSED: Final = "the server closed the connection in the middle of an answer"


def request_of(path: str, body: bytes) -> bytes:
    """A whole POST of msgpack, ready to be sent: encoding it is not what is measured."""
    head = f"POST /api/v1{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {wire.MSGPACK}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Connection:
    """One keep-alive connection: a request is sent whole, its answer read whole, nothing else is understood."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_SOCKET_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def exchange(self, request: bytes) -> tuple[int, bytes | bytearray]:
        """Status and body of the answer."""
        self._socket.sendall(request)
        received = self._receive()
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._receive()
        status, size = _head_of(received[:end])
        start = received[end + 4 :]
        return status, start if len(start) == size else self._receive_rest(start, size)

    def post(self, path: str, body: bytes) -> bytes | bytearray:
        """The answer to a POST; anything but success is an error."""
        status, answer = self.exchange(request_of(path, body))
        if status >= 300:
            raise RuntimeError(f"{path}: {status} {answer[:300]!r}")
        return answer

    def _receive_rest(self, start: bytes, size: int) -> bytearray:
        """Into one place: parts added one by one would cost the square of their number."""
        body = bytearray(size)
        body[: len(start)] = start
        left = memoryview(body)[len(start) :]
        while left:
            count = self._socket.recv_into(left)
            if not count:
                raise ConnectionError(_CLOSED)
            left = left[count:]
        return body

    def _receive(self) -> bytes:
        part = self._socket.recv(65536)
        if not part:
            raise ConnectionError(_CLOSED)
        return part


def _head_of(head: bytes) -> tuple[int, int]:
    """Status and Content-Length."""
    first, *fields = head.split(b"\r\n")
    for field in fields:
        name, _, value = field.partition(b":")
        if name.lower() == b"content-length":
            return int(first.split()[1]), int(value)
    raise RuntimeError(f"an answer without Content-Length: {head[:300]!r}")


def cpu_seconds(process_id: int) -> float:
    """CPU of a process's threads and children so far, in seconds, as the scheduler counts nanoseconds."""
    total = 0.0
    for task in Path(f"/proc/{process_id}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
            children = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(cpu_seconds(int(child)) for child in children if Path(f"/proc/{child}").exists())
    return total


class Server:
    """A server process (`_ingest_server`), and the PostgreSQL behind it where there is one."""

    def __init__(self, kind: str, process: subprocess.Popen[str], postgres: int | None) -> None:
        self.kind = kind
        self.process = process
        self._postgres = postgres
        self.port = int(json.loads(self._line())["server_url"].rpartition(":")[2])

    def cpu_seconds(self) -> float:
        """CPU of the server, and of its PostgreSQL."""
        return cpu_seconds(self.process.pid) + (cpu_seconds(self._postgres) if self._postgres else 0.0)

    def start_sealing(self) -> None:
        """Begin to seal all that is due, in the server's background."""
        if self.process.stdin is not None:
            self.process.stdin.write("seal\n")
            self.process.stdin.flush()

    def wait_sealed(self) -> float:
        """Wait until all is sealed; the CPU that the sealing thread took, in seconds."""
        return float(self._line())

    def _line(self) -> str:
        if self.process.stdout is None:
            raise RuntimeError("the server process has no standard output")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.kind} server ended")
        return line


@contextmanager
def run_server(
    kind: str, folder: Path, database: str | None = None, postgres: int | None = None
) -> Iterator[Server]:
    """A server on a free port while the context lasts; `postgres` is the process id of its cluster."""
    arguments: Sequence[str] = (kind, str(folder), *((database,) if database else ()))
    command = [sys.executable, "-m", "benchmarks._ingest_server", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Server(kind, process, postgres)
        finally:
            process.terminate()
            process.wait(30)
