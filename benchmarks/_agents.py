"""Simulated agents: each a queue that fills at its own rate, one connection, one request at a time.

As the real one does: what has gathered goes as one batch, a refused batch is sent again after Retry-After, and when
the queue is full the oldest reports go.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from benchmarks._reports import Shape
from benchmarks._serving import request_of
from collage_monitor import wire

__all__ = ["Agent", "Tally"]

BATCH_REPORTS: Final = 500
QUEUE_REPORTS: Final = 2000
LINGER_SECONDS: Final = 0.5
REFUSED: Final = (429, 503)


@dataclass
class Tally:
    """What all agents together have seen. `waits` are seconds from sending a batch to its acknowledgement."""

    waits: list[float] = field(default_factory=list)
    refusal_waits: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    without_retry_after: int = 0
    acknowledged: dict[str, int] = field(default_factory=dict)
    dropped: int = 0


class Agent:
    """One stream's sender. Report `seq` is given when a report leaves the queue, its step is the time's."""

    def __init__(self, port: int, stream_id: str, shape: Shape, rate: float, seed: int, tally: Tally) -> None:
        self.stream_id = stream_id
        self._port = port
        self._rate = rate
        self._tally = tally
        self._random = random.Random(seed)
        block = np.random.default_rng(seed).random((len(shape.statistics), shape.layers))
        self._shape = shape
        self._statistics = wire.block_to_bytes(block)
        self._model = wire.block_to_bytes(block.sum(axis=1))
        self._next_seq = 0
        self._next_step = 0
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
        waiting = int(elapsed * self._rate) - self._next_step
        lost = max(waiting - QUEUE_REPORTS, 0)
        self._next_step += lost
        self._tally.dropped += lost
        return min(waiting - lost, BATCH_REPORTS)

    async def _deliver(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> None:
        """Send one batch until it is acknowledged."""
        request = self._encoded(count)
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

    def _encoded(self, count: int) -> bytes:
        reports = [
            wire.Report(
                seq=self._next_seq + i,
                step=self._next_step + i,
                time=time.time(),
                scalars={"loss": 2.5},
                statistic_count=len(self._shape.statistics),
                layer_count=self._shape.layers,
                statistics=self._statistics,
                model=self._model,
            )
            for i in range(count)
        ]
        self._next_seq += count
        self._next_step += count
        return request_of(
            f"/streams/{self.stream_id}/reports", wire.encode_batch(wire.ReportBatch(reports=reports))
        )


async def _answer_of(reader: asyncio.StreamReader) -> tuple[int, float | None, bytes]:
    """Status, Retry-After and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    retry_after = fields.get("retry-after")
    body = await reader.readexactly(int(fields["content-length"]))
    return int(first.split()[1]), None if retry_after is None else float(retry_after), body
