"""SQLite under the contract, and what only SQLite has: its log, its file, and the space that it gives back."""

import contextlib
import itertools
import shutil
import sqlite3
import threading
from typing import Any, get_args

import pytest
from collage_server.errors import StoreUnusable
from collage_server.store import GroupQuery, TableQuery
from collage_server.store.chunks.blobs import BLOBS_OPENED
from collage_server.store.engine.database_files import network_file_system
from collage_server.store.row_helpers import add_numbers, contains, ranges_from_json, ranges_to_json
from collage_server.store.sealing.slice_deletion import _Pace
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, text
from sqlalchemy.exc import ProgrammingError

from collage_monitor import wire
from tests.server.migrated import put_migrated
from tests.server.store.access_contract import AccessContract
from tests.server.store.contract import StoreContract
from tests.server.store.events import EventsContract
from tests.server.store.incidents import IncidentsContract
from tests.server.store.laws import LawsContract
from tests.server.store.life import NEVER, LifeContract, filled
from tests.server.store.ranks import PartsContract, RanksContract, ReplicasContract
from tests.server.store.sealing import KilledContract, SealedContract, SealingContract
from tests.server.store.second_writers import SecondWritersContract
from tests.server.store.sending import fill, send
from tests.server.store.stores import NOW, opened, reopening
from tests.waiting import beside


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(opened(put_migrated(tmp_path))) as store:
        yield store


@pytest.fixture
def reopen(store):
    yield from reopening(store, lambda: opened(store.path))


class TestSqlite(StoreContract, AccessContract, EventsContract, IncidentsContract, ReplicasContract):
    """The contract on SQLite."""


@pytest.mark.slow
class TestSqliteSealing(SealingContract, KilledContract, SealedContract, PartsContract, RanksContract):
    """Sealing and sealed runs on SQLite."""


@pytest.mark.slow
class TestSqliteLife(LifeContract, SecondWritersContract):
    """Retention and deletion on SQLite, and who logs beside the training."""


class TestSqliteLaws(LawsContract):
    """The store's life on SQLite."""


def test_a_connection_that_opened_many_blobs_is_replaced(store):
    """Python's sqlite3 keeps a reference to each until its connection ends, and memory between them."""
    with store.engine.connect() as connection:
        first = connection.connection.driver_connection
        assert BLOBS_OPENED not in connection.info
        connection.info[BLOBS_OPENED] = 4096
    with store.engine.connect() as connection:
        assert connection.connection.driver_connection is first
        connection.info[BLOBS_OPENED] += 1
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        first.execute("SELECT 1")
    with store.engine.connect() as connection:
        assert connection.connection.driver_connection is not first
        assert BLOBS_OPENED not in connection.info


def left_unread(store, statement):
    """Rows of which only one was read before their transaction ended."""

    def rows(connection):
        yield from connection.execute(statement)

    with store.reading() as connection:
        unread = rows(connection)
        next(unread)
    return unread


def test_rows_that_nobody_reads_to_their_end_do_not_keep_their_snapshot(store):
    """In SQLite a statement keeps its snapshot until it is reset: the next transaction of the same connection read
    what was there then, and could not write. A part was sealed twice for it."""
    add = text("INSERT INTO kept VALUES (:number)")
    with store.writing() as connection:
        connection.execute(text("CREATE TABLE kept (number INTEGER)"))
        connection.execute(add, [{"number": number} for number in range(5000)])
    count = text("SELECT count(*) FROM kept")
    with store.reading(), store.reading():
        pass
    held = [left_unread(store, text("SELECT number FROM kept")) for _ in range(2)]
    for number in range(5000, 5004):
        with store.writing() as connection:
            connection.execute(add, {"number": number})
        with store.reading() as connection:
            assert connection.execute(count).scalar_one() == number + 1
    for unread in held:
        with pytest.raises(ProgrammingError, match="closed"):
            next(unread)


OF_A_GROUP: dict[str, Any] = {"project": "p", "strategy": "plain", "group": "g", "tag": "t", "q": "r"}
CHOSEN = (dict[str, Any](), {"health": "healthy"}, {"state": "stale"}, OF_A_GROUP, {"run_ids": ("r0", "r1")})


