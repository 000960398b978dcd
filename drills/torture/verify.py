"""After the storm: every acknowledged report once, no other, the same from the journal and from chunks."""

from __future__ import annotations

from contextlib import closing

import httpx
import numpy as np
from collage_server.store import Selection, SqliteStore

from collage_monitor import wire
from drills.torture.clients import ask
from drills.torture.ledger import EVALUATED, RANKS, evaluated, report_of
from tests.server.reads import layer_points, model_points, scalar_points
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["verify"]

_BATCH = 200


def verify(ledger, url, run_id, make_store):
    """Findings go to the ledger. Every sender has ended between two batches, so what was sent is acknowledged."""
    with httpx.Client(timeout=PATIENCE_SECONDS, trust_env=False) as client:
        _resend(ledger, client, url, run_id)
        until(lambda: ask(client, url, "PATCH", f"/runs/{run_id}", wire.RunUpdate(state="finished")), "an answer")
    with closing(make_store()) as store:
        store.open()
        until(lambda: run_id not in store.journal.runs(), "the sealing of a finished run's journal")
        _compare(ledger, store, run_id)
        if isinstance(store, SqliteStore):
            with store.reading() as connection:
                answer = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
            if answer != "ok":
                ledger.find(f"integrity_check: {answer}")


def _resend(ledger, client, url, run_id):
    """All that was acknowledged, once more: the server has it, and takes none of it."""
    sent = {str(rank): [report_of(rank, 1 + seq) for seq in range(n)] for rank, n in enumerate(ledger.acknowledged)}
    sent |= {f"e{place}": [evaluated(place, seq) for seq in range(n)] for place, n in enumerate(ledger.evaluated)}
    for stream, reports in sent.items():
        path = f"/streams/{run_id}-{stream}/reports"
        for first in range(0, len(reports), _BATCH):
            some = reports[first : first + _BATCH]
            batch = wire.ReportBatch(reports=some)
            answer = until(
                lambda path=path, batch=batch: ask(client, url, "POST", path, batch, wire.encode_batch), "an answer"
            )
            told = wire.decode_message(answer.content, wire.BatchAnswer, wire.JSON)
            if (told.accepted, told.duplicates) != (0, len(some)):
                ledger.find(f"stream {stream}, from report {first} on: sent again, answered {told}")


def _compare(ledger, store, run_id):
    """Sums, counts and scalars of every step, from chunks alone."""
    last = max(ledger.acknowledged)
    steps = np.arange(1, last + 1)
    there = np.array([[step <= end for step in steps] for end in ledger.acknowledged])
    weights = (there * (1 + np.arange(RANKS))[:, None]).sum(axis=0)
    model = model_points(store, run_id, ["lost", "measured_steps"], Selection())
    layers = layer_points(store, run_id, ["lost"], Selection())
    loss = scalar_points(store, run_id, ["loss"], Selection())["loss"]
    for what, found, expected in (
        ("steps", model.steps, steps),
        ("ranks", model.ranks, there.sum(axis=0)),
        ("lost", model.totals["lost"], 60.0 * weights),
        ("lost by layer", layers.totals["lost"], 10.0 * weights[:, None] * np.array([1, 2, 3])),
        ("steps of the loss", loss.steps, steps),
        ("loss", loss.values, 4.0 - 0.01 * steps),
    ):
        if np.shape(found) != np.shape(expected) or not np.allclose(found, expected, rtol=1e-12):
            ledger.find(f"{what}: {len(found)} values are not the {len(expected)} that were acknowledged")
    _compare_evaluated(ledger, store, run_id)
    counts = {stream.rank: stream.reports for stream in store.streams.of_run(run_id) if stream.attempt > 0}
    if counts != dict(enumerate(ledger.acknowledged)):
        ledger.find(f"streams count {counts}, acknowledged were {ledger.acknowledged}")


def _compare_evaluated(ledger, store, run_id):
    """Every value that an evaluator logged, once, at its step."""
    points = scalar_points(store, run_id, [EVALUATED], Selection()).get(EVALUATED)
    found = {} if points is None else dict(zip(points.steps.tolist(), points.values.tolist(), strict=True))
    reports = [evaluated(place, seq) for place, count in enumerate(ledger.evaluated) for seq in range(count)]
    if found != {report.step: report.scalars[EVALUATED] for report in reports}:
        ledger.find(f"of evaluators {len(found)} values are not the {len(reports)} that were acknowledged")
    streams = [stream for stream in store.streams.of_run(run_id) if stream.attempt < 0]
    counts = {stream.stream_id: stream.reports for stream in streams if stream.reports}
    if counts != {f"{run_id}-e{place}": count for place, count in enumerate(ledger.evaluated) if count}:
        ledger.find(f"evaluators' streams count {counts}, acknowledged were {ledger.evaluated}")
