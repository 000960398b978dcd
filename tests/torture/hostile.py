"""`python -m tests.torture.hostile`: 32 honest senders beside every hostile one at once, and a server between them.

Hostile are bodies that stop or trickle, half-sent heads, heads without an end, and large JSON that is refused or
bad in part. Printed: how long honest reports and /healthz waited, the server's memory, and what was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from benchmarks._reports import SMALL, register
from benchmarks.load import Agent, Tally, serving, stored

HONEST = 32
RANKS = 8
RATE = 20.0
HOST = b"Host: 127.0.0.1\r\n"
POST = b"POST /api/v1/streams/hostile-0/reports HTTP/1.1\r\n" + HOST


@dataclass
class Seen:
    """Waits in seconds, memory in bytes."""

    tally: Tally = field(default_factory=Tally)
    health: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


async def connected(port, end, act):
    """`act` on one new connection after another until the end, whatever becomes of each."""
    while time.monotonic() < end:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(end - time.monotonic()):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    await act(reader, writer)
                finally:
                    writer.close()
        await asyncio.sleep(0.02)


async def idle_body(reader, writer):
    writer.write(POST + b"Content-Type: application/msgpack\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
    await reader.read()


async def slow_body(reader, writer):
    """8 MiB at 150 kB a second."""
    writer.write(POST + b"Content-Type: application/msgpack\r\nContent-Length: 8388608\r\n\r\n")
    for _ in range(560):
        writer.write(bytes(15_000))
        await writer.drain()
        await asyncio.sleep(0.1)


async def half_head(reader, writer):
    writer.write(b"GET /healthz HTTP/1.1\r\n" + HOST + b"X-Half: ")
    await reader.read()


async def endless_head(reader, writer):
    writer.write(b"GET /healthz HTTP/1.1\r\n" + HOST)
    for _ in range(1000):
        writer.write(b"".join(b"x-%d: 1\r\n" % i for i in range(500)))
        await writer.drain()


def json_body(body):
    """Sends one body again and again, a second apart."""

    async def act(reader, writer):
        size = b"Content-Length: %d\r\n" % len(body)
        writer.write(POST + size + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        await reader.read()
        await asyncio.sleep(1.0)

    return act


def too_many_reports():
    """10 MB that are refused."""
    return b'{"reports":[' + b",".join([b'{"seq":1,"step":1,"time":1}'] * 360_000) + b"]}"


def one_bad_report():
    """15 MB with a report that is none."""
    row = [1.25] * 5_000
    reports: list[dict[str, object]] = [
        {"seq": "x" if seq == 7 else seq, "step": 1, "time": 1.0, "scalars": {}, "statistics": [row] * 20}
        for seq in range(30)
    ]
    return json.dumps({"reports": reports}).encode()


async def ask_health(port, end, waits):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0) as client:
        while time.monotonic() < end:
            began = time.perf_counter()
            (await client.get("/healthz")).raise_for_status()
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)


async def watch_memory(process_id, end, memory):
    while time.monotonic() < end:
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
        memory.append(next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")))
        await asyncio.sleep(1.0)


async def side_by_side(port, process_id, seconds, seed, seen):
    end = time.monotonic() + seconds
    hostile = [idle_body] * 8 + [slow_body] + [half_head] * 300 + [endless_head]
    hostile += [json_body(too_many_reports()), json_body(one_bad_report())]
    random.Random(seed).shuffle(hostile)
    async with asyncio.TaskGroup() as group:
        for act in hostile:
            group.create_task(connected(port, end, act))
        for i in range(HONEST):
            agent = Agent(port, f"honest-{i // RANKS}-{i % RANKS}", SMALL, RATE, seed * HONEST + i, seen.tally)
            group.create_task(agent.run(seconds))
        group.create_task(ask_health(port, end, seen.health))
        group.create_task(watch_memory(process_id, end, seen.memory))


def run(seconds, seed, folder):
    """(what was seen, how many acknowledged reports are lost)."""
    seen = Seen()
    with serving(folder) as (process_id, port):
        for number in range(HONEST // RANKS):
            register(port, f"honest-{number}", SMALL, RANKS)
        register(port, "hostile", SMALL, 1)
        asyncio.run(side_by_side(port, process_id, seconds, seed, seen))
    kept, _ = stored(folder / "collage.sqlite")
    acknowledged = seen.tally.acknowledged
    return seen, sum(len(set(range(count)) - kept.get(name, set())) for name, count in acknowledged.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen, lost = run(chosen.seconds, chosen.seed, Path(folder))
    for name, waits in (("honest report", seen.tally.waits), ("/healthz", seen.health)):
        middle, late, last = (1000 * np.quantile(waits, share) for share in (0.5, 0.99, 1.0))
        sys.stdout.write(f"{name:<16} p50 {middle:.0f} ms, p99 {late:.0f} ms, most {last:.0f} ms of {len(waits)}\n")
    sys.stdout.write(f"memory           {max(seen.memory) / 2**20:.0f} MiB at most\n")
    sys.stdout.write(f"answers          {dict(sorted(seen.tally.statuses.items()))}\n")
    total = sum(seen.tally.acknowledged.values())
    sys.stdout.write(f"seed {chosen.seed}: {total} reports acknowledged, {lost} lost\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
