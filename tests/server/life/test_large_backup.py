"""A gigabyte is backed up while it is written: the second copy adds little, and all is answered elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks._serving import Connection, serving
from collage_monitor import wire
from collage_monitor.client import Client
from drills.torture.growth import NOW, declare, send, statistics
from tests.waiting import until

BYTES = 10**9
LAYERS, STATISTICS, A_BATCH = 500, 20, 16
PROGRAM = (sys.executable, "-c", "from collage_monitor.command import main; main()")
RUNS = ("a", "b", "c", "d")
QUESTIONS = (
    "",
    "/streams",
    "/layers",
    "/heatmap?metric=edq_ratio",
    "/heatmap?metric=edq_ratio&from=500&to=700",
    "/series?metric=edq_ratio&points=1000",
    "/series?metric=edq_ratio&layer=l7&points=1000",
    "/series?metric=loss",
    "/worst?metric=edq_ratio&k=20",
    "/latest",
)


def command(*given):
    """What a verb prints as JSON."""
    done = subprocess.run([*PROGRAM, *map(str, given), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def bytes_in(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def batch(random, first):
    """Reports of numbers that no compression makes smaller."""
    reports = []
    for seq in range(first, first + A_BATCH):
        table = random.random((STATISTICS, LAYERS))
        reports.append(
            wire.Report(
                seq=seq,
                step=seq,
                time=NOW + seq,
                scalars={"loss": float(random.random())},
                statistic_count=STATISTICS,
                layer_count=LAYERS,
                statistics=wire.array_to_bytes(table),
                model=wire.array_to_bytes(table.sum(axis=1)),
            )
        )
    return wire.encode_batch(wire.ReportBatch(reports=reports))


def write(connection, folder, until):
    """Feed the runs in turns until so much of them is archived."""
    random = np.random.default_rng(0)
    for run_id in RUNS:
        declare(connection, run_id, LAYERS, STATISTICS)
    for first in count(0, A_BATCH):
        for run_id in RUNS:
            status, answer = send(connection, f"/streams/{run_id}/reports", batch(random, first))
            assert status == 200, answer
        if bytes_in(folder / "archive") >= until:
            return


def finish(port):
    """What a run has not archived yet is copied each time: a last file of its own, of runs that have ended."""
    with Client(f"http://127.0.0.1:{port}") as client:
        for run_id in RUNS:
            client.update_run(run_id, wire.RunUpdate(state="finished"))


@contextmanager
def written_to(port, run_id="beside"):
    """A small run that reports all the while."""
    over = threading.Event()

    def report():
        with Connection(port) as connection:
            declare(connection, run_id, 2, len(statistics(3)))
            for seq in count():
                if over.is_set():
                    return
                body = wire.Report(seq=seq, step=seq, time=NOW + seq, scalars={"loss": 1.0 / (1 + seq)})
                send(connection, f"/streams/{run_id}/reports", wire.encode_batch(wire.ReportBatch(reports=[body])))

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def settled(folder):
    """Wait until no file has come for a while: the last chunks are archived when their ranks are given up."""
    seen, since = -1, 0

    def is_settled():
        nonlocal seen, since
        now = bytes_in(folder / "archive")
        seen, since = now, since + 1 if now == seen else 0
        return since > 60

    until(is_settled, "an archive that grows no more")


def answers(port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=120.0) as client:
        found = {}
        for run_id in RUNS:
            for question in QUESTIONS:
                answer = client.get(f"/runs/{run_id}{question}")
                assert answer.status_code == 200, (question, answer.text[:200])
                found[run_id, question] = answer.content
        return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_gigabyte_is_backed_up_while_it_is_written_and_answers_elsewhere(tmp_path):
    store, copies, other = tmp_path / "store", tmp_path / "copies", tmp_path / "other"
    copies.mkdir()
    with serving(store) as (_, port):
        with Connection(port) as connection:
            write(connection, store, BYTES)
        finish(port)
        settled(store)
        with written_to(port):
            first = command("backup", "make", copies / "monday.sqlite", "--dir", store)
            whole = bytes_in(copies)
            second = command("backup", "make", copies / "tuesday.sqlite", "--dir", store)
        more = bytes_in(copies) - whole
        settled(store)
        command("backup", "make", copies / "wednesday.sqlite", "--dir", store)
        expected = answers(port)
    assert whole >= BYTES
    assert first["archived_files"] > 0
    assert second["copied_files"] <= second["archived_files"]
    sys.stdout.write(f"{whole / 1e6:.0f} MB at first, then {more / 1e6:.1f} MB: {more / whole:.1%}\n")
    command("backup", "restore", copies / "wednesday.sqlite", "--dir", other)
    with serving(other) as (_, port):
        found = answers(port)
    for asked, answer in expected.items():
        assert found[asked] == answer, asked
    assert more < 0.05 * whole
