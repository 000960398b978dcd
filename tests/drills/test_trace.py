"""Durable when acknowledged, seen in the system calls: what was written is synchronised before the answer."""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from contextlib import closing, contextmanager, suppress

import httpx
import pytest
from collage_server.store import PostgresqlStore, ReportGroup, SqliteStore

from collage_monitor import wire
from drills.torture.trace import parse, requests, settled, synced_before, synced_bytes, traced
from tests.server.samples import report
from tests.server.store.postgresql import Cluster, programs_or_skip
from tests.server.test_process import SERVE, prepare, send
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

ROUTE = "/api/v1/streams/s0/reports"
LOG = "collage.sqlite-wal"
COUNT = 8


@contextmanager
def traced_server(folder, *flags):
    """(client, trace file, pid) of a server under strace; the server is killed at the end, not strace."""
    file = folder / "trace"
    command = traced([*SERVE, "--no-auth", "--dir", str(folder), "--port", "0", *flags], str(file))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output = process.stdout
    assert output is not None
    try:
        ready = json.loads(output.readline())
        server = int(file.read_text(errors="replace").split(maxsplit=1)[0])
        with httpx.Client(base_url=ready["server_url"], timeout=PATIENCE_SECONDS, trust_env=False) as client:
            yield client, file, server
    finally:
        # The tracer outlives what it traces by an instant.
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)
        output.close()


def post_reports(client, count, first=0):
    for seq in range(first, first + count):
        send(client, "/streams/s0/reports", wire.ReportBatch(reports=[report(seq, seq + 1)]), wire.encode_batch)


@pytest.mark.nightly
def test_postgresql_synchronises_its_log_before_every_answer(tmp_path):
    """Two traces, of the server and of the cluster, on one clock."""
    programs = programs_or_skip()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(folder, programs)
        cluster.create()
        cluster.wrap = traced([], str(cluster.folder / "trace"))
        cluster.start()
        try:
            PostgresqlStore(cluster.url("postgres"), stale_after_seconds=600.0).migrate()
            with traced_server(tmp_path, "--database", cluster.url("postgres")) as (client, file, _):
                prepare(client)
                post_reports(client, COUNT)
                asked_of = requests(parse(settled(file)), ROUTE)
                calls = parse(settled(cluster.folder / "trace"))
        finally:
            cluster.stop()
    assert len(asked_of) == COUNT
    for asked, answered in asked_of:
        assert synced_before(calls, "/pg_wal/", asked.end, answered.begin), (asked, answered)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(folder, system calls) of a server that was stopped after its last answer, and killed."""
    folder = tmp_path_factory.mktemp("killed")
    with traced_server(folder) as (client, file, server):
        prepare(client)
        post_reports(client, COUNT)
        os.kill(server, signal.SIGSTOP)
        calls = parse(settled(file))
        os.kill(server, signal.SIGKILL)
    return folder, calls


def test_sqlite_synchronises_its_log_before_every_answer(killed):
    _, calls = killed
    pairs = requests(calls, ROUTE)
    assert len(pairs) == COUNT
    for asked, answered in pairs:
        assert synced_before(calls, LOG, asked.end, answered.begin), (asked, answered)


@contextmanager
def opened(folder, log, place):
    """The store of a copy of the folder, with another log."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*-shm"))
    (place / LOG).write_bytes(log)
    with closing(SqliteStore(place / "collage.sqlite", stale_after_seconds=600.0)) as store:
        store.open()
        yield store


@pytest.mark.parametrize("tail", ["nothing", "zeros", "noise", "torn"])
def test_a_log_that_lost_what_was_never_synchronised_loses_nothing_acknowledged(killed, tmp_path, tail):
    """As a power cut leaves it: the log as far as the trace shows it synchronised, then what the disk made up."""
    folder, calls = killed
    answered = requests(calls, ROUTE)[-1][1]
    assert not [call for call in calls if call.name == "pwrite64" and call.on("collage.sqlite>")][2:], (
        "a checkpoint"
    )
    kept = synced_bytes(calls, LOG, answered.begin)
    whole = (folder / LOG).read_bytes()
    assert 0 < kept <= len(whole)
    noise = random.Random(7).randbytes(40_000)
    tails = {"nothing": b"", "zeros": bytes(40_000), "noise": noise, "torn": whole[kept - 16_408 : kept - 9_000]}
    with opened(folder, whole[:kept] + tails[tail], tmp_path / "cut") as store:
        stream = store.streams.stream_record("s0")
        assert store.streams.of_run("r1")[0].reports == COUNT
        again = store.journal.append([ReportGroup(stream, [report(i, i + 1) for i in range(COUNT + 1)])], 1.7e9)[0]
        assert (again.accepted, again.duplicates) == (1, COUNT)


def test_a_log_cut_shorter_than_what_was_synchronised_does_lose(killed, tmp_path):
    """The check above can fail: cut one commit deeper, and an acknowledged report is gone."""
    folder, calls = killed
    asked, _ = requests(calls, ROUTE)[-1]
    log = (folder / LOG).read_bytes()[: synced_bytes(calls, LOG, asked.end)]
    with opened(folder, log, tmp_path / "cut") as store:
        assert store.streams.of_run("r1")[0].reports == COUNT - 1


RECORDED = """\
7 10.000001 read(9<socket:[1]>, "POST /api/v1/streams/s0/reports HTTP/1.1\\r\\n"..., 65536) = 300
8 10.000002 pwrite64(5</d/collage.sqlite-wal>, "\\0x, 1, 2)"..., 24, 100 <unfinished ...>
7 10.000003 read(9<socket:[1]>, 0x7f, 65536) = -1 EAGAIN (Resource temporarily unavailable)
8 10.000004 <... pwrite64 resumed>)         = 24
8 10.000005 fdatasync(5</d/collage.sqlite-wal> <unfinished ...>
7 10.000006 write(9<socket:[1]>, "HTTP/1.1 200 OK\\r\\n"..., 190) = 190
8 10.000007 <... fdatasync resumed>)        = 0
7 10.000008 +++ killed by SIGKILL +++
"""


def test_an_answer_that_leaves_before_the_synchronisation_has_ended_is_found():
    calls = parse(RECORDED)
    [(asked, answered)] = requests(calls, ROUTE)
    assert not synced_before(calls, LOG, asked.end, answered.begin)
    assert synced_before(calls, LOG, asked.end, 10.1)
    assert (synced_bytes(calls, LOG, 10.1), synced_bytes(calls, LOG, answered.begin)) == (124, 0)
    early = RECORDED.replace("10.000007 <...", "10.0000055 <...")
    assert synced_before(parse(early), LOG, asked.end, answered.begin)
