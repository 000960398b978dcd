"""The spool file: order, durability, torn ends, locks and damage."""

import os
import random

import pytest
from collage_agent.transport.envelope import Envelope
from collage_agent.transport.report_log import ReportLog, abandoned_spools, spool_path

from collage_monitor.errors import WireError
from collage_monitor.wire import AttemptCreate, Report, ReportBatch, ReportGap, RunCreate
from tests.forking import TRAINING, run_forked

pytestmark = pytest.mark.slow


def reports(*seqs, gaps=()):
    made = [Report(seq=seq, step=seq, time=1.0, scalars={"loss": 0.5}) for seq in seqs]
    return Envelope("project", "run", "stream", ReportBatch(reports=made, gaps=list(gaps)))


def kept(log, envelope):
    """Keep an envelope in the file, and return how many reports had to give way to it."""
    before = log.counts.dropped.get("spool_full", 0)
    log.counts.add(envelope.report_count)
    log.append(envelope)
    log.keep()
    return log.counts.dropped.get("spool_full", 0) - before


def read_all(log):
    envelopes = []
    while (envelope := log.first()) is not None:
        envelopes.append(envelope)
        log.acknowledge()
    return envelopes


def test_what_goes_in_comes_out_in_order_and_the_file_goes(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    log = ReportLog(path)
    written = [Envelope("project", "run", "stream", RunCreate(run_id="run")), reports(0, 1), reports(2)]
    for envelope in written:
        kept(log, envelope)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert read_all(log) == written
    assert log.is_empty
    kept(log, reports(3))
    assert read_all(log) == [written[0], reports(3)], "a file does without what the server knew"
    log.close()
    assert not path.parent.exists()


def test_a_file_is_read_by_the_next_process_only_when_its_writer_is_gone(tmp_path):
    log = ReportLog(spool_path(tmp_path, "run", "stream"))
    kept(log, reports(0))
    other = spool_path(tmp_path, "other", "other")
    assert list(abandoned_spools(tmp_path, other)) == []
    log.close()
    (found,) = abandoned_spools(tmp_path, other)
    assert read_all(found) == [reports(0)]
    found.close()
    assert list(abandoned_spools(tmp_path, other)) == []


@pytest.mark.parametrize("cut", [1, 7, 9, 30])
def test_a_torn_end_costs_the_last_record_only(tmp_path, cut, caplog):
    path = spool_path(tmp_path, "run", "stream")
    log = ReportLog(path)
    kept(log, reports(0))
    kept(log, reports(1))
    log.close()
    os.truncate(path, path.stat().st_size - cut)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert read_all(found) == [reports(0)]
    assert "torn" in caplog.text
    found.close()
    assert not path.exists()


WRITTEN_BY_THE_FIRST_RELEASE = (
    b"collage-spool-2\n\xc1\xf5spool\n\xe2\x00\x00\x00o\xe6Ym\x85\xa4kind\xa7reports\xa7project\xa7project\xa6run_id\xa3run"
    b"\xa9stream_id\xa6stream\xa4body\xc4\xa1\x82\xa7reports\x91\x89\xa3seq\x01\xa4step\x01\xa4time\xcb?\xf0\x00\x00\x00"
    b"\x00\x00\x00\xa7scalars\x81\xa4loss\xcb?\xe0\x00\x00\x00\x00\x00\x00\xafstatistic_count\x00\xablayer_count\x00"
    b"\xaastatistics\xc0\xa5model\xc0\xa5parts\x01\xa4gaps\x91\x83\xa9first_seq\x00\xa8last_seq\x00\xa6reason\xaaqueue_full"
)


def test_a_file_of_an_earlier_release_is_read(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    path.parent.mkdir(parents=True)
    path.write_bytes(WRITTEN_BY_THE_FIRST_RELEASE)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    gap = ReportGap(first_seq=0, last_seq=0, reason="queue_full")
    assert read_all(found) == [reports(1, gaps=[gap])]
    found.close()


def test_a_strange_file_is_left_alone(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else entirely")
    assert list(abandoned_spools(tmp_path, tmp_path)) == []
    assert path.exists()


def test_a_killed_process_loses_nothing_that_was_appended(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from collage_agent.transport.envelope import Envelope
from collage_agent.transport.report_log import ReportLog, spool_path
from collage_monitor.wire import Report, ReportBatch
from tests.forking import TRAINING, run_forked
log = ReportLog(spool_path(Path({str(tmp_path)!r}), "run", "stream"))
for seq in range(5):
    batch = ReportBatch(reports=[Report(seq=seq, step=seq, time=1.0, scalars={{"loss": 0.5}})])
    log.append(Envelope("project", "run", "stream", batch))
    log.keep()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_forked(TRAINING, "-c", code).returncode == -9
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert read_all(found) == [reports(seq) for seq in range(5)]
    found.close()


def test_a_full_spool_gives_up_its_older_half_and_says_which(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    log = ReportLog(path, limit_bytes=4_000)
    introductions = [
        Envelope("project", "run", "stream", RunCreate(run_id="run")),
        Envelope("project", "run", "stream", AttemptCreate(launch_id="launch", first_step=1)),
    ]
    for envelope in introductions:
        kept(log, envelope)
    lost = 0
    for seq in range(100):
        lost += kept(log, reports(seq))
        assert path.stat().st_size <= 4_000
        assert (log.counts.spooled, log.counts.dropped) == (seq + 1 - lost, {"spool_full": lost} if lost else {})
    assert 50 < lost < 100
    gap = ReportGap(first_seq=0, last_seq=lost - 1, reason="spool_full")
    assert read_all(log) == [*introductions, reports(gaps=[gap]), *(reports(seq) for seq in range(lost, 100))]
    assert log.is_empty
    log.close()
    assert list(tmp_path.glob("spool/*")) == []


def test_what_was_read_makes_room_before_anything_is_given_up(tmp_path):
    log = ReportLog(spool_path(tmp_path, "run", "stream"), limit_bytes=4_200)
    assert [kept(log, reports(seq)) for seq in range(20)] == [0] * 20
    for seq in range(15):
        assert log.first() == reports(seq)
        log.acknowledge()
    assert [kept(log, reports(seq)) for seq in range(20, 32)] == [0] * 12
    assert read_all(log) == [reports(seq) for seq in range(15, 32)]
    log.close()


@pytest.mark.parametrize("settled", [0, 8])
def test_what_is_left_of_a_record_alone_gives_way(tmp_path, settled):
    """Settled records before it make room first."""
    log = ReportLog(spool_path(tmp_path, "run", "stream"), limit_bytes=4_000)
    for seq in range(settled):
        kept(log, reports(seq))
    told = ReportGap(first_seq=100, last_seq=100, reason="rejected")
    whole = reports(101, 102, 103, 104, gaps=[told])
    kept(log, whole)
    for _ in range(settled):
        log.first()
        log.acknowledge()
    assert log.first() == whole
    log.split()
    assert log.first() == reports(101, 102, gaps=[told])
    log.acknowledge()
    seq = 105
    while not (lost := kept(log, reports(seq))):
        assert log.first() == reports(103, 104)
        seq += 1
    gap = ReportGap(first_seq=103, last_seq=102 + lost, reason="spool_full")
    assert read_all(log) == [reports(gaps=[gap]), *(reports(number) for number in range(103 + lost, seq + 1))]
    assert (log.counts.spooled, log.counts.pending) == (0, 0)
    log.close()


def test_a_shortened_spool_stays_locked_and_outlives_its_process(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    log = ReportLog(path, limit_bytes=2_000)
    lost = sum(kept(log, reports(seq)) for seq in range(40))
    other = spool_path(tmp_path, "other", "other")
    assert list(abandoned_spools(tmp_path, other)) == []
    log.close()
    (found,) = abandoned_spools(tmp_path, other)
    assert read_all(found)[1:] == [reports(seq) for seq in range(lost, 40)]
    found.close()


def test_a_message_too_long_for_the_spool_is_given_up(tmp_path, caplog):
    log = ReportLog(spool_path(tmp_path, "run", "stream"), limit_bytes=500)
    kept(log, reports(0))
    kept(log, reports(*range(1, 20)))
    assert log.counts.dropped == {"spool_failed": 19}
    assert "too long" in caplog.text
    gap = ReportGap(first_seq=1, last_seq=19, reason="spool_failed")
    assert log.first() == reports(0, gaps=[gap])
    kept(log, reports(20))
    assert read_all(log) == [reports(0), reports(20, gaps=[gap])], "the file tells of it from now on"
    log.close()


def test_a_message_that_cannot_be_encoded_is_given_up(tmp_path):
    log = ReportLog(spool_path(tmp_path, "run", "stream"))
    kept(log, Envelope("project", "run", "stream", RunCreate(run_id="run", config={"made": object()})))
    kept(log, reports(0))
    assert read_all(log) == [reports(0)]


@pytest.mark.parametrize("place", ["mark", "length", "checksum", "payload"])
def test_a_damaged_record_costs_itself_only(tmp_path, place, caplog):
    path = spool_path(tmp_path, "run", "stream")
    log = ReportLog(path)
    begins = []
    for seq in range(6):
        begins.append(path.stat().st_size if path.exists() else None)
        kept(log, reports(2 * seq, 2 * seq + 1))
    log.close()
    content = bytearray(path.read_bytes())
    begin = begins[2]
    assert begin is not None
    content[begin + {"mark": 3, "length": 9, "checksum": 13, "payload": 60}[place]] ^= 0x55
    path.write_bytes(content)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    gap = ReportGap(first_seq=4, last_seq=5, reason="spool_damaged")
    before, at, behind = [reports(0, 1), reports(2, 3)], reports(6, 7, gaps=[gap]), [reports(8, 9), reports(10, 11)]
    assert read_all(found) == [*before, at, *behind]
    assert (found.counts.sent, found.counts.dropped) == (10, {"spool_damaged": 2})
    assert "left out" in caplog.text
    found.close()


@pytest.mark.parametrize("seed", range(20))
def test_noise_in_a_file_never_gives_a_false_report(tmp_path, seed):
    random_bytes = random.Random(seed)
    path = spool_path(tmp_path, "run", "stream")
    log = ReportLog(path)
    for seq in range(50):
        kept(log, reports(seq))
    log.close()
    content = bytearray(path.read_bytes())
    for _ in range(10):
        content[random_bytes.randrange(20, len(content))] = random_bytes.randrange(256)
    path.write_bytes(content)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    read = [envelope.body.reports for envelope in read_all(found)]
    assert 40 <= len(read) <= 50
    written = [reports(seq).body.reports for seq in range(50)]
    assert [batch for batch in read if batch not in written] == []
    found.close()


@pytest.mark.parametrize("damaged", range(40))
def test_a_mark_on_the_border_of_two_blocks_is_found(tmp_path, monkeypatch, damaged):
    """Blocks begin where a damaged record does: of 40 records some end just where a block does."""
    monkeypatch.setattr("collage_agent.transport.report_log._READ_BYTES", 64)
    path = spool_path(tmp_path, "run", "stream")
    log, ends = ReportLog(path), []
    written = [reports(*range(100 * seq, 100 * seq + 1 + seq % 7)).body.reports for seq in range(40)]
    for batch in written:
        kept(log, Envelope("project", "run", "stream", ReportBatch(reports=batch)))
        ends.append(path.stat().st_size)
    log.close()
    content = bytearray(path.read_bytes())
    content[ends[damaged] - 1] ^= 1
    path.write_bytes(content)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert [envelope.body.reports for envelope in read_all(found)] == [*written[:damaged], *written[damaged + 1 :]]
    found.close()


def test_what_is_left_in_a_closed_file_is_on_the_disk(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def noted(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = spool_path(tmp_path, "run", "stream")
    log = ReportLog(path)
    kept(log, reports(0))
    synced.clear()
    log.close()
    assert synced == [str(path)]


def test_an_envelope_that_is_none_raises():
    with pytest.raises(WireError, match="not a spooled message"):
        Envelope.from_bytes(b"\xc1")
