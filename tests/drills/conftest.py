"""Stores filled as told."""

from __future__ import annotations

import itertools

import pytest
from collage_server.store import ReportGroup, SqliteStore

from collage_monitor import wire
from drills.torture.ledger import RANKS
from tests.server.samples import stream_create

NOW = 1_700_000_000.0


@pytest.fixture
def store(tmp_path):
    """Makes an open store whose run r1 holds `reports_of(rank)`."""
    opened, numbers = [], itertools.count()

    def make(reports_of):
        made = SqliteStore(tmp_path / f"{next(numbers)}.sqlite", stale_after_seconds=600.0)
        made.open()
        opened.append(made)
        made.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
        made.streams.create_attempt("r1", wire.AttemptCreate(launch_id="l", first_step=1), NOW)
        for rank in range(RANKS):
            made.streams.create_stream("r1", stream_create(f"s{rank}", "l", rank=rank, world_size=RANKS), NOW)
            made.journal.append([ReportGroup(made.streams.stream_record(f"s{rank}"), reports_of(rank))], NOW)
        return made

    yield make
    for entry in opened:
        entry.close()
