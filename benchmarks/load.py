"""A server that is offered more than it can take: 64 simulated agents beside it, `--seconds` long (300).

It writes some 40 GB to the folder for temporary files.

Gated: memory stays flat, every refusal is 429 or 503 with Retry-After, some reports are refused, and afterwards the
database has exactly the acknowledged reports. Times and rates are the machine's, and only stated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._population import SMALL, Shape, register, requests
from benchmarks._serving import cpu_seconds, serving
from collage_monitor import wire

__all__ = ["Load", "Outcome", "run_load", "stored"]

BATCH_REPORTS: Final = 500
QUEUE_REPORTS: Final = 2000
LINGER_SECONDS: Final = 0.5
REFUSED: Final = (429, 503)


@dataclass
class Tally:
    """The totals over all agents. `waits` are seconds from sending a batch to its acknowledgement."""

    waits: list[float] = field(default_factory=list)
    refusal_waits: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    without_retry_after: int = 0
    acknowledged: dict[str, int] = field(default_factory=dict)
    dropped: int = 0


class Agent:
    """One stream's sender. A report gets its number when it leaves the queue."""

    def __init__(self, port: int, stream_id: str, shape: Shape, rate: float, seed: int, tally: Tally) -> None:
        self.stream_id = stream_id
        self._port = port
        self._rate = rate
        self._tally = tally
        self._random = random.Random(seed)
        self._shape = shape
        self._sent = 0
        self._dropped = 0
        tally.acknowledged[stream_id] = 0

    async def run(self, seconds: float) -> None:
        """Send until the time is over; the batch under way is brought to its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        began = time.perf_counter()
        # Agents do not start in step.
        await asyncio.sleep(self._random.uniform(0.0, LINGER_SECONDS))
        try:
            while (elapsed := time.perf_counter() - began) < seconds:
                count = self._take(elapsed)
                if count:
                    await self._deliver(reader, writer, count)
                else:
                    await asyncio.sleep(LINGER_SECONDS)
        finally:
            writer.close()

    def _take(self, elapsed: float) -> int:
        """How many reports go with the next batch; the oldest of too many are dropped."""
        waiting = int(elapsed * self._rate) - self._sent - self._dropped
        lost = max(waiting - QUEUE_REPORTS, 0)
        self._dropped += lost
        self._tally.dropped += lost
        return min(waiting - lost, BATCH_REPORTS)

    async def _deliver(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> None:
        """Send one batch until it is acknowledged."""
        [request] = requests(self.stream_id, self._shape, self._sent, count, count)
        self._sent += count
        while True:
            began = time.perf_counter()
            writer.write(request)
            status, retry_after, body = await _answer_of(reader)
            waited = time.perf_counter() - began
            self._tally.statuses[status] += 1
            if status == 200:
                self._tally.waits.append(waited)
                self._acknowledge(body, count)
                return
            if status not in REFUSED:
                raise RuntimeError(f"{status}: {body[:300]!r}")
            self._tally.refusal_waits.append(waited)
            self._tally.without_retry_after += retry_after is None
            await asyncio.sleep((retry_after or 1.0) * self._random.uniform(1.0, 1.5))

    def _acknowledge(self, body: bytes, count: int) -> None:
        answer = msgspec.json.decode(body, type=wire.BatchAnswer)
        if (answer.accepted, answer.duplicates) != (count, 0):
            raise RuntimeError(f"{self.stream_id}: {count} sent, {answer}")
        self._tally.acknowledged[self.stream_id] += count


async def _answer_of(reader: asyncio.StreamReader) -> tuple[int, float | None, bytes]:
    """Status, Retry-After and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    retry_after = fields.get("retry-after")
    body = await reader.readexactly(int(fields["content-length"]))
    return int(first.split()[1]), None if retry_after is None else float(retry_after), body


RANKS_A_RUN: Final = 8
MOST_GROWTH: Final = 1.1


@dataclass(frozen=True, kw_only=True)
class Load:
    """The offered load: `agents` streams of `rate` reports a second each, 500 numbers per report."""

    seconds: float = 300.0
    agents: int = 64
    rate: float = 1000.0


@dataclass
class Outcome:
    """The measured results of the load.

    `memory` is (seconds, bytes) of what the server holds itself, once a second; pages of the database file that it
    has mapped are the system's cache, which takes them back when it needs them: `most_mapped` bytes.
    """

    tally: Tally = field(default_factory=Tally)
    memory: list[tuple[float, int]] = field(default_factory=list)
    most_mapped: int = 0
    server_cpu_seconds: float = 0.0
    missing: int = 0
    unexpected: int = 0
    unsealed: int = 0


