"""Servers in processes of their own, and a keep-alive connection that costs its client little.

`python -m benchmarks._serving KIND FOLDER [DATABASE]` prints its address. Nothing is sealed until a line arrives on
standard input; the CPU seconds that sealing took are printed when all is sealed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec
import uvicorn
from collage_server.app import make_store
from collage_server.command.serve import Server
from collage_server.ingest import writer
from collage_server.settings import FixedLimits, Settings
from collage_server.store import GroupOutcome, PostgresqlStore, ReportGroup, SqliteStore, Store
from collage_server.store.journal.report_journal import ReportJournal
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from collage_monitor import wire
from tests.server.limited import limits_and_variables
from tests.server.store.postgresql import Cluster, find_programs

__all__ = [
    "Connection",
    "KINDS",
    "NullStore",
    "ServerProcess",
    "check",
    "cpu_seconds",
    "request_of",
    "run_cluster",
    "run_server",
    "serving",
]

_SOCKET_SECONDS: Final = 60.0
_CLOSED: Final = "the server closed the connection in the middle of an answer"


def request_of(path: str, body: bytes) -> bytes:
    """A whole POST of msgpack, ready to be sent: encoding it is not measured."""
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

    def get(self, path: str) -> bytes | bytearray:
        """The answer to a GET; anything but 200 is an error."""
        status, answer = self.exchange(f"GET /api/v1{path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer[:300]!r}")
        return answer

    def send(self, encoded: Iterable[bytes], reports: int | None = None) -> list[float]:
        """Seconds that each whole request took; an error, if one is refused or fewer `reports` are taken."""
        waits = []
        for request in encoded:
            started = time.perf_counter()
            status, answer = self.exchange(request)
            waits.append(time.perf_counter() - started)
            check(status, answer, reports)
        return waits

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


def check(status: int, answer: bytes | bytearray, reports: int | None = None) -> None:
    """An answer that acknowledges so many reports, or an error."""
    taken = None
    if status == 200 and reports is not None:
        taken = msgspec.json.decode(answer, type=wire.BatchAnswer).accepted
    if status != 200 or taken != reports:
        raise RuntimeError(f"{status}: {answer[:300]!r}")


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


class ServerProcess:
    """A server process (this module's command), and the PostgreSQL behind it where there is one."""

    def __init__(self, kind: str, process: subprocess.Popen[str], postgres: int | None) -> None:
        self.kind = kind
        self.process = process
        self._postgres = postgres
        self.port = int(json.loads(self._line())["server_url"].rpartition(":")[2])

    def cpu_seconds(self) -> float:
        """CPU of the server, and of its PostgreSQL."""
        return cpu_seconds(self.process.pid) + (cpu_seconds(self._postgres) if self._postgres else 0.0)

    def start_sealing(self) -> None:
        """Begin to seal all due reports, in the server's background."""
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
) -> Iterator[ServerProcess]:
    """A server on a free port while the context lasts; `postgres` is the process id of its cluster."""
    arguments: Sequence[str] = (kind, str(folder), *((database,) if database else ()))
    command = [sys.executable, "-m", "benchmarks._serving", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield ServerProcess(kind, process, postgres)
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[tuple[int, int]]:
    """(process id, port) of `collage-monitor serve` with these settings and fixed limits; ended by SIGTERM."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLLAGE_")}
    limits, variables = limits_and_variables(settings)
    environment |= variables
    # A line a refusal is nothing to read here; what fails the server is an error all the same.
    flags = ["--dir", str(folder), "--port", "0", "--no-auth", "--log-level", "error"]
    command = [sys.executable, "-m", "tests.server.limited", limits, "serve", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        if process.stdout is None:
            raise RuntimeError("the server process has no standard output")
        try:
            address = json.loads(process.stdout.readline())["server_url"]
            yield process.pid, int(address.rpartition(":")[2])
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def run_cluster() -> Iterator[tuple[str, int] | None]:
    """(URL of a database with this server's schema, process id of the cluster); None without PostgreSQL here."""
    programs = find_programs()
    if programs is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(folder, programs)
        cluster.create()
        cluster.start()
        try:
            cluster.execute("CREATE DATABASE benchmark")
            url = cluster.url("benchmark")
            PostgresqlStore(url, stale_after_seconds=600.0).migrate()
            if cluster.process is None:
                raise RuntimeError("the cluster ended at once")
            yield url, cluster.process.pid
        finally:
            cluster.stop()


KINDS: Final = ("sqlite", "null", "single", "postgresql", "bare")
"""`single` commits each request on its own, instead of all that wait; `bare` is no server of ours."""
_NEVER: Final = 1e6
_NO_BOUND: Final = 2**60


class _NullJournal(ReportJournal):
    """Acknowledges reports without writing them."""

    def append(self, groups: Sequence[ReportGroup], now: float) -> list[GroupOutcome]:
        """Accept every group, and store none."""
        return [GroupOutcome(len(group.reports), 0) for group in groups]


class NullStore(SqliteStore):
    """Keeps runs and streams as SQLite does, and acknowledges reports without writing them."""

    def __init__(self, path: Path, *, stale_after_seconds: float) -> None:
        super().__init__(path, stale_after_seconds=stale_after_seconds)
        self.journal = _NullJournal(self)


def _seal_when_told(store: Store) -> None:
    for _ in sys.stdin:
        started = time.thread_time()
        for run_id in store.journal.runs():
            while store.sealing.seal(run_id, time.time()):
                pass
        print(time.thread_time() - started, flush=True)


async def _take(request: Request) -> Response:
    """The least that a server can do with a body: read it, decode it, look at each byte once, and answer."""
    body = await request.body()
    batch = wire.ReportBatch(reports=[])
    if request.url.path.endswith("/reports"):
        batch = msgspec.msgpack.decode(body, type=wire.ReportBatch)
    zlib.crc32(body)
    answer = wire.BatchAnswer(accepted=len(batch.reports), duplicates=0)
    return Response(wire.encode_json(answer), media_type=wire.JSON)


def serve_bare() -> None:
    """One Starlette route on plain uvicorn: the reference for rates on any machine."""
    app = Starlette(routes=[Route("/{path:path}", _take, methods=["POST"])])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"server_url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listener])


def serve(kind: str, folder: Path, database: str | None = None) -> None:
    """Serve on a free port of loopback until terminated."""
    if kind == "bare":
        serve_bare()
        return
    settings = Settings(
        folder=folder,
        database=database,
        port=0,
        no_auth=True,
    )
    limits = FixedLimits(
        journal_run_bytes=_NO_BOUND,
        journal_bytes=_NO_BOUND,
        seal_interval_seconds=_NEVER,
        idle_seconds=_NEVER,
    )
    if kind == "single":
        writer.COMMIT_BYTES = 1
    store = make_store(settings)
    if kind == "null":
        store = NullStore(folder / "collage.sqlite", stale_after_seconds=limits.stale_after_seconds)
    threading.Thread(target=_seal_when_told, args=(store,), daemon=True).start()
    Server(settings, store, as_json=True, limits=limits).run()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4])
