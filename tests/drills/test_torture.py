"""The torture in short, with a fixed seed; `make torture` goes on for longer, with another one each time."""

import itertools

import pytest
from collage_server.store import ReportGroup, SqliteStore

from collage_monitor import wire
from drills.torture.__main__ import LANES, torture
from drills.torture.ledger import RANKS, Ledger, members, report_of
from drills.torture.verify import _compare
from tests.server.samples import stream_create
from tests.server.store.postgresql import programs_or_skip
from tests.server.store.seaweed import program_or_skip

pytestmark = pytest.mark.slow

SHORT = {"sqlite": 7, "sqlite, small disk": 4, "sqlite, migration": 6, "postgresql": 14, "sqlite, archive": 8}
NOW = 1_700_000_000.0
ARCHIVES = ("sqlite, archive", "postgresql, bucket")
BY_DAY = ("sqlite", "sqlite, migration")


@pytest.mark.parametrize(
    "lane", [lane if lane in BY_DAY else pytest.param(lane, marks=pytest.mark.nightly) for lane in SHORT]
)
def test_nothing_acknowledged_is_lost_or_doubled_and_nothing_half_seen(lane):
    if lane.startswith("postgresql"):
        programs_or_skip()
    rows, findings = torture(SHORT[lane], 7, print, (lane,))
    assert findings == []
    assert sum(row["kills"] for row in rows) >= SHORT[lane]
    aimed = {"commit", "answer"} if lane in {"sqlite", "postgresql"} else set()
    assert {row["end"] for row in rows} >= aimed


@pytest.mark.nightly
def test_two_hundred_kills():
    programs_or_skip()
    rows, findings = torture(220, 11, print, tuple(lane for lane in LANES if lane not in ARCHIVES))
    assert findings == []
    assert sum(row["kills"] for row in rows) >= 200


@pytest.mark.nightly
def test_three_hundred_kills_of_who_archives():
    """Amid archiving, retention and deletion; of the object store, too."""
    programs_or_skip()
    program_or_skip()
    rows, findings = torture(300, 12, print, ARCHIVES)
    assert findings == []
    assert sum(row["kills"] for row in rows) >= 300


def test_a_point_of_half_a_report_is_told_from_whole_ones():
    assert members(60.0 / 360.0, 1) == {0}
    assert members(180.0 / 720.0, 2) == {0, 1}
    assert members(360.0 / 1080.0, 3) == {0, 1, 2}
    for ratio, ranks in ((60.0 / 720.0, 2), (120.0 / 360.0 + 1e-6, 1), (420.0 / 1080.0, 3), (0.0, 1)):
        assert members(ratio, ranks) is None


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


def test_a_lost_and_a_doubled_report_are_found(store):
    """The verification can fail: one report that was never stored, one that was stored under two numbers."""
    ledger = Ledger()
    for rank in range(RANKS):
        ledger.acknowledge(rank, ledger.next_group(rank, 3))
    _compare(ledger, store(lambda rank: [report_of(rank, step) for step in (1, 2, 3)]), "r1")
    assert ledger.findings == []
    _compare(ledger, store(lambda rank: [report_of(rank, step) for step in (1, 3)]), "r1")
    assert any("lost" in finding for finding in ledger.findings)
    assert any("streams count" in finding for finding in ledger.findings)
    assert not any("evaluators" in finding for finding in ledger.findings)
    ledger.evaluated[0] = 1
    _compare(ledger, store(lambda rank: [report_of(rank, step) for step in (1, 2, 3)]), "r1")
    assert any("of evaluators 0 values are not the 1" in finding for finding in ledger.findings)
