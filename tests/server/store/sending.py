"""Runs that begin, ranks that register, and what they report to a store."""

import numpy as np
from collage_server.store import ReportGroup
from msgspec.structs import replace

from collage_monitor import wire
from tests.server.samples import report, stream_create
from tests.server.store.stores import NOW


def launch(store, number, first_step, stream_id=None, run_id="r1", now=NOW, **more):
    """A launch of the run, with a stream where one is named."""
    create = wire.AttemptCreate(launch_id=f"launch-{number}", first_step=first_step)
    store.streams.create_attempt(run_id, create, now)
    return stream_id and register(store, stream_id, run_id, launch_id=f"launch-{number}", **more)


def register(store, stream_id, run_id="r1", **more):
    """A stream of the run, or what it has more by now."""
    store.streams.create_stream(run_id, stream_create(stream_id, **more), NOW)
    return store.streams.stream_record(stream_id)


def fill(store, run_id="r1", stream_id="s0", project="p"):
    """A run with a launch and a stream, which is returned."""
    store.runs.create(project, wire.RunCreate(run_id=run_id), NOW)
    return launch(store, 1, 1, stream_id, run_id)


def ranks(store, count, replica=lambda rank: 0):
    """A run of so many ranks; their streams."""
    store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
    launch(store, 1, 1)
    more = {"world_size": count}
    return [register(store, f"s{rank}", rank=rank, replica=replica(rank), **more) for rank in range(count)]


def append(store, stream, *reports, now=NOW):
    return store.journal.append([ReportGroup(stream, list(reports))], now)[0]


def send(store, stream, steps, rank=0, first_seq=0, now=NOW, **more):
    """A report of each step."""
    reports = [report(first_seq + i, step, rank=rank, **more) for i, step in enumerate(steps)]
    return append(store, stream, *reports, now=now)


def with_more(message, *statistics):
    """The report with more statistics, each a number of every layer or all of them."""
    totals = np.frombuffer(message.statistics).reshape(message.statistic_count, -1)
    more = np.array([np.broadcast_to(values, totals.shape[1]) for values in statistics])
    return replace(
        message,
        statistic_count=len(totals) + len(more),
        statistics=wire.array_to_bytes(np.vstack([totals, more])),
        model=wire.array_to_bytes(np.append(np.frombuffer(message.model), more.sum(axis=1))),
    )
