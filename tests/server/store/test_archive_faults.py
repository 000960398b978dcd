"""Archiving amid faults: an archive that is away, files that no row names, several servers on one run."""

import signal
import time
from functools import partial
from threading import Barrier

import pytest
from collage_server.errors import Busy, StoreUnusable
from collage_server.store import Selection, schema, server_tables
from collage_server.store.archive import file_storage
from collage_server.store.archive.file_storage import Bucket, Folder
from collage_server.store.archive.paths import archived_path
from collage_server.store.archive.segments import LOGGED
from collage_server.store.backup import back_up, restore
from collage_server.store.sealing import archive_plan
from collage_server.store.sealing.archiving import Archiving
from sqlalchemy import delete, insert, select

from tests.server.migrated import put_migrated
from tests.server.reads import layer_points, model_points
from tests.server.samples import STATISTICS
from tests.server.store.life import CHUNK, NEVER
from tests.server.store.seen import arrays_of, plain, seen, unchanged
from tests.server.store.sending import fill, ranks, send
from tests.server.store.stores import AFTER_SILENCE, ALL, NOW, archive_all, finish, paths, purge_all, rows, seal_all
from tests.server.store.stores import opened as opened_store
from tests.waiting import PATIENCE_SECONDS, at_once

pytestmark = pytest.mark.slow

HOUR = 3600.0
ORPHAN = archived_path("p", "r1", 1, 1, f"0-1-{0:032x}.parquet")
FOREIGN = "belongs to another database"


@pytest.fixture
def opened(monkeypatch):
    """Opens stores that seal small chunks and archive two of them at a time; they are closed at the end."""
    monkeypatch.setattr(archive_plan, "_CHUNKS", {1: 2, 16: 2})
    known = []

    def open_store(database, archive=None):
        known.append(opened_store(database, archive=archive))
        return known[-1]

    yield open_store
    for store in known:
        store.close()


@pytest.fixture
def store(opened, tmp_path):
    """SQLite beside a folder."""
    return opened(put_migrated(tmp_path), Folder(tmp_path / "archive"))


@pytest.fixture
def stranger(tmp_path):
    """The database of somebody else."""
    (tmp_path / "stranger").mkdir()
    return put_migrated(tmp_path / "stranger")


def reported(store, steps, first=0):
    """A running run of so many measured steps, sealed."""
    stream = fill(store) if not first else store.streams.stream_record("s0")
    send(store, stream, range(first + 1, steps + 1), first_seq=first)
    seal_all(store)


def archived(store, steps=5 * CHUNK):
    """The same, and what is due of it in files; their paths."""
    reported(store, steps)
    archive_all(store)
    return paths(store)


def sweep(store, after=2 * HOUR):
    return store.archiving.sweep(time.time() + after)


def stored(store):
    return {file.path for file in store.archiving.files.stored()}


def test_while_a_bucket_is_away_what_is_live_answers_and_nothing_is_lost(
    opened, stranger, tmp_path, bucket, object_store, monkeypatch
):
    monkeypatch.setattr(file_storage, "_CLIENT", {**file_storage._CLIENT, "read_timeout": "1s"})
    path = put_migrated(tmp_path)
    store = opened(path, Bucket(bucket, tmp_path / "cache", 2**20))
    assert len(archived(store)) == 4
    other = opened(path, Bucket(bucket, tmp_path / "other", 2**20))
    newest = Selection(first_step=4 * CHUNK + 1)
    object_store.signal(signal.SIGSTOP)
    try:
        reported(store, 9 * CHUNK, first=5 * CHUNK)
        with pytest.raises(Busy, match="older points wait for it; newer ones can be asked for by their steps"):
            layer_points(other, "r1", STATISTICS, ALL)
        found = layer_points(other, "r1", STATISTICS, newest).steps.tolist()
        assert found == [*range(4 * CHUNK + 1, 9 * CHUNK + 1)]
        assert len(model_points(other, "r1", None, ALL).steps) == 9 * CHUNK
        for _ in range(2):
            with pytest.raises(Busy):
                store.archiving.archive("r1")
        with pytest.raises(Busy):
            sweep(store)
        assert len(paths(store)) == 4
    finally:
        object_store.signal(signal.SIGCONT)
    for server in (store, other):
        server.archiving.files._away_until = 0.0
    archive_all(store)
    assert len(paths(store)) == 8
    without_an_archive = opened(stranger)
    reported(without_an_archive, 9 * CHUNK)
    unchanged(seen(without_an_archive), seen(other))


