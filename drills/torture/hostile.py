"""`python -m drills.torture.hostile`: 32 honest senders beside every hostile one at once, a server between them.

Hostile are bodies that stop or trickle, half-sent heads, heads and trailers without an end, requests sent by the
thousand, two hosts, a bomb of gzip, large JSON that is refused or bad in part, and msgpack of a million numbers.
Hostile and honest clients, and whoever asks /healthz, are processes of their own. Printed: how long honest reports
and /healthz waited, the server's memory, and what was lost.

A busy machine lengthens all that. Beside /healthz a bare application is asked, and two figures of the server's
event loop are stated: the CPU that it took, and how long it was ready to run and had no CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks._population import SMALL, register
from benchmarks._serving import serving
from benchmarks.load import Agent, Tally, stored
from collage_monitor import wire
from tests.ports import free_port
from tests.waiting import until

HONEST = 32
RANKS = 8
RATE = 20.0
HOST = b"Host: 127.0.0.1\r\n"
POST = b"POST /api/v1/streams/hostile-0/reports HTTP/1.1\r\n" + HOST


@dataclass
class Seen:
    """Waits in seconds, memory in bytes; `looper` is [CPU-seconds, seconds ready and without a CPU]."""

    tally: Tally = field(default_factory=Tally)
    health: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    looper: list[float] = field(default_factory=list)


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


async def pipelined(reader, writer):
    """512 KiB of requests at once, and nobody who reads the answers for a while."""
    writer.write((b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n") * 10_000)
    await asyncio.sleep(5.0)
    await reader.read()


async def endless_trailers(reader, writer):
    """64 MB behind the last chunk."""
    writer.write(POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
    for _ in range(64):
        writer.write(b"x-trailer: 1\r\n" * 71_000)
        await writer.drain()


async def two_hosts(reader, writer):
    writer.write(b"GET /healthz HTTP/1.1\r\n" + 2 * HOST + b"\r\n")
    await reader.read()
    await asyncio.sleep(0.2)


async def bomb(reader, writer):
    """A gigabyte of zeros in one megabyte of gzip."""
    head = b"Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    body = gigabyte_of_zeros()
    writer.write(POST + head % len(body) + body)
    await reader.read()
    await asyncio.sleep(1.0)


@cache
def gigabyte_of_zeros():
    """In gzip."""
    return gzip.compress(bytes(2**30), 6)


def large_body(body, content_type=wire.JSON):
    """Sends one body again and again, a second apart."""
    head = b"Content-Type: %s\r\nConnection: close\r\n\r\n" % content_type.encode()

    async def act(reader, writer):
        size = b"Content-Length: %d\r\n" % len(body)
        writer.write(POST + size + head + body)
        await reader.read()
        await asyncio.sleep(1.0)

    return act


def too_many_reports():
    """1 MB that is refused once it is decoded."""
    return b'{"reports":[' + b",".join([b'{"seq":1,"step":1,"time":1}'] * 36_000) + b"]}"


def one_bad_report():
    """1 MB with a report that is none."""
    row = [1.25] * 270
    reports: list[dict[str, object]] = [
        {"seq": "x" if seq == 7 else seq, "step": 1, "time": 1.0, "scalars": {}, "statistics": [row] * 20}
        for seq in range(30)
    ]
    return json.dumps({"reports": reports}).encode()


def many_scalars():
    """13 MB of msgpack: as many numbers as a batch may hold, stored once."""
    scalars = {f"{name:03}": 1.0 for name in range(wire.LIMITS["scalars_per_report"])}
    reports = [
        wire.Report(seq=seq, step=seq, time=1.0, scalars=scalars) for seq in range(wire.LIMITS["reports_per_batch"])
    ]
    return wire.encode_batch(wire.ReportBatch(reports=reports))


def _leave():
    """Clients are other machines: a session has its own share of the CPUs, and takes none of the server's."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def bother(port, seconds, seed):
    """Every hostile sender at once."""
    _leave()
    end = time.monotonic() + seconds
    hostile = [idle_body] * 8 + [slow_body] + [half_head] * 300 + [endless_head]
    hostile += [large_body(too_many_reports()), large_body(one_bad_report()), large_body(bytes(2**24))]
    hostile += [large_body(many_scalars(), wire.MSGPACK)]
    hostile += [pipelined] * 50 + [endless_trailers, two_hosts, bomb]
    random.Random(seed).shuffle(hostile)

    async def together():
        async with asyncio.TaskGroup() as group:
            for act in hostile:
                group.create_task(connected(port, end, act))

    asyncio.run(together())


