"""The spool file: order, durability, torn ends, locks and damage."""

import os
import subprocess
import sys

import pytest
from collage_agent.transport.envelope import Envelope
from collage_agent.transport.spool import SpoolFile, abandoned_spools, spool_path

from collage_monitor.errors import WireError
from collage_monitor.wire import Report, ReportBatch, RunCreate


def reports(*seqs):
    batch = ReportBatch(reports=[Report(seq=seq, step=seq, time=1.0, scalars={"loss": 0.5}) for seq in seqs])
    return Envelope("project", "run", "stream", batch)


def read_all(spool):
    envelopes = []
    while (envelope := spool.peek()) is not None:
        envelopes.append(envelope)
        spool.advance(envelope)
    return envelopes


def test_what_goes_in_comes_out_in_order_and_the_file_goes(tmp_path):
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path)
    written = [Envelope("project", "run", "stream", RunCreate(run_id="run")), reports(0, 1), reports(2)]
    for envelope in written:
        spool.append(envelope)
    assert spool.reports == 3
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert read_all(spool) == written
    assert (spool.is_empty, spool.reports) == (True, 0)
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


def test_damage_is_noticed_by_the_checksum(tmp_path, caplog):
    path = spool_path(tmp_path, "run", "stream")
    spool = SpoolFile(path)
    spool.append(reports(0))
    spool.append(reports(1))
    spool.close()
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes(content)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert read_all(found) == [reports(0)]
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
from collage_agent.transport.spool import SpoolFile, spool_path
from collage_monitor.wire import Report, ReportBatch
spool = SpoolFile(spool_path(Path({str(tmp_path)!r}), "run", "stream"))
for seq in range(5):
    batch = ReportBatch(reports=[Report(seq=seq, step=seq, time=1.0, scalars={{"loss": 0.5}})])
    spool.append(Envelope("project", "run", "stream", batch))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (found,) = abandoned_spools(tmp_path, tmp_path)
    assert read_all(found) == [reports(seq) for seq in range(5)]
    found.close()


def test_a_full_spool_refuses_and_stays_as_it_was(tmp_path):
    spool = SpoolFile(spool_path(tmp_path, "run", "stream"), limit_bytes=300)
    spool.append(reports(0))
    with pytest.raises(OSError, match="would exceed 300 bytes"):
        spool.append(reports(*range(1, 20)))
    assert read_all(spool) == [reports(0)]
    spool.close()


def test_an_envelope_that_is_none_raises():
    with pytest.raises(WireError, match="not a spooled message"):
        Envelope.from_bytes(b"\xc1")
