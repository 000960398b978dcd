"""The file of the database, flipped bit by bit: found, healed, or without effect. Never another answer."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import sqlite3
import struct
from contextlib import closing

import pytest
from collage_server.errors import Damaged, ServerError
from collage_server.store import SqliteStore, database_check
from collage_server.store.backup import back_up
from collage_server.store.records import NewEvent, RunQuery
from sqlalchemy.exc import SQLAlchemyError

from collage_monitor import wire
from tests.server.store.contract import NOW, StoreContract
from tests.server.store.test_row_damage import questions, small_report, small_store

FLIPS = 25
"""By day; a small database has four million bits that are not zero or describe its tables."""
NIGHTLY_FLIPS = 2000
"""About eight minutes, others each night; a test may take fifteen."""


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """The folder of a small store that is not open, with a back-up in another folder."""
    folder = tmp_path_factory.mktemp("small")
    store = small_store(folder)
    store.close()
    return folder


def opened(folder):
    store = SqliteStore(folder / "collage.sqlite", stale_after_seconds=600.0)
    store.open()
    store.points.limit_cache(0)
    return store


def places(path):
    """Bytes that hold something, but for one in twenty of those that hold the tables' description: most of them."""
    content = path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        pages = connection.execute("SELECT pageno FROM dbstat WHERE name = 'sqlite_schema'").fetchall()
    described = {page for (page,) in pages}
    return [
        place
        for place, byte in enumerate(content)
        if byte and (place // size + 1 not in described or place % 20 == 0)
    ]


def outcome(folder, before, ask):
    """What a server says of the file in this folder: the questions whose answers differ without an error."""
    try:
        store = opened(folder)
    except (ServerError, SQLAlchemyError, sqlite3.Error, UnicodeDecodeError):
        return "not opened", []
    try:
        checked = store.check_database()
        after = ask(store)
    finally:
        store.close()
    told = {name: answer for name, answer in after.items() if not isinstance(answer, Exception)}
    different = [name for name, answer in told.items() if answer != before[name]]
    if different:
        return ("found by the check alone" if checked.damaged else "silent"), different
    return ("told" if len(told) < len(after) or checked.damaged else "as before"), []


def sweep(closed, folder, flips, seed, ask=questions, places=places):
    """How often each outcome came; the silent ones with their places."""
    shutil.copytree(closed, folder, dirs_exist_ok=True)
    path = folder / "collage.sqlite"
    good, generator = path.read_bytes(), random.Random(seed)
    store = opened(folder)
    before = ask(store)
    store.close()
    found: dict[str, int] = {}
    known, wrong = places(path), []
    for _ in range(flips):
        place, bit = generator.choice(known), generator.randrange(8)
        damaged = bytearray(good)
        damaged[place] ^= 1 << bit
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        path.write_bytes(damaged)
        what, different = outcome(folder, before, ask)
        found[what] = found.get(what, 0) + 1
        if what == "silent":
            wrong.append((place, bit, different))
    return found, wrong


def test_a_flipped_bit_of_the_file_gives_no_other_answer(closed, tmp_path):
    found, wrong = sweep(closed, tmp_path, FLIPS, seed=1)
    assert not wrong, wrong
    assert found["told"] >= FLIPS // 10, found


@pytest.mark.slow
@pytest.mark.nightly
def test_no_flipped_bit_of_the_file_gives_another_answer(closed, tmp_path):
    found, wrong = sweep(closed, tmp_path, NIGHTLY_FLIPS, seed=None)
    assert not wrong, (found, wrong)


@pytest.fixture
def damaged(closed, tmp_path):
    """(store, its answers, how to change its file by SQL), with a back-up noted beside it."""
    shutil.copytree(closed, tmp_path, dirs_exist_ok=True)
    back_up(tmp_path / "collage.sqlite", tmp_path / "copy.sqlite")
    store = opened(tmp_path)

    def change(statement):
        with closing(sqlite3.connect(store.path)) as connection, connection:
            return connection.execute(statement).rowcount

    yield store, questions(store), change
    store.close()


CHANGES = (
    "UPDATE layer SET name = 'blocks.9.weight' WHERE layer = 1",
    "UPDATE run SET config = '{\"lr\":0.5}'",
    "UPDATE stream SET rank = 4 WHERE stream_id = 's1'",
    "UPDATE run_latest SET sealed = '[[0,1]]' WHERE stream_id = 's0'",
    "UPDATE event SET step = 7",
    "UPDATE report SET time = time + 1 WHERE seq = 6",
    "UPDATE layer_chunk SET data = zeroblob(length(data)) WHERE level = 1 AND entry = 0",
    "UPDATE model_chunk SET entries = zeroblob(length(entries)) WHERE level = 16",
    "UPDATE point_chunk SET points = zeroblob(length(points)) WHERE level = 1",
    "UPDATE scalar_chunk SET part = 5 WHERE part = 0 AND stream_id = 's0'",
)


@pytest.mark.parametrize("statement", CHANGES)
def test_a_damaged_row_is_healed_from_the_newest_back_up(damaged, statement):
    store, before, change = damaged
    changed = change(statement)
    checked = store.check_database()
    assert (checked.healed, checked.damaged) == (changed, ())
    assert questions(store) == before


def test_a_row_that_changed_since_the_back_up_stays_damaged_and_is_named(damaged, tmp_path):
    store, _, change = damaged
    (tmp_path / "copy.sqlite").unlink()
    change(CHANGES[0])
    [told] = store.check_database().damaged
    assert told.startswith("run r1: the row of `layer` with run_id 'r1', layer 1 is damaged")


def test_reports_are_kept_while_what_is_known_of_their_stream_is_damaged(damaged):
    """Nobody reads it until it is healed: it says that report 7 is sealed, which nobody has sent yet."""
    store, _, change = damaged
    stream = store.streams.stream_record("s0")
    with closing(sqlite3.connect(store.path)) as connection:
        statement = "SELECT sealed FROM run_latest WHERE stream_id = 's0'"
        [good] = connection.execute(statement).fetchone()
    change("UPDATE run_latest SET sealed = '[[0,9]]' WHERE stream_id = 's0'")
    for known in (0, 1):
        outcome = StoreContract.append(store, stream, small_report(7, 8))
        assert (outcome.accepted, outcome.duplicates) == (1 - known, known)
    with pytest.raises(Damaged, match="row of `run_latest` with run_id 'r1', stream_id 's0' is damaged"):
        store.runs.get("r1")
    change(f"UPDATE run_latest SET sealed = '{good}' WHERE stream_id = 's0'")
    assert questions(store)["layers"]["steps"] == list(range(1, 9))


def test_an_index_that_leads_to_a_row_no_more_is_made_again(closed, tmp_path):
    shutil.copytree(closed, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "collage.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        pages = "SELECT pageno FROM dbstat WHERE name = 'sqlite_autoindex_entry_1'"
        [page] = connection.execute(pages).fetchone()
    store = opened(tmp_path)
    before = questions(store)
    store.close()
    content, lost = path.read_bytes(), 0
    for found in re.finditer(b"r1", content[(page - 1) * size : page * size]):
        damaged = bytearray(content)
        damaged[(page - 1) * size + found.start()] ^= 1
        path.write_bytes(damaged)
        store = opened(tmp_path)
        lost += questions(store) != before
        assert store.check_database().damaged == ()
        assert questions(store) == before
        store.close()
    assert lost, "readers cannot notice it"


CELL_COUNT = 4
"""Where the lower byte of a page's number of cells lies in the page."""
CHECKED_TABLES = ("run", "layer", "stream", "event", "report", "layer_chunk", "model_chunk", "point_chunk")


@pytest.mark.parametrize("table", CHECKED_TABLES)
def test_the_check_ends_if_a_page_leads_back_to_rows_already_read(closed, tmp_path, table):
    """With 128 cells too many the last one's number is no larger than that of rows before."""
    shutil.copytree(closed, tmp_path, dirs_exist_ok=True)
    path, rows = tmp_path / "collage.sqlite", "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?"
    with closing(sqlite3.connect(path)) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        [page] = connection.execute(rows, (table,)).fetchone()
    damaged = bytearray(path.read_bytes())
    damaged[(page - 1) * size + CELL_COUNT] ^= 0x80
    path.write_bytes(damaged)
    store, asked = opened(tmp_path), itertools.count()
    assert store.check_database(lambda: next(asked) < 20).damaged
    store.close()
    assert next(asked) < 20


def test_a_check_that_is_to_end_ends_at_once(closed, tmp_path, monkeypatch):
    monkeypatch.setattr(database_check, "_ROWS_AT_ONCE", 2)
    shutil.copytree(closed, tmp_path, dirs_exist_ok=True)
    store = opened(tmp_path)
    assert store.check_database(lambda: False).rows == 2
    store.close()


def flip_in_index(path, index, entry, place, bit):
    """Flip a bit of the entry's bytes in the index, which is out of order afterwards."""
    with closing(sqlite3.connect(path)) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        [page] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (index,)).fetchone()
    content = bytearray(path.read_bytes())
    content[content.index(entry, (page - 1) * size, page * size) + place] ^= 1 << bit
    path.write_bytes(content)


def test_an_event_whose_number_is_taken_in_a_damaged_index_is_refused(closed, tmp_path):
    """The last one is 6, and the third says 7: each try would take 7 again."""
    shutil.copytree(closed, tmp_path, dirs_exist_ok=True)
    store, new = opened(tmp_path), [NewEvent(origin=f"o{number}", kind="note", text="said") for number in range(9)]
    known = store.events.read("r1", 0, 9).cursor
    store.events.add("r1", new[known:6], NOW)
    store.close()
    flip_in_index(tmp_path / "collage.sqlite", "sqlite_autoindex_event_1", b"r1\x03", 2, 2)
    store = opened(tmp_path)
    with pytest.raises(Damaged, match="the events of run 'r1' take no new one, 7 is taken but not the last"):
        store.events.add("r1", new[8:], NOW)
    store.check_database()
    assert store.events.add("r1", new[8:], NOW) == 1
    store.close()


def test_runs_out_of_order_are_refused_and_not_listed_for_ever(closed, tmp_path):
    shutil.copytree(closed, tmp_path, dirs_exist_ok=True)
    store, times = opened(tmp_path), [NOW + 2.5 + run for run in range(7)]
    for run, created_at in enumerate(times):
        store.runs.create("p", wire.RunCreate(run_id=f"a{run}"), created_at)
    store.close()
    flip_in_index(tmp_path / "collage.sqlite", "run_by_age", struct.pack(">d", times[4]) + b"a4", 1, 6)
    store = opened(tmp_path)
    with pytest.raises(Damaged, match="an index of the table `run` is damaged"):
        pages_of_runs(store)
    store.check_database()
    assert pages_of_runs(store) == [f"a{run}" for run in range(6, -1, -1)] + ["r1"]
    store.close()


def pages_of_runs(store):
    found, cursor = [], None
    for _ in range(9):
        page = store.runs.page(RunQuery(cursor=cursor, limit=1), NOW, 600.0)
        found += [run.run_id for run in page.runs]
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError(found)


def test_a_key_that_is_no_text_any_more_is_named_and_its_row_still_found(closed, tmp_path):
    """An index made again from it would no longer lead to the row."""
    shutil.copytree(closed, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "collage.sqlite"
    store = opened(tmp_path)
    before = questions(store)
    store.close()
    content = bytearray(path.read_bytes())
    content[content.index(b"r1attempt/1")] ^= 0x80
    path.write_bytes(content)
    store = opened(tmp_path)
    damaged = store.check_database().damaged
    assert [told.partition(":")[0] for told in damaged] == [
        "run �1",
        "the database's file",
    ]
    assert questions(store) == before
    store.close()
