"""Senders that never give up, and a reader that never sees half of anything."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod

import httpx

from collage_monitor import wire
from drills.torture.ledger import RANKS, evaluated, members, report_of

__all__ = ["Evaluator", "Reader", "Sender", "ask"]

_AHEAD = 48
_LATER = {429, 502, 503, 504}
"""Statuses after which agents send again; 502 and 504 are of a proxy whose server has gone."""
_WINDOW = 300


def ask(client, url, method, path, message=None, encode=wire.encode_message):
    """The answer, or None while nobody answers or the server is busy; other statuses are an error."""
    content = None if message is None else encode(message)
    try:
        answer = client.request(
            method, f"{url}/api/v1{path}", content=content, headers={"Content-Type": wire.MSGPACK}
        )
    except httpx.TransportError:
        return None
    if answer.status_code in _LATER:
        return None
    answer.raise_for_status()
    return answer


class _Client(threading.Thread, ABC):
    """A thread with its own connections and random numbers, that looks at the list `urls` anew each time."""

    def __init__(self, ledger, urls, run_id, seed):
        super().__init__(daemon=True)
        self.ledger = ledger
        self.urls = urls
        self.run_id = run_id
        self.random = random.Random(seed)
        self.stopping = threading.Event()

    def run(self):
        try:
            with httpx.Client(timeout=10.0, trust_env=False) as client:
                self.work(client)
        except Exception as error:
            self.ledger.find(f"{type(self).__name__}: {type(error).__name__}: {error}")

    @abstractmethod
    def work(self, client):
        """What it does until `stopping` is set."""

    def deliver(self, client, stream, reports):
        """Until there is an answer, also when told to stop: what was begun is finished."""
        batch = wire.ReportBatch(reports=reports)
        path = f"/streams/{self.run_id}-{stream}/reports"
        while True:
            began = time.perf_counter()
            answer = ask(client, self.random.choice(self.urls), "POST", path, batch, wire.encode_batch)
            if answer is not None:
                break
            threading.Event().wait(0.03)
        self.ledger.waits.append(time.perf_counter() - began)
        told = wire.decode_message(answer.content, wire.BatchAnswer, wire.JSON)
        if told.rejected or told.accepted + told.duplicates != len(reports):
            self.ledger.find(f"stream {stream}: a batch of {len(reports)} was answered {told}")
        if told.accepted not in (0, len(reports)):
            self.ledger.find(f"stream {stream}: half of a batch was there: {told}")
        return told


class Sender(_Client):
    """One rank: sends a batch until it is acknowledged, then the next; sometimes an old one once more."""

    def __init__(self, ledger, urls, run_id, seed, rank):
        super().__init__(ledger, urls, run_id, seed)
        self.rank = rank

    def work(self, client):
        while not self.stopping.wait(0.01 * self.random.random()):
            if self.ledger.acknowledged[self.rank] > min(self.ledger.acknowledged) + _AHEAD:
                continue
            group = self.ledger.next_group(self.rank, self.random.randint(1, 4))
            self.send(client, group)
            self.ledger.acknowledge(self.rank, group)
            if self.random.random() < 0.1:
                old = self.random.choice(self.ledger.groups[self.rank])
                if self.send(client, old).accepted:
                    self.ledger.find(f"rank {self.rank}: steps {old} were acknowledged, and were not there")

    def send(self, client, group):
        """The reports of these steps."""
        return self.deliver(client, self.rank, [report_of(self.rank, step) for step in group])


class Evaluator(_Client):
    """Logs beside the ranks, more rarely; sometimes what it sent before once more."""

    def __init__(self, ledger, urls, run_id, seed, place):
        super().__init__(ledger, urls, run_id, seed)
        self.place = place

    def work(self, client):
        while not self.stopping.wait(0.1 * self.random.random()):
            done = self.ledger.evaluated[self.place]
            size = self.random.randint(1, 4)
            self.send(client, range(done, done + size))
            self.ledger.evaluated[self.place] = done + size
            if self.random.random() < 0.1 and self.send(client, range(done // 2, done // 2 + 1)).accepted:
                self.ledger.find(f"evaluator {self.place}: report {done // 2} was acknowledged, and was not there")

    def send(self, client, numbers):
        """The reports of these numbers."""
        return self.deliver(client, f"e{self.place}", [evaluated(self.place, seq) for seq in numbers])


class Reader(_Client):
    """Reads the run over and over: points made of whole reports, batches whole, nothing ever less than before."""

    def __init__(self, ledger, urls, run_id, seed):
        super().__init__(ledger, urls, run_id, seed)
        self.looks = 0
        self.seen: dict[int, frozenset[int]] = {}
        self.counts = [0] * RANKS

    def work(self, client):
        while not self.stopping.wait(0.05):
            url = self.random.choice(self.urls)
            acknowledged, _ = self.ledger.snapshot()
            first = max(min(acknowledged) - _WINDOW, 1)
            asked = f"metric=lost_update_ratio&points=10000&from={first}"
            layer = self.random.choice(["", "&layer=embedding.weight"])
            answer = ask(client, url, "GET", f"/runs/{self.run_id}/series?{asked}{layer}")
            if answer is not None:
                self.look(wire.decode_message(answer.content, wire.Series, wire.JSON), acknowledged, first, layer)
            self.look_at_streams(client, url)
            self.look_at_latest(client, url)

    def look(self, series, acknowledged, first, layer):
        self.looks += 1
        scale = 2.0 if layer else 1.0
        held: dict[int, frozenset[int]] = {}
        for step, value, ranks in zip(series.steps, series.values, series.ranks, strict=True):
            made_of = None if value is None else members(float(value) * scale, ranks)
            held[step] = made_of or frozenset()
            if made_of is None:
                self.ledger.find(f"step {step}: {value} of {ranks} ranks is no sum of whole reports")
        for step, known in self.seen.items():
            if step >= first and not known <= held.get(step, frozenset()):
                self.ledger.find(f"step {step}: ranks {set(known)} were there, now {held.get(step)}")
        for rank, last in enumerate(acknowledged):
            for step in range(first, last + 1):
                if rank not in held.get(step, ()):
                    self.ledger.find(f"step {step} of rank {rank} was acknowledged and is not there")
        for rank, groups in enumerate(self.ledger.snapshot()[1]):
            for group in groups[-_WINDOW // 2 :]:
                if group.start >= first and len({rank in held.get(step, ()) for step in group}) > 1:
                    self.ledger.find(f"half of the batch {group} of rank {rank} is there")
        self.seen = held

    def look_at_streams(self, client, url):
        before, _ = self.ledger.snapshot()
        answer = ask(client, url, "GET", f"/runs/{self.run_id}/streams")
        if answer is None:
            return
        for stream in wire.decode_message(answer.content, wire.StreamList, wire.JSON).streams:
            if stream.attempt < 0:
                continue
            rank, count = stream.rank, stream.reports
            if count < max(before[rank], self.counts[rank]) or stream.last_step not in (None, count):
                self.ledger.find(
                    f"rank {rank} has {count} reports up to step {stream.last_step}, after {before[rank]}"
                )
            self.counts[rank] = count

    def look_at_latest(self, client, url):
        """Two metrics of one answer tell of the same reports."""
        answer = ask(client, url, "GET", f"/runs/{self.run_id}/latest")
        latest = None if answer is None else wire.decode_message(answer.content, wire.Latest, wire.JSON)
        if latest is None or latest.step is None:
            return
        lost, size = (float(latest.model[name] or 0.0) for name in ("lost_update_ratio", "update_to_weight_ratio"))
        told = size**2 * 3 * (100 + latest.step) / (6 * (1 + latest.step % 7))
        if abs(told - 6 * lost) > 1e-9:
            self.ledger.find(f"latest, step {latest.step}: {lost} and {size} are not of the same reports")
