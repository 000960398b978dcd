"""The spool file: order, durability, torn ends, locks and damage; and `collage-monitor sync`, which sends it."""

import json
import os
import random

import pytest
from click.testing import CliRunner
from collage_agent.command.sync import sync
from collage_agent.transport.envelope import Envelope
from collage_agent.transport.report_log import ReportLog, abandoned_spools, spool_path
from collage_agent.transport.sender import send_folder

from collage_monitor.errors import NotAuthorised, NotFound, ServerUnreachable, Unavailable, WireError
from collage_monitor.wire import AttemptCreate, Report, ReportBatch, ReportGap, RunCreate
from tests.agent_delivery.doubles import Scripted, ended_run
from tests.forking import TRAINING, run_forked

pytestmark = pytest.mark.slow


def envelope(body):
    return Envelope("project", "run", "stream", body)


def reports(*seqs, gaps=()):
    made = [Report(seq=seq, step=seq, time=1.0, scalars={"loss": 0.5}) for seq in seqs]
    return envelope(ReportBatch(reports=made, gaps=list(gaps)))


@pytest.fixture
def path(tmp_path):
    return spool_path(tmp_path, "run", "stream")


def kept(log, own):
    """Keep an envelope in the file, and return how many reports had to give way to it."""
    before = log.counts.dropped.get("spool_full", 0)
    log.counts.add(own.report_count)
    log.append(own)
    log.keep()
    return log.counts.dropped.get("spool_full", 0) - before


def left_by_a_process(path, envelopes):
    """Write a file, and return where each of its records ends."""
    log, ends = ReportLog(path), []
    for own in envelopes:
        kept(log, own)
        ends.append(path.stat().st_size)
    log.close()
    return ends


def damage(path, place, by):
    content = bytearray(path.read_bytes())
    content[place] ^= by
    path.write_bytes(content)


def read_all(log):
    envelopes = []
    while (found := log.first()) is not None:
        envelopes.append(found)
        log.acknowledge()
    return envelopes


def left_in(folder):
    """What a process that is gone has left in its file, which goes when it is read."""
    (found,) = abandoned_spools(folder, folder)
    envelopes = read_all(found)
    found.close()
    assert list(folder.glob("spool/*/*")) == []
    return envelopes


def test_what_goes_in_comes_out_in_order_and_the_file_goes(path):
    log = ReportLog(path)
    written = [envelope(RunCreate(run_id="run")), reports(0, 1), reports(2)]
    for own in written:
        kept(log, own)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert read_all(log) == written
    assert log.is_empty
    kept(log, reports(3))
    assert read_all(log) == [written[0], reports(3)], "a file does without what the server knew"
    log.close()
    assert not path.parent.exists()


def test_a_file_is_read_by_the_next_process_only_when_its_writer_is_gone(tmp_path, path):
    log = ReportLog(path)
    kept(log, reports(0))
    other = spool_path(tmp_path, "other", "other")
    assert list(abandoned_spools(tmp_path, other)) == []
    log.close()
    (found,) = abandoned_spools(tmp_path, other)
    assert read_all(found) == [reports(0)]
    found.close()
    assert list(abandoned_spools(tmp_path, other)) == []


@pytest.mark.parametrize("cut", [1, 7, 9, 30])
def test_a_torn_end_costs_the_last_record_only(tmp_path, path, cut, caplog):
    *_, size = left_by_a_process(path, [reports(0), reports(1)])
    os.truncate(path, size - cut)
    assert left_in(tmp_path) == [reports(0)]
    assert "torn" in caplog.text


WRITTEN_BY_THE_FIRST_RELEASE = (
    b"collage-spool-2\n\xc1\xf5spool\n\xe2\x00\x00\x00o\xe6Ym\x85\xa4kind\xa7reports\xa7project\xa7project\xa6run_id\xa3run"
    b"\xa9stream_id\xa6stream\xa4body\xc4\xa1\x82\xa7reports\x91\x89\xa3seq\x01\xa4step\x01\xa4time\xcb?\xf0\x00\x00\x00"
    b"\x00\x00\x00\xa7scalars\x81\xa4loss\xcb?\xe0\x00\x00\x00\x00\x00\x00\xafstatistic_count\x00\xablayer_count\x00"
    b"\xaastatistics\xc0\xa5model\xc0\xa5parts\x01\xa4gaps\x91\x83\xa9first_seq\x00\xa8last_seq\x00\xa6reason\xaaqueue_full"
)


def test_a_file_of_an_earlier_release_is_read(tmp_path, path):
    path.parent.mkdir(parents=True)
    path.write_bytes(WRITTEN_BY_THE_FIRST_RELEASE)
    gap = ReportGap(first_seq=0, last_seq=0, reason="queue_full")
    assert left_in(tmp_path) == [reports(1, gaps=[gap])]