def test_while_files_are_away_late_reports_wait_and_newer_ones_are_sealed(store):
    first, second = ranks(store, 2)
    send(store, first, range(1, 5 * CHUNK + 1))
    seal_all(store, now=AFTER_SILENCE)
    archive_all(store)
    folder = store.archiving.files.folder
    folder.rename(folder.with_name("away"))
    send(store, second, range(1, 21), 1)
    send(store, first, range(5 * CHUNK + 1, 8 * CHUNK + 1), first_seq=5 * CHUNK)
    seal_all(store, now=AFTER_SILENCE)
    assert rows(store, schema.report) == 20
    assert len(model_points(store, "r1", ["lost"], ALL).steps) == 8 * CHUNK
    folder.with_name("away").rename(folder)
    seal_all(store, now=AFTER_SILENCE)
    assert rows(store, schema.report) == 0
    points = layer_points(store, "r1", ["lost"], ALL)
    assert points.ranks.tolist() == [2] * 20 + [1] * (8 * CHUNK - 20)


def test_a_file_that_could_not_be_named_is_never_written_over(store, monkeypatch):
    """Another server may hold the run's claim just then: what it reads stays as it is."""
    reported(store, 3 * CHUNK)
    with monkeypatch.context() as patch:
        patch.setattr(Archiving, "_name", lambda *_: False)
        assert not store.archiving.archive("r1")
    [orphan] = stored(store)
    content = (store.archiving.files.folder / orphan).read_bytes()
    archive_all(store)
    assert orphan not in paths(store)
    assert (store.archiving.files.folder / orphan).read_bytes() == content
    assert stored(store) == {orphan, *paths(store)}


def test_what_no_row_names_goes_after_an_hour_and_nothing_else(store):
    strange = ORPHAN.replace("run=r1", "run=another")
    named = {*archived(store), strange}
    left = store.archiving.files
    for path in (ORPHAN, strange):
        with left.new_file() as made:
            made.write_bytes(b"1")
            left.put(made, path)
    half = left.staging / "half.parquet"
    half.write_bytes(b"1")
    written = max(file.modified_at for file in left.stored())
    for seconds, there in ((HOUR - 60, True), (HOUR + 60, False)):
        assert store.archiving.sweep(written + seconds) == (not there)
        assert stored(store) == named | ({ORPHAN} if there else set())
    assert half.exists(), "its age is told by the clock of who made it"


def test_an_archive_of_another_database_is_refused(store, opened, stranger, tmp_path):
    """Two servers with a database each were told the same place: each would sweep the other's files as orphans."""
    early = opened(stranger, Folder(tmp_path / "archive"))
    archived(store)
    with pytest.raises(Busy, match=FOREIGN):
        sweep(early)
    with pytest.raises(StoreUnusable, match=f"{FOREIGN}: set COLLAGE_SERVER_ARCHIVE to"):
        opened(stranger, Folder(tmp_path / "archive"))
    assert stored(store) == paths(store)


def test_a_restored_database_takes_an_archive_over_once_its_mark_is_gone(store, opened, tmp_path):
    archived(store)
    (tmp_path / "backups").mkdir()
    back_up(store.path, tmp_path / "backups" / "one", archive=tmp_path / "archive")
    copy = tmp_path / "copy" / "collage.sqlite"
    restore(tmp_path / "backups" / "one", copy)
    with pytest.raises(StoreUnusable, match=r"takes the other's place .* delete _collage.json there"):
        opened(copy, Folder(tmp_path / "archive"))
    (tmp_path / "archive" / "_collage.json").unlink()
    assert sweep(opened(copy, Folder(tmp_path / "archive"))) == 0
    with pytest.raises(Busy, match=FOREIGN):
        sweep(store)
    assert stored(store) == paths(store)


def test_a_folder_that_is_not_mounted_is_no_empty_archive(store, opened, tmp_path):
    """What would be written below the place where it is mounted is hidden once it is."""
    archived(store)
    folder = store.archiving.files.folder
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    with pytest.raises(StoreUnusable, match=r"none of the files that this database names, such as .*: mount"):
        opened(store.path, Folder(folder))
    reported(store, 9 * CHUNK, first=5 * CHUNK)
    for work in (lambda: store.archiving.archive("r1"), lambda: sweep(store)):
        with pytest.raises(Busy, match="mount"):
            work()
    assert not list(folder.rglob("*.parquet"))
    folder.rmdir()
    folder.with_name("away").rename(folder)
    archive_all(store)
    assert len(paths(store)) == 8
    assert sweep(opened(store.path, Folder(folder)), 0) == 0


