"""A real server with --memory 512M is fed at its limits, once and four times over: its memory stays within them.

Counted is what the process holds of its own (RssAnon): mapped pages of the database are the system's cache, which
takes them back. What is too much at once is refused with 429 or 503, and sent again.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from benchmarks._serving import Connection, request_of, serving
from collage_monitor import wire

MIB = 2**20
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
    known = httpx.get(f"http://127.0.0.1:{port}/api/v1/runs/{run_id}/layers", timeout=300.0).json()
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
            *(["series?metric=edq_ratio&pattern=*"] if known["layers"] else []),
            "series?metric=loss",
            "export?format=csv",
            "export?format=jsonl",
            "export?format=parquet",
            "events?limit=10000",
            "alerts",
        )
    ] + ["/metrics", "/api/v1/runs?limit=1000", "/api/v1/run-table", "/api/v1/events?limit=1000"]

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

    with ThreadPoolExecutor(4) as askers:
        turns = [questions[place:] + questions[:place] for place in range(0, 16, 4)]
        for _ in askers.map(answer, turns):  # An answer that breaks off is an error.
            pass


def tiny(connection, times):
    """Rows: short reports of one layer, of a run that declares 20,000."""
    declare(connection, "r", 20_000, 5)
    feed(connection, "r", 15_000 * times, 2500, 1, 1)


def many_layers(connection, times):
    declare(connection, "r", 80_000, 4)
    feed(connection, "r", 25 * times, 4, 4, 80_000)


def many_statistics(connection, times, reports=100):
    """As many as a stream may declare."""
    declare(connection, "r", 20, wire.LIMITS["statistics_per_stream"])
    feed(connection, "r", reports * times, 25, wire.LIMITS["statistics_per_stream"], 20)


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


def few_points(connection):
    declare(connection, "r", 3, 5)
    feed(connection, "r", 100, 100, 5, 3)


def many_events(connection, times):
    """Notes as long as they may be, of characters that take four bytes."""
    few_points(connection)
    note = wire.encode_message(wire.NoteCreate(text="\U0001f4c9" * 2000))
    for _ in range(5000 * times):
        send(connection, "/runs/r/notes", note)


def many_incidents(connection, times):
    """Open ones that Alertmanager sends, with as many labels as they may have, longer than they may be."""
    few_points(connection)
    own = {f"label {number}": "x" * 4096 for number in range(62)}
    for first in range(0, 500 * times, 50):
        alerts = [
            wire.AlertmanagerAlert(status="firing", labels={"run_id": "r", "alertname": f"Own{number}", **own})
            for number in range(first, first + 50)
        ]
        message = wire.encode_message(wire.AlertmanagerMessage(alerts=alerts))
        status, answer = send(connection, "/alerts/alertmanager", message)
        assert status == 200, answer


FEEDS = (tiny, many_layers, many_statistics, many_scalars, many_runs, many_events, many_incidents)


@contextmanager
def measured(folder, memory="512M", **settings):
    server = serving(folder, memory=memory, seal_interval_seconds=0.5, **settings)
    with server as (process_id, port), Connection(port) as connection, Peak(process_id, port) as peak:
        yield connection, port, peak


def fed_and_asked(folder, fill, times, **settings):
    with measured(folder, **settings) as (connection, port, peak):
        fill(connection, times)
        ask(port, "r")
        time.sleep(3.0)
        ask(port, "r")
    print(f"{fill.__name__} {times}x: {peak.told()}")  # noqa: T201
    assert peak.bytes <= 512 * MIB, peak.told()


def exported(port, names):
    """Several exports of the run at once, read to their ends."""

    def export(name):
        address = f"http://127.0.0.1:{port}/api/v1/runs/r/export?format={name}"
        with httpx.stream("GET", address, timeout=300.0) as found:
            assert found.status_code == 200, found.read()
            return sum(map(len, found.iter_raw()))

    with ThreadPoolExecutor(len(names)) as askers:
        return list(askers.map(export, names))