@pytest.mark.slow
@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: " ".join(chosen) or "all")
def test_runs_are_ordered_and_grouped_without_a_look_at_their_wide_rows(store, chosen):
    """Whatever is asked: else SQLite reads each run's sentences, too, where it looks for a number."""
    for place in range(3):
        fill(store, f"r{place}", f"s{place}")
    asked = []
    event.listen(store.engine, "before_cursor_execute", lambda _c, _u, *told: asked.append(told[:2]))
    for sort in get_args(wire.RunSort):
        store.table.page(TableQuery(sort=sort, **chosen), NOW, 600.0)
        for by in get_args(wire.GroupBy):
            for group in store.table.groups(GroupQuery(by=by, sort=sort, **chosen), NOW, 600.0).rows:
                opened = GroupQuery(by=by, sort=sort, opened=[group.key], limit=1, offset=1, **chosen)
                store.table.groups(opened, NOW, 600.0)
    ordering = [(text, values) for text, values in asked if "run_summary" in text and ".overview" not in text]
    assert len(ordering) > len(get_args(wire.RunSort))
    with store.reading() as connection:
        for text, values in ordering:
            plan = [row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)]
            looked_up = [step for step in plan if "run_summary" in step]
            assert all("COVERING INDEX run_summary_narrow" in step for step in looked_up), (text, plan)


def test_every_connection_commits_durably_and_writes_nothing_over_what_it_deletes(store):
    asked = {"page_size": 16384, "auto_vacuum": 2, "journal_mode": "wal"}
    asked |= {"synchronous": 2, "foreign_keys": 1, "secure_delete": 0}
    with store.engine.connect() as first, store.engine.connect() as second:
        for connection in (first, second):
            assert {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in asked} == asked


def log_of(store):
    return store.path.with_name(store.path.name + "-wal")


def write(store, megabytes):
    with store.writing() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS filler (data BLOB)")
        connection.exec_driver_sql(f"INSERT INTO filler VALUES (zeroblob({megabytes * 2**20}))")


@pytest.mark.slow
def test_the_log_gives_back_what_it_took_beside_a_long_reader(store):
    with store.reading() as reader:
        reader.exec_driver_sql("SELECT count(*) FROM run")
        for _ in range(10):
            write(store, 8)
        assert log_of(store).stat().st_size > 80 * 2**20
    for _ in range(3):
        write(store, 1)
    assert log_of(store).stat().st_size <= 16 * 2**20


@pytest.mark.slow
def test_readers_without_a_pause_do_not_make_the_log_grow_for_good(store):
    """One begins before the other ends: without help the log would never begin anew."""
    held, pause = [contextlib.ExitStack()], threading.Event()

    def read():
        held.append(contextlib.ExitStack())
        held[1].enter_context(store.reading()).exec_driver_sql("SELECT count(*) FROM run").scalar()
        held.pop(0).close()
        pause.wait(0.02)

    with beside(read):
        for _ in range(20):
            write(store, 8)
            store.checkpoint_log()
        assert log_of(store).stat().st_size < 100 * 2**20
    held[0].close()


def test_a_file_that_is_no_database_is_refused_with_a_sentence(tmp_path):
    path = tmp_path / "collage.sqlite"
    path.write_bytes(b"not a database, and long enough to be looked at" * 100)
    with pytest.raises(StoreUnusable, match="cannot be opened as a database"):
        opened(path)
    assert path.read_bytes().startswith(b"not a database")


@pytest.mark.parametrize("lost", ["the file", "the log"])
def test_no_empty_database_takes_the_place_of_one_that_is_gone(tmp_path, lost):
    first = opened(tmp_path / "here" / "collage.db")
    fill(first)
    # As a kill leaves it: a young database stands in its log alone.
    shutil.copytree(tmp_path / "here", tmp_path / "killed")
    first.close()
    path = tmp_path / "killed" / "collage.db"
    whole = path.with_name("whole.db-wal")
    log = path.with_name("collage.db-wal")
    shutil.copy(log, whole)
    path.with_name("collage.db-shm").unlink(missing_ok=True)
    kept = path.rename(path.with_name("whole.db")) if lost == "the file" else None
    log.unlink()
    with pytest.raises(StoreUnusable, match="holds no tables, though a database was here"):
        opened(path)
    if kept is not None:
        assert not path.exists(), "nothing stands where it was"
        kept.rename(path)
    whole.rename(log)
    again = opened(path)
    assert again.runs.get("r1").run_id == "r1"
    again.close()
    path.unlink()
    path.with_name("collage.db-was-here").unlink()
    opened(path).close()


