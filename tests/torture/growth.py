"""A real server with --memory 512M is fed at its limits, once and four times over: its memory stays within them.

Counted is what the process holds of its own (RssAnon): mapped pages of the database are the system's cache, which
takes them back. What is too much at once is refused with 429 or 503, and sent again.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from benchmarks._serving import Connection, request_of, serving
from collage_monitor import wire

MOST = 512 * 2**20
NOW = 1.7e9
ENOUGH = 32 * 2**20
"""Of one answer: an export of all may be gigabytes."""
EDQ = ("measured_steps", "elements", "sampled", "intended_squared_sum", "intended_effective_sum")


def statistics(count):
    states = [f"state_decrement_{kind}_sum/s{i}" for i in range(count) for kind in ("observed", "intended")]
    return [*EDQ, *states][:count]


class Peak:
    """The most anonymous memory of a process, and how long /healthz took, looked at again and again."""

    def __init__(self, process_id, port):
        self.bytes = 0
        self.waits = []
        self._status = Path(f"/proc/{process_id}/status")
        self._address = f"http://127.0.0.1:{port}/healthz"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=look) for look in (self._look, self._ask)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _look(self):
        while not self._over.wait(0.01):
            held = next(line for line in self._status.read_text().splitlines() if line.startswith("RssAnon"))
            self.bytes = max(self.bytes, 1024 * int(held.split()[1]))

    def _ask(self):
        with httpx.Client(timeout=60.0) as client:
            while not self._over.wait(0.05):
                began = time.perf_counter()
                client.get(self._address)
                self.waits.append(time.perf_counter() - began)

    def told(self):
        p99 = 1000 * float(np.quantile(self.waits, 0.99))
        return f"at most {self.bytes / 2**20:.0f} MiB; /healthz p99 {p99:.0f} ms"


def send(connection, path, body):
    """Until it is taken; the last answer of another kind is returned."""
    while True:
        status, answer = connection.exchange(request_of(path, body))
        if status not in (429, 503):
            return status, bytes(answer)
        time.sleep(0.1)


def declare(connection, run_id, layers, statistic_count):
    named = [wire.Layer(name=f"l{i}", shape=[1], dtype="bfloat16", elements=1) for i in range(layers)]
    for path, message in (
        ("/projects/p/runs", wire.RunCreate(run_id=run_id)),
        (f"/runs/{run_id}/attempts", wire.AttemptCreate(launch_id="l", first_step=0)),
        (
            f"/runs/{run_id}/streams",
            wire.StreamCreate(
                stream_id=run_id,
                launch_id="l",
                rank=0,
                world_size=1,
                layers=named,
                statistics=statistics(statistic_count),
            ),
        ),
    ):
        status, answer = send(connection, path, wire.encode_message(message))
        assert status < 300, answer


def feed(connection, run_id, count, a_batch, statistic_count, layers, scalars=lambda seq: {}):
    """So many reports of so many statistics and layers."""
    table = np.random.default_rng(0).random((statistic_count, layers))
    packed, model = wire.array_to_bytes(table), wire.array_to_bytes(table.sum(axis=1))
    for first in range(0, count, a_batch):
        reports = [
            wire.Report(
                seq=seq,
                step=seq,
                time=NOW + seq,
                scalars=scalars(seq),
                statistic_count=statistic_count,
                layer_count=layers,
                statistics=packed if layers else None,
                model=model,
            )
            for seq in range(first, min(first + a_batch, count))
        ]
        status, answer = send(
            connection, f"/streams/{run_id}/reports", wire.encode_batch(wire.ReportBatch(reports=reports))
        )
        assert status == 200, answer


def ask(port, run_id):
    """Every kind of question, four at a time; whatever is answered, memory is all that is looked at."""
    questions = [
        f"/api/v1/runs/{run_id}/{question}"
        for question in (
            "heatmap?metric=edq_ratio&points=200",
            "heatmap?metric=edq_ratio&points=20",
            "overview",
            "latest",
            "worst",
            "layers",
            "streams",
            "series?metric=edq_ratio",
            "series?metric=edq_ratio&pattern=*",
            "series?metric=loss",
            "export?format=csv",
            "export?format=jsonl",
        )
    ] + ["/metrics", "/api/v1/runs?limit=1000", "/api/v1/run-table"]

    def answer(some):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0) as client:
            for question in some:
                with client.stream("GET", question) as found:
                    assert found.status_code in (200, 422, 503), (question, found.read())
                    taken = 0
                    for some_bytes in found.iter_raw():
                        taken += len(some_bytes)
                        if taken > ENOUGH:
                            break

    threads = [threading.Thread(target=answer, args=(questions[i:] + questions[:i],)) for i in range(0, 12, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tiny(connection, times):
    """Rows: short reports of one layer, of a run that declares 20,000."""
    declare(connection, "r", 20_000, 5)
    feed(connection, "r", 15_000 * times, 2500, 1, 1)


def many_layers(connection, times):
    declare(connection, "r", 80_000, 4)
    feed(connection, "r", 25 * times, 4, 4, 80_000)


def many_scalars(connection, times):
    """Ten thousand names, two hundred a report."""
    declare(connection, "r", 0, 5)

    def scalars(seq):
        return {f"a scalar with a name of its own {(200 * seq + i) % 10_000:05}": 1 / 3 for i in range(200)}

    feed(connection, "r", 1250 * times, 250, 1, 0, scalars)


def many_runs(connection, times):
    """Runs with a config of 256 KiB each, all of them running."""
    config = {f"key {i}": list(range(1000)) for i in range(50)}
    for number in range(100 * times):
        create = wire.RunCreate(run_id=f"c{number}", config=config, notes="x" * 60_000)
        send(connection, "/projects/p/runs", wire.encode_message(create))
    declare(connection, "r", 3, 5)
    feed(connection, "r", 100, 100, 5, 3)


FEEDS = (tiny, many_layers, many_scalars, many_runs)


@contextmanager
def measured(folder, **settings):
    server = serving(folder, memory="512M", seal_interval_seconds=0.5, **settings)
    with server as (process_id, port), Connection(port) as connection, Peak(process_id, port) as peak:
        yield connection, port, peak


def fed_and_asked(folder, fill, times, **settings):
    with measured(folder, **settings) as (connection, port, peak):
        fill(connection, times)
        ask(port, "r")
        time.sleep(3.0)
        ask(port, "r")
    print(f"{fill.__name__} {times}x: {peak.told()}")  # noqa: T201
    assert peak.bytes <= MOST, peak.told()