def test_an_archive_of_before_there_were_marks_is_taken_over(store, opened):
    archived(store)
    (store.archiving.files.folder / "_collage.json").unlink()
    with store.writing() as connection:
        connection.execute(delete(server_tables.lease))
    again = opened(store.path, Folder(store.archiving.files.folder))
    assert again.archiving.files.read_mark() is not None


def test_a_bucket_has_a_mark_too(opened, stranger, tmp_path, bucket):
    opened(put_migrated(tmp_path), Bucket(bucket, tmp_path / "cache", 2**20))
    with pytest.raises(StoreUnusable, match=FOREIGN):
        opened(stranger, Bucket(bucket, tmp_path / "other", 2**20))
    opened(tmp_path / "collage.sqlite", Bucket(bucket, tmp_path / "third", 2**20))


def test_files_of_a_deleted_run_go_an_hour_after_their_rows(store):
    named = archived(store)
    with store.points.snapshot():
        store.runs.delete("r1", NOW)
    purge_all(store)
    assert paths(store) == set()
    assert paths(store, schema.segment_gone) == named == stored(store)
    assert sweep(store, HOUR - 60) == 0
    assert stored(store) == named
    assert sweep(store, HOUR + 60) == len(named)
    assert stored(store) == paths(store, schema.segment_gone) == set()
    assert sweep(store, HOUR + 60) == 0


def test_a_file_stays_until_retention_has_dropped_all_of_its_chunks(store):
    archived(store)
    newest = Selection(first_step=4 * CHUNK + 1)
    before = plain(layer_points(store, "r1", STATISTICS, newest))
    assert store.retention.expire("r1", NEVER)
    assert {path.split("/")[3] for path in paths(store)} <= {"level=256"}
    assert all(path.split("/")[3] in {"level=1", "level=16"} for path in paths(store, schema.segment_gone))
    sweep(store)
    assert stored(store) == paths(store)
    assert plain(layer_points(store, "r1", STATISTICS, newest)) == before
    assert len(layer_points(store, "r1", STATISTICS, ALL).steps) > CHUNK


def test_servers_that_pack_the_same_points_at_once_do_not_fail_on_each_other(
    opened, database, tmp_path, monkeypatch
):
    first, second = (opened(database, Folder(tmp_path / "archive")) for _ in range(2))
    reported(first, 9 * CHUNK)
    finish(first)
    held = []
    with monkeypatch.context() as patch:
        patch.setattr(Archiving, "_pack_points", lambda _, contents: held.append(contents))
        archive_all(first)
    with first.reading() as connection:
        loose = [dict(row) for row in connection.execute(select(schema.point_chunk)).mappings()]
    together = Barrier(2, timeout=PATIENCE_SECONDS)

    def pack(server):
        for contents in held:
            together.wait()
            server.archiving._pack_points(contents)

    before = seen(first)
    for _ in range(20):
        with first.writing() as connection:
            connection.execute(delete(schema.point_chunk))
            connection.execute(insert(schema.point_chunk), loose)
        at_once(partial(pack, first), partial(pack, second))
    unchanged(before, seen(second))


@pytest.mark.nightly
def test_servers_that_archive_one_run_at_once_make_no_point_visible_twice(opened, database, tmp_path, bucket):
    servers = [opened(database, Bucket(bucket, tmp_path / f"{number}", 2**20)) for number in range(3)]
    reported(servers[0], 9 * CHUNK + 5)
    finish(servers[0])
    before = seen(servers[0])
    together = Barrier(len(servers))

    def archive(server):
        together.wait()
        for _ in range(20):
            while server.archiving.archive("r1"):
                pass

    at_once(*[partial(archive, server) for server in servers])
    table = schema.segment
    columns = (table.c.attempt, table.c.level, table.c.first_chunk, table.c.last_chunk)
    with servers[0].reading() as connection:
        ranges = connection.execute(select(*columns)).all()
    held = [(attempt, level, chunk) for attempt, level, a, b in ranges for chunk in range(a, b + 1)]
    assert len(held) == len(set(held))
    assert {level for _, level, _ in held} == {1, 16, 256, -1, -16, -256, LOGGED}
    assert rows(servers[0], schema.layer_chunk) == 0
    for server in servers:
        unchanged(before, seen(server))
    servers[1].archiving.sweep(time.time() + 2 * HOUR)
    assert stored(servers[2]) == paths(servers[2])
    fresh = opened(database, Bucket(bucket, tmp_path / "fresh", 2**20))
    totals = [layer_points(server, "r1", STATISTICS, ALL).totals for server in (fresh, servers[0])]
    assert arrays_of(totals[0]) == arrays_of(totals[1])