def test_a_strange_file_is_left_alone(tmp_path, path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else entirely")
    assert list(abandoned_spools(tmp_path, tmp_path)) == []
    assert path.exists()


def test_a_killed_process_loses_nothing_that_was_appended(tmp_path, path):
    code = f"""
import os, signal
from pathlib import Path
from collage_agent.transport.report_log import ReportLog
from tests.agent_delivery.test_report_log import kept, reports
log = ReportLog(Path({str(path)!r}))
for seq in range(5):
    kept(log, reports(seq))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_forked(TRAINING, "-c", code).returncode == -9
    assert left_in(tmp_path) == [reports(seq) for seq in range(5)]


def test_a_full_spool_gives_up_its_older_half_and_says_which(tmp_path, path):
    log = ReportLog(path, limit_bytes=4_000)
    introductions = [*map(envelope, (RunCreate(run_id="run"), AttemptCreate(launch_id="launch", first_step=1)))]
    for own in introductions:
        kept(log, own)
    lost = 0
    for seq in range(100):
        lost += kept(log, reports(seq))
        assert path.stat().st_size <= 4_000
        assert (log.counts.spooled, log.counts.dropped) == (seq + 1 - lost, {"spool_full": lost} if lost else {})
    assert 50 < lost < 100
    assert list(abandoned_spools(tmp_path, tmp_path)) == [], "it stays locked"
    log.close()
    gap = ReportGap(first_seq=0, last_seq=lost - 1, reason="spool_full")
    assert left_in(tmp_path) == [*introductions, reports(gaps=[gap]), *map(reports, range(lost, 100))]
    assert list(tmp_path.glob("spool/*")) == []


def test_what_was_read_makes_room_before_anything_is_given_up(path):
    log = ReportLog(path, limit_bytes=4_200)
    assert [kept(log, reports(seq)) for seq in range(20)] == [0] * 20
    for seq in range(15):
        assert log.first() == reports(seq)
        log.acknowledge()
    assert [kept(log, reports(seq)) for seq in range(20, 32)] == [0] * 12
    assert read_all(log) == [reports(seq) for seq in range(15, 32)]
    log.close()


@pytest.mark.parametrize("settled", [0, 8])
def test_what_is_left_of_a_record_alone_gives_way(path, settled):
    """Settled records before it make room first."""
    log = ReportLog(path, limit_bytes=4_000)
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


def test_a_message_too_long_for_the_spool_is_given_up(path, caplog):
    log = ReportLog(path, limit_bytes=500)
    kept(log, reports(0))
    kept(log, reports(*range(1, 20)))
    assert log.counts.dropped == {"spool_failed": 19}
    assert "too long" in caplog.text
    gap = ReportGap(first_seq=1, last_seq=19, reason="spool_failed")
    assert log.first() == reports(0, gaps=[gap])
    kept(log, reports(20))
    assert read_all(log) == [reports(0), reports(20, gaps=[gap])], "the file tells of it from now on"
    log.close()


def test_a_message_that_cannot_be_encoded_is_given_up(path):
    log = ReportLog(path)
    kept(log, envelope(RunCreate(run_id="run", config={"made": object()})))
    kept(log, reports(0))
    assert read_all(log) == [reports(0)]


@pytest.mark.parametrize("place", ["mark", "length", "checksum", "payload"])
def test_a_damaged_record_costs_itself_only(tmp_path, path, place, caplog):
    ends = left_by_a_process(path, [reports(2 * seq, 2 * seq + 1) for seq in range(6)])
    damage(path, ends[1] + {"mark": 3, "length": 9, "checksum": 13, "payload": 60}[place], 0x55)
    (found,) = abandoned_spools(tmp_path, tmp_path)
    gap = ReportGap(first_seq=4, last_seq=5, reason="spool_damaged")
    before, at, behind = [reports(0, 1), reports(2, 3)], reports(6, 7, gaps=[gap]), [reports(8, 9), reports(10, 11)]
    assert read_all(found) == [*before, at, *behind]
    assert (found.counts.sent, found.counts.dropped) == (10, {"spool_damaged": 2})
    assert "left out" in caplog.text
    found.close()


@pytest.mark.parametrize("seed", range(20))
def test_noise_in_a_file_never_gives_a_false_report(tmp_path, path, seed):
    random_bytes, written = random.Random(seed), [reports(seq) for seq in range(50)]
    *_, size = left_by_a_process(path, written)
    for _ in range(10):
        damage(path, random_bytes.randrange(20, size), random_bytes.randrange(256))
    read = [own.body.reports for own in left_in(tmp_path)]
    assert 40 <= len(read) <= 50
    assert [batch for batch in read if batch not in [own.body.reports for own in written]] == []


@pytest.mark.parametrize("damaged", range(40))
def test_a_mark_on_the_border_of_two_blocks_is_found(tmp_path, path, monkeypatch, damaged):
    """Blocks begin where a damaged record does: of 40 records some end just where a block does."""
    monkeypatch.setattr("collage_agent.transport.report_log._READ_BYTES", 64)
    written = [reports(*range(100 * seq, 100 * seq + 1 + seq % 7)) for seq in range(40)]
    damage(path, left_by_a_process(path, written)[damaged] - 1, 1)
    read = [own.body.reports for own in left_in(tmp_path)]
    assert read == [own.body.reports for own in (*written[:damaged], *written[damaged + 1 :])]


def test_what_is_left_in_a_closed_file_is_on_the_disk(path, monkeypatch):
    synced, sync = [], os.fsync

    def noted(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    log = ReportLog(path)
    kept(log, reports(0))
    synced.clear()
    log.close()
    assert synced == [str(path)]


def test_an_envelope_that_is_none_raises():
    with pytest.raises(WireError, match="not a spooled message"):
        Envelope.from_bytes(b"\xc1")


def leave_behind(folder, runs):
    for number in range(runs):
        ended_run(folder, 5, mode="offline", run_id=f"run-{runs - number}")


def invoke(*arguments):
    return CliRunner().invoke(sync, [str(argument) for argument in arguments], env={})


def test_the_command_sends_to_a_server_and_says_what_it_did(tmp_path, server):
    leave_behind(tmp_path, 2)
    (tmp_path / "token").write_text("from-the-folder\n")
    result = invoke("--server-url", server.url, "--dir", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    outcomes = [(entry["run_id"], entry["sent"], entry["bytes_left"]) for entry in answer["spools"]]
    assert outcomes == [("run-2", 5, 0), ("run-1", 5, 0)]
    assert (answer["in_use"], answer["error"]) == (0, None)
    assert sorted(server.steps()) == sorted([*range(1, 6)] * 2)
    assert [method for method, *_ in server.requests].count("PATCH") == 2
    assert list(tmp_path.glob("spool/*")) == []
    assert server.requests[0][2]["authorization"] == "Bearer from-the-folder"
    again = invoke("--server-url", server.url, "--dir", tmp_path)
    assert "nothing waits" in again.output


def test_without_a_server_everything_stays_and_the_command_fails(tmp_path, server):
    leave_behind(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.glob("spool/*/*")}
    url = server.url
    server.close()
    result = invoke("--server-url", url, "--dir", tmp_path, "--wait", 0)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"collage-monitor: not everything could be sent: {url}")
    assert "`collage-monitor up` starts a server here; --server-url names another" in result.stderr
    assert "bytes left" in result.output
    assert {path: path.read_bytes() for path in tmp_path.glob("spool/*/*")} == before


def test_a_spool_of_a_living_process_is_left_to_it(tmp_path, server):
    log = ReportLog(spool_path(tmp_path, "run", "stream"))
    log.append(reports(0))
    log.keep()
    result = invoke("--server-url", server.url, "--dir", tmp_path)
    assert result.exit_code == 0
    assert "1 files belong to runs that are alive" in result.output
    assert server.requests == []
    log.close()


@pytest.mark.parametrize(
    ("script", "pause_seconds"),
    [
        ([ServerUnreachable("away")], 0.1),
        ([Unavailable("busy", status=503, retry_after_seconds=7.0)], 7.0),
        ([None, None, None, NotFound("no such stream", status=404)], 0.0),
    ],
    ids=["away", "busy", "lost the stream"],
)
def test_a_server_in_trouble_for_a_moment_is_waited_for_and_told_again(tmp_path, script, pause_seconds):
    leave_behind(tmp_path, 1)
    slept = [0.0]
    outcomes = send_folder(tmp_path, Scripted(*script), 30.0, sleep=slept.append, clock=lambda: sum(slept))
    assert [(entry.sent, entry.dropped) for entry in outcomes.spools] == [(5, {})]
    assert outcomes.error is None
    assert sum(slept) >= pause_seconds


def test_a_wrong_token_is_said_at_once(tmp_path):
    leave_behind(tmp_path, 2)
    slept: list[float] = []
    outcomes = send_folder(tmp_path, Scripted(NotAuthorised("no", status=401)), 30.0, sleep=slept.append)
    assert (outcomes.error, slept) == ("no", [])
    assert [entry.bytes_left > 0 for entry in outcomes.spools] == [True]
    assert len(list(tmp_path.glob("spool/*/*"))) == 2