def ask_health(ports, seconds):
    """Waits for /healthz at each port, asked in turn."""
    _leave()
    end = time.monotonic() + seconds
    waits: list[list[float]] = [[] for _ in ports]
    clients = [http.client.HTTPConnection("127.0.0.1", port, timeout=60.0) for port in ports]
    while time.monotonic() < end:
        for client, known in zip(clients, waits, strict=True):
            began = time.perf_counter()
            client.request("GET", "/healthz")
            answer = client.getresponse()
            answer.read()
            known.append(time.perf_counter() - began)
            assert answer.status == 200, answer.status
            time.sleep(0.025)
    return waits


def _text(path):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return path.read_text()
    return ""


def own_bytes(process_id):
    """Memory of a process and of its children, without the pages of files that it has mapped."""
    # A child stands with the thread that started it.
    threads = Path(f"/proc/{process_id}/task").glob("*/children")
    children = [child for thread in threads for child in _text(thread).split()]
    total = 0
    for one in (process_id, *children):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return total


def report(port, seconds, seed):
    """The honest senders, and what all of them have seen."""
    _leave()
    tally = Tally()

    async def together():
        async with asyncio.TaskGroup() as group:
            for i in range(HONEST):
                agent = Agent(port, f"honest-{i // RANKS}-{i % RANKS}", SMALL, RATE, seed * HONEST + i, tally)
                group.create_task(agent.run(seconds))

    asyncio.run(together())
    return tally


@contextlib.contextmanager
def bare_server():
    """The port of an application that does nothing else."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "drills.torture.bare:app", "--port", str(port)]
    with subprocess.Popen([*command, "--log-level", "error"], start_new_session=True) as process:
        try:
            until(lambda: answers(port), "the bare application")
            yield port
        finally:
            process.terminate()


def answers(port):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def run(seconds, seed, folder):
    """(what was seen, how many acknowledged reports are lost)."""
    seen = Seen()
    with (
        serving(folder) as (process_id, port),
        bare_server() as bare,
        ProcessPoolExecutor(3, get_context("spawn")) as others,
    ):
        for number in range(HONEST // RANKS):
            register(port, f"honest-{number}", SMALL, RANKS)
        register(port, "hostile", SMALL, 1)
        bothered = others.submit(bother, port, seconds, seed)
        reported = others.submit(report, port, seconds, seed)
        asked = others.submit(ask_health, (port, bare), seconds)
        while not reported.done():
            seen.memory.append(own_bytes(process_id))
            time.sleep(1.0)
        seen.tally = reported.result()
        seen.health, seen.bare = asked.result()
        bothered.result()
        # The main thread's number is the process's.
        times = Path(f"/proc/{process_id}/task/{process_id}/schedstat").read_text().split()
        seen.looper = [int(entry) / 1e9 for entry in times[:2]]
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
    named = (("honest report", seen.tally.waits), ("/healthz", seen.health), ("/healthz, bare", seen.bare))
    for name, waits in named:
        middle, late, last = (1000 * np.quantile(waits, share) for share in (0.5, 0.99, 1.0))
        sys.stdout.write(f"{name:<16} p50 {middle:.0f} ms, p99 {late:.0f} ms, most {last:.0f} ms of {len(waits)}\n")
    sys.stdout.write(f"memory           {max(seen.memory) / 2**20:.0f} MiB at most\n")
    took, waited = seen.looper
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    sys.stdout.write(f"event loop       {took:.0f} CPU-s, {waited:.0f} s ready without a CPU; load {load}\n")
    sys.stdout.write(f"answers          {dict(sorted(seen.tally.statuses.items()))}\n")
    total = sum(seen.tally.acknowledged.values())
    sys.stdout.write(f"seed {chosen.seed}: {total} reports acknowledged, {lost} lost\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
