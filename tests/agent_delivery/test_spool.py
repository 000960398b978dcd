"""The spool file: order, durability, torn ends, locks and damage."""

import os
import random
from dataclasses import replace

import pytest
from collage_agent.transport.envelope import Envelope
from collage_agent.transport.spool import SpoolFile, abandoned_spools, spool_path

from collage_monitor.errors import WireError
from collage_monitor.wire import AttemptCreate, Report, ReportBatch, ReportGap, RunCreate
from tests.forking import TRAINING, run_forked

pytestmark = pytest.mark.slow


def reports(*seqs):
    batch = ReportBatch(reports=[Report(seq=seq, step=seq, time=1.0, scalars={"loss": 0.5}) for seq in seqs])
    return Envelope("project", "run", "stream", batch)


def appended(spool, envelope):
    """Append an envelope, and return what had to give way to it."""
    spool.append(envelope)
    gave_way, spool.gave_way = spool.gave_way, []
    return gave_way


def read_all(spool):
    envelopes = []
    while (envelope := spool.peek()) is not None:
        envelopes.append(envelope)
        spool.advance()
    return envelopes


def test_what_goes_in_comes_out_in_order_and_the_file_goes(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path)
    written = [Envelope("project", "run", "stream", RunCreate(run_id="run")), reports(0, 1), reports(2)]
    for envelope in written:
        spool.append(envelope)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert read_all(spool) == written
    assert spool.is_empty
    spool.append(reports(3))
    assert read_all(spool) == [reports(3)]
    spool.close()
    assert not path.parent.exists()


def test_a_file_is_read_by_the_next_process_only_when_its_writer_is_gone(tmp_path):
    spool = SpoolFile(spool_path(tmp_path, "run", "stream"))
    spool.append(reports(0))
    other = spool_path(tmp_path, "other", "other")
    assert list(abandoned_spools(tmp_path, other)) == []
    spool.close()
    (found,) = abandoned_spools(tmp_path, other)
    assert read_all(found) == [reports(0)]
    found.close()
    assert list(abandoned_spools(tmp_path, other)) == []


@pytest.mark.parametrize("cut", [1, 7, 9, 30])
def test_a_torn_end_costs_the_last_record_only(tmp_path, cut, caplog):
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path)
    spool.append(reports(0))
    spool.append(reports(1))
    spool.close()
    os.truncate(path, path.stat().st_size - cut)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert read_all(found) == [reports(0)]
    assert "torn" in caplog.text
    found.close()
    assert not path.exists()


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
from collage_agent.transport.spool import SpoolFile, spool_path
from collage_monitor.wire import Report, ReportBatch
from tests.forking import TRAINING, run_forked
spool = SpoolFile(spool_path(Path({str(tmp_path)!r}), "run", "stream"))
for seq in range(5):
    batch = ReportBatch(reports=[Report(seq=seq, step=seq, time=1.0, scalars={{"loss": 0.5}})])
    spool.append(Envelope("project", "run", "stream", batch))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_forked(TRAINING, "-c", code).returncode == -9
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert read_all(found) == [reports(seq) for seq in range(5)]
    found.close()


def test_a_full_spool_gives_up_its_older_half_and_says_which(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path, limit_bytes=4_000)
    introductions = [
        Envelope("project", "run", "stream", RunCreate(run_id="run")),
        Envelope("project", "run", "stream", AttemptCreate(launch_id="launch", first_step=1)),
    ]
    for envelope in introductions:
        spool.append(envelope)
    lost: list[int] = []
    for seq in range(100):
        for gap in appended(spool, reports(seq)):
            assert gap.reason == "spool_full"
            lost += range(gap.first_seq, gap.last_seq + 1)
        assert path.stat().st_size <= 4_000
    assert lost == list(range(len(lost)))
    assert 50 < len(lost) < 100
    gap = ReportGap(first_seq=0, last_seq=lost[-1], reason="spool_full")
    told = replace(reports(), body=ReportBatch(reports=[], gaps=[gap]))
    assert read_all(spool) == [*introductions, told, *(reports(seq) for seq in range(len(lost), 100))]
    assert spool.is_empty
    spool.close()
    assert list(tmp_path.glob("spool/*")) == []


def test_what_was_read_makes_room_before_anything_is_given_up(tmp_path):
    spool = SpoolFile(spool_path(tmp_path, "run", "stream"), limit_bytes=4_200)
    for seq in range(20):
        assert appended(spool, reports(seq)) == []
    for seq in range(15):
        assert spool.peek() == reports(seq)
        spool.advance()
    assert [gap for seq in range(20, 32) for gap in appended(spool, reports(seq))] == []
    assert read_all(spool) == [reports(seq) for seq in range(15, 32)]
    spool.close()