def run_load(load: Load, folder: Path, seed: int = 0, **settings: object) -> Outcome:
    """Offer the load to a fresh server in `folder`, stop it, and count its stored reports."""
    outcome = Outcome()
    with serving(folder, **settings) as (process_id, port):
        runs = -(-load.agents // RANKS_A_RUN)
        for run in range(runs):
            register(port, f"run-{run}", SMALL, RANKS_A_RUN)
        agents = [
            Agent(
                port,
                f"run-{i // RANKS_A_RUN}-{i % RANKS_A_RUN}",
                SMALL,
                load.rate,
                seed * load.agents + i,
                outcome.tally,
            )
            for i in range(load.agents)
        ]
        before = cpu_seconds(process_id)
        asyncio.run(_run(agents, load.seconds, process_id, outcome))
        outcome.server_cpu_seconds = cpu_seconds(process_id) - before
    kept, outcome.unsealed = stored(folder / "collage.sqlite")
    for stream_id, count in outcome.tally.acknowledged.items():
        outcome.missing += len(set(range(count)) - kept.get(stream_id, set()))
        outcome.unexpected += len(kept.get(stream_id, set()) - set(range(count)))
    return outcome


async def _run(agents: list[Agent], seconds: float, process_id: int, outcome: Outcome) -> None:
    watching = asyncio.create_task(_watch_memory(process_id, outcome))
    try:
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.run(seconds))
    finally:
        watching.cancel()


async def _watch_memory(process_id: int, outcome: Outcome) -> None:
    began = time.perf_counter()
    while True:
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
        known = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        own, mapped = (1024 * int(known[name][0]) for name in ("RssAnon", "RssFile"))
        outcome.memory.append((time.perf_counter() - began, own))
        outcome.most_mapped = max(outcome.most_mapped, mapped)
        await asyncio.sleep(1.0)


def stored(path: Path) -> tuple[dict[str, set[int]], int]:
    """Numbers of the reports that the file holds, by stream, in the journal or sealed; how many the journal has."""
    kept: dict[str, set[int]] = {}
    journal = 0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        for stream_id, sealed in connection.execute("SELECT stream_id, sealed FROM run_latest"):
            kept[stream_id] = {seq for first, last in json.loads(sealed) for seq in range(first, last + 1)}
        for stream_id, seq in connection.execute("SELECT stream_id, seq FROM report"):
            kept[stream_id].add(seq)
            journal += 1
    return kept, journal


def figures_of(load: Load, outcome: Outcome) -> list[Figure]:
    """Gated figures first, then the others."""
    tally = outcome.tally
    accepted = sum(tally.acknowledged.values())
    refused = sum(count for status, count in tally.statuses.items() if status != 200)
    times, sizes = (np.array(column, dtype=np.float64) for column in zip(*outcome.memory, strict=True))
    third = len(sizes) // 3
    slope = np.polyfit(times[third:], sizes[third:], 1)[0] if len(sizes) > 3 else 0.0
    growth = np.median(sizes[-third:]) / np.median(sizes[third : 2 * third]) if third else 1.0

    def one(name: str, unit: str, value: float, **bound: float) -> Figure:
        return Figure(name, unit, (float(value),), **bound)

    return [
        one("refused requests", "", refused, floor=1.0),
        one("refused without Retry-After", "", tally.without_retry_after, limit=0.0),
        one("acknowledged reports that are not stored", "", outcome.missing, limit=0.0),
        one("stored reports that were not acknowledged", "", outcome.unexpected, limit=0.0),
        one("memory, last third / middle third", "×", growth, limit=MOST_GROWTH),
        one("acknowledged, p99", "s", np.percentile(tally.waits, 99)),
        one("acknowledged, p50", "s", np.percentile(tally.waits, 50)),
        one("memory, slope after the first third", "MiB/min", slope * 60 / 2**20),
        one("memory, most", "MiB", sizes.max() / 2**20),
        one("mapped pages of files, most", "MiB", outcome.most_mapped / 2**20),
        one("offered", "reports/s", load.agents * load.rate),
        one("acknowledged", "reports/s", accepted / load.seconds),
        one("given up by the agents", "reports/s", tally.dropped / load.seconds),
        one("not sealed yet at the end", "reports", outcome.unsealed),
        one("refusal, p99", "s", np.percentile(tally.refusal_waits or [0.0], 99)),
        one("server's CPU", "cores", outcome.server_cpu_seconds / load.seconds),
    ]


def command(arguments: list[str]) -> int:
    """The command line: options of the load, then those of every benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--agents", type=int, default=Load.agents)
    parser.add_argument("--rate", type=float, default=Load.rate, help="reports a second of each agent")
    chosen, others = parser.parse_known_args(arguments)
    load = Load(**vars(chosen))

    def measure(options: Options) -> Measuring:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_load(load, Path(folder), options.seed)
        notes = [
            f"{load.agents} agents, {load.seconds:g} s, {SMALL.numbers} numbers a report, SQLite, default settings",
            f"answers by status: {dict(sorted(outcome.tally.statuses.items()))}",
        ]
        yield from figures_of(load, outcome)
        return notes

    return main("load", __doc__ or "", measure, others)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