@pytest.mark.slow
def test_of_two_servers_on_one_file_one_seals_at_a_time(store):
    other = opened(store.path)
    send(store, fill(store), range(1, 41))
    with store._claim("r1") as mine:
        assert mine
        assert not other.sealing.seal("r1", NOW)
    assert other.sealing.seal("r1", NOW)
    other.close()


MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
filer:/export {home} nfs4 rw,vers=4.2 0 0
filer:/odd {home}/with\\040space cifs rw 0 0
tmpfs {home}/local tmpfs rw 0 0
host {home}/remote fuse.sshfs rw 0 0
lxcfs {home}/lxc fuse.lxcfs rw 0 0
"""


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """A home on a network file system, with a local disk and others inside it."""
    (tmp_path / "mounts").write_text(MOUNTS.format(home=tmp_path))
    monkeypatch.setattr("collage_server.store.engine.database_files._MOUNTS", tmp_path / "mounts")
    return tmp_path


KINDS: dict[str, str | None] = {"deep/below": "nfs4", "with space": "cifs", "remote/data": "fuse.sshfs"}
KINDS |= dict.fromkeys(("local", "local/data", "lxc"))


@pytest.mark.parametrize(("folder", "kind"), KINDS.items())
def test_what_kind_of_disk_holds_a_folder(mounts, folder, kind):
    assert network_file_system(mounts / folder) == kind


def test_a_network_file_system_is_refused_until_one_accepts_the_risk(mounts):
    path = mounts / "data" / "collage.sqlite"
    with pytest.raises(StoreUnusable, match=rf"{path} lies on a network file system \(nfs4\).*--dir.*--database"):
        opened(path)
    assert not path.exists()
    opened(path, unsafe=True).close()


def test_without_a_table_of_mounts_nothing_is_refused(mounts):
    (mounts / "mounts").unlink()
    assert network_file_system(mounts) is None


def file_bytes(store):
    with store.writing():
        pass
    store.check()
    return store.path.stat().st_size


def emptied(store):
    slices = 0
    while store.release_space():
        slices += 1
    return slices


@pytest.mark.slow
def test_deletion_gives_the_space_back_to_the_disk(tmp_path):
    store = opened(tmp_path / "collage.sqlite")
    empty = store.sizes().used_bytes
    for number in range(4):
        filled(store, 8 * 32, f"r{number}")
    store.close()
    store.open()
    full, used = file_bytes(store), store.sizes().used_bytes
    for number in range(3):
        store.runs.delete(f"r{number}", NOW)
    left = store.sizes().used_bytes
    assert left - empty < 0.35 * (used - empty)
    assert file_bytes(store) == full
    emptied(store)
    store.close()
    assert store.path.stat().st_size <= left < full
    assert not store.path.with_name("collage.sqlite-wal").exists()


@pytest.mark.slow
def test_retention_gives_the_space_back_in_slices(store, monkeypatch):
    monkeypatch.setattr("collage_server.store.engine.database_files._PAGES_A_SLICE", 2)
    filled(store, 16 * 32)
    full = store.sizes().used_bytes
    assert store.retention.expire("r1", NEVER) == 30
    assert emptied(store) > 3
    assert not store.release_space()
    assert store.sizes().used_bytes < full


def test_a_deletion_takes_fewer_rows_where_they_are_slow():
    pace = _Pace()
    first = pace.rows
    for _ in range(20):
        pace.took(pace.rows, 1.0)
    assert pace.rows == 1
    for _ in range(20):
        pace.took(0, 0.0)
    assert pace.rows == 1, "the last of a table says nothing"
    for _ in range(20):
        pace.took(pace.rows, 0.001)
    assert pace.rows > first


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(min_value=0, max_value=60))))
def test_ranges_are_the_set_of_their_numbers(batches):
    ranges: list[tuple[int, int]] = []
    expected: set[int] = set()
    for batch in batches:
        ranges = add_numbers(ranges, batch)
        expected |= set(batch)
    assert {number for number in range(-1, 63) if contains(ranges, number)} == expected
    assert all(first <= last for first, last in ranges)
    gaps = itertools.pairwise(ranges)
    assert all(before[1] + 1 < after[0] for before, after in gaps)
    assert ranges_from_json(ranges_to_json(ranges)) == ranges