def test_what_is_left_of_a_record_is_read_again_and_alone_gives_way(tmp_path):
    spool = SpoolFile(spool_path(tmp_path, "run", "stream"), limit_bytes=4_000)
    told = ReportGap(first_seq=0, last_seq=0, reason="rejected")
    first = reports(1, 2, 3, 4)
    whole = replace(first, body=ReportBatch(reports=first.body.reports, gaps=[told]))
    spool.append(whole)
    assert spool.peek() == whole
    spool.leave(whole)
    assert spool.peek() == whole
    spool.leave(reports(3, 4))
    assert spool.peek() == reports(3, 4)
    seq = 5
    while not (gaps := appended(spool, reports(seq))):
        seq += 1
    lost = [number for gap in gaps for number in range(gap.first_seq, gap.last_seq + 1)]
    assert lost == list(range(3, lost[-1] + 1))
    left = read_all(spool)
    assert left[0].body == ReportBatch(reports=[], gaps=gaps)
    assert left[1:] == [reports(number) for number in range(lost[-1] + 1, seq + 1)]
    spool.close()


def test_a_shortened_spool_stays_locked_and_outlives_its_process(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path, limit_bytes=2_000)
    gaps = [gap for seq in range(40) for gap in appended(spool, reports(seq))]
    other = spool_path(tmp_path, "other", "other")
    assert list(abandoned_spools(tmp_path, other)) == []
    spool.close()
    (found,) = abandoned_spools(tmp_path, other)
    assert read_all(found)[1:] == [reports(seq) for seq in range(gaps[-1].last_seq + 1, 40)]
    found.close()


def test_a_message_too_long_for_the_spool_is_refused(tmp_path):
    spool = SpoolFile(spool_path(tmp_path, "run", "stream"), limit_bytes=500)
    spool.append(reports(0))
    with pytest.raises(OSError, match="too long"):
        spool.append(reports(*range(1, 20)))
    assert read_all(spool) == [reports(0)]
    spool.close()


@pytest.mark.parametrize("place", ["mark", "length", "checksum", "payload"])
def test_a_damaged_record_costs_itself_only(tmp_path, place, caplog):
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path)
    begins = []
    for seq in range(6):
        begins.append(path.stat().st_size if path.exists() else None)
        spool.append(reports(2 * seq, 2 * seq + 1))
    spool.close()
    content = bytearray(path.read_bytes())
    begin = begins[2]
    assert begin is not None
    content[begin + {"mark": 3, "length": 9, "checksum": 13, "payload": 60}[place]] ^= 0x55
    path.write_bytes(content)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert read_all(found) == [reports(2 * seq, 2 * seq + 1) for seq in (0, 1, 3, 4, 5)]
    assert found.damaged == [("stream", ReportGap(first_seq=4, last_seq=5, reason="spool_damaged"))]
    assert "left out" in caplog.text
    found.close()


@pytest.mark.parametrize("seed", range(20))
def test_noise_in_a_file_never_gives_a_false_report(tmp_path, seed):
    random_bytes = random.Random(seed)
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path)
    for seq in range(50):
        spool.append(reports(seq))
    spool.close()
    content = bytearray(path.read_bytes())
    for _ in range(10):
        content[random_bytes.randrange(20, len(content))] = random_bytes.randrange(256)
    path.write_bytes(content)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    read = read_all(found)
    assert 40 <= len(read) <= 50
    assert [envelope for envelope in read if envelope not in [reports(seq) for seq in range(50)]] == []
    found.close()


@pytest.mark.parametrize("damaged", range(40))
def test_a_mark_on_the_border_of_two_blocks_is_found(tmp_path, monkeypatch, damaged):
    """Blocks begin where a damaged record does: of 40 records some end just where a block does."""
    monkeypatch.setattr("collage_agent.transport.spool._READ_BYTES", 64)
    path = spool_path(tmp_path, "run", "stream")
    spool, ends = SpoolFile(path), []
    written = [reports(*range(100 * seq, 100 * seq + 1 + seq % 7)) for seq in range(40)]
    for envelope in written:
        spool.append(envelope)
        ends.append(path.stat().st_size)
    spool.close()
    content = bytearray(path.read_bytes())
    content[ends[damaged] - 1] ^= 1
    path.write_bytes(content)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert read_all(found) == [*written[:damaged], *written[damaged + 1 :]]
    found.close()


def test_what_is_left_in_a_closed_file_is_on_the_disk(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def noted(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path)
    spool.append(reports(0))
    synced.clear()
    spool.close()
    assert synced == [str(path)]


def test_an_envelope_that_is_none_raises():
    with pytest.raises(WireError, match="not a spooled message"):
        Envelope.from_bytes(b"\xc1")
