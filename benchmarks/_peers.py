"""Other servers on the same records: trackio and MLflow, in an environment of their own.

Their interpreter is named by COLLAGE_BENCHMARK_PEERS; nothing of theirs is installed here. A record is 500 numbers
under names, as their clients send it: trackio's `bulk_log` (SQLite, WAL, synchronous=NORMAL, its default), MLflow's
`log-batch` (SQLite; 1,000 numbers a request at most).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks._harness import Figure
from benchmarks._serving import Connection, cpu_seconds

__all__ = ["PEERS", "peer_figures", "peers_python"]

NUMBERS: Final = 500
WARM_UP: Final = 5
START_SECONDS: Final = 120.0
_TRACKIO: Final = """
import sys, uvicorn, trackio.server
trackio.server.write_token = "benchmark"
app, _ = trackio.server.build_starlette_app_only()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
"""


@dataclass(frozen=True)
class Peer:
    """A server: how it is started, which path says that it is up, how many records a request may hold,
    and how many requests make a round."""

    name: str
    module: str
    ready_path: str
    batches: Sequence[int]
    requests: int

    def command(self, python: str, port: int, folder: Path) -> list[str]:
        """What starts it."""
        if self.module == "trackio":
            return [python, "-c", _TRACKIO, str(port)]
        store = f"sqlite:///{folder / 'mlflow.sqlite'}"
        flags = ["--backend-store-uri", store, "--artifacts-destination", str(folder / "artifacts")]
        return [python, "-m", "mlflow", "server", *flags, "--port", str(port), "--workers", "1"]


PEERS: Final = (Peer("trackio", "trackio", "/version", (1, 10), 40), Peer("MLflow", "mlflow", "/health", (1,), 10))


def peers_python() -> str | None:
    """Their interpreter, if one is named."""
    return os.environ.get("COLLAGE_BENCHMARK_PEERS") or None


def version_of(python: str, module: str) -> str | None:
    """The version installed there, None without one."""
    code = f"import importlib.metadata as m; print(m.version({module!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def peer_figures(folder: Path, rounds: int) -> tuple[list[str], list[Figure]]:
    """Notes on the installed peers, and the figures of each."""
    python = peers_python()
    if python is None:
        return ["trackio, MLflow: not asked; COLLAGE_BENCHMARK_PEERS names an interpreter that has them"], []
    notes, figures = [], []
    for peer in PEERS:
        version = version_of(python, peer.module)
        notes.append(f"{peer.name}: {version or 'not installed'}")
        if version is not None:
            own = folder / peer.module
            own.mkdir()
            with running(peer, python, own) as (process_id, port):
                figures += [
                    figure for batch in peer.batches for figure in _measure(peer, process_id, port, batch, rounds)
                ]
    return notes, figures


@contextmanager
def running(peer: Peer, python: str, folder: Path) -> Iterator[tuple[int, int]]:
    """(process id, port) of the server once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"TRACKIO_DIR": str(folder), "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    command = peer.command(python, port, folder)
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _wait_until_up(process, port, peer.ready_path)
            yield process.pid, port
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_up(process: subprocess.Popen[bytes], port: int, path: str) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with Connection(port) as connection:
                if connection.exchange(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())[0] == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} does not answer")


def _measure(peer: Peer, process_id: int, port: int, batch: int, rounds: int) -> list[Figure]:
    name = f"1 connection × {batch} report{'s' if batch > 1 else ''}: {peer.name}"
    cpu, rate, p50 = [], [], []
    with Connection(port) as connection:
        requests = _requests(peer, connection, batch, WARM_UP + rounds * peer.requests)
        _send(connection, requests[:WARM_UP])
        for start in range(WARM_UP, len(requests), peer.requests):
            before, began = cpu_seconds(process_id), time.perf_counter()
            waits = _send(connection, requests[start : start + peer.requests])
            elapsed = time.perf_counter() - began
            cpu.append(1e6 * (cpu_seconds(process_id) - before) / peer.requests / batch)
            rate.append(peer.requests * batch * NUMBERS / elapsed / 1e6)
            p50.append(1e3 * statistics.median(waits))
    return [
        Figure(f"{name}, CPU per report", "µs", tuple(cpu)),
        Figure(f"{name}, rate", "M numbers/s", tuple(rate)),
        Figure(f"{name}, p50", "ms", tuple(p50)),
    ]


def _send(connection: Connection, requests: Sequence[bytes]) -> list[float]:
    waits = []
    for request in requests:
        began = time.perf_counter()
        status, answer = connection.exchange(request)
        waits.append(time.perf_counter() - began)
        if status != 200:
            raise RuntimeError(f"{status}: {answer[:300]!r}")
    return waits


def _requests(peer: Peer, connection: Connection, batch: int, count: int) -> list[bytes]:
    """Encoded requests; the run they belong to is made first where it has to be."""
    values = {f"layer.{i // 10}/statistic_{i % 10}": 0.1 + i / 7 for i in range(NUMBERS)}
    if peer.module == "trackio":
        entry = {"project": "p", "run": f"run-{batch}", "metrics": values, "config": None}
        bodies: Iterator[Any] = (
            {"kwargs": {"logs": [{**entry, "step": i * batch + j} for j in range(batch)], "hf_token": None}}
            for i in range(count)
        )
        return [_post("/api/bulk_log", body) for body in bodies]
    created = _call(connection, "/api/2.0/mlflow/runs/create", {"experiment_id": "0", "start_time": 0})
    run_id = created["run"]["info"]["run_id"]
    metrics = [{"key": key, "value": value, "timestamp": 1} for key, value in values.items()]
    return [
        _post(
            "/api/2.0/mlflow/runs/log-batch",
            {"run_id": run_id, "metrics": [{**metric, "step": i} for metric in metrics]},
        )
        for i in range(count)
    ]


def _call(connection: Connection, path: str, body: Any) -> Any:
    status, answer = connection.exchange(_post(path, body))
    if status != 200:
        raise RuntimeError(f"{path}: {status} {answer[:300]!r}")
    return json.loads(answer)


def _post(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}X-Trackio-Write-Token: benchmark\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
