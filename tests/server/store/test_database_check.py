"""The file of the database, flipped bit by bit: found, healed, or without effect. Never another answer."""

import itertools
import random
import re
import shutil
import sqlite3
import struct
from collections import Counter
from contextlib import closing

import pytest
from collage_server.errors import Damaged, ServerError
from collage_server.store import database_check
from collage_server.store.backup import back_up
from collage_server.store.records import NewEvent, RunQuery
from sqlalchemy.exc import SQLAlchemyError

from collage_monitor import wire
from tests.server.store.sending import append
from tests.server.store.stores import NOW, flip
from tests.server.store.stores import opened as opened_store
from tests.server.store.test_row_damage import damage, differing, questions, small_report, small_store

pytestmark = pytest.mark.slow

FLIPS = 25
"""By day; a small database has four million bits that are not zero or describe its tables."""
BY_NIGHT = pytest.param(2000, None, marks=pytest.mark.nightly)
"""About eight minutes, others each night; a test may take fifteen."""


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """The folder of a small store that is not open."""
    folder = tmp_path_factory.mktemp("small")
    small_store(folder).close()
    return folder


@pytest.fixture
def copied(closed, tmp_path):
    """The file of a copy of its own."""
    shutil.copytree(closed, tmp_path, dirs_exist_ok=True)
    return tmp_path / "collage.sqlite"


def opened(folder):
    store = opened_store(folder / "collage.sqlite")
    store.points.limit_cache(0)
    return store


def asked(path, *statement):
    """The rows that the file holds."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(*statement).fetchall()


def page_size(path):
    return asked(path, "PRAGMA page_size")[0][0]


def places(path):
    """Bytes that hold something, but for one in twenty of those that hold the tables' description: most of them."""
    size = page_size(path)
    described = {page for (page,) in asked(path, "SELECT pageno FROM dbstat WHERE name = 'sqlite_schema'")}
    held = (place for place, byte in enumerate(path.read_bytes()) if byte)
    return [place for place in held if place // size + 1 not in described or place % 20 == 0]


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
    if different := differing(before, after):
        return ("found by the check alone" if checked.damaged else "silent"), different
    told = checked.damaged or any(isinstance(answer, Exception) for answer in after.values())
    return ("told" if told else "as before"), []


def sweep(closed, folder, flips, seed, ask=questions, places=places):
    """How often each outcome came; the silent ones with their places."""
    shutil.copytree(closed, folder, dirs_exist_ok=True)
    path = folder / "collage.sqlite"
    good, generator = path.read_bytes(), random.Random(seed)
    store = opened(folder)
    before = ask(store)
    store.close()
    known, wrong, found = places(path), [], Counter[str]()
    for _ in range(flips):
        place, bit = generator.choice(known), generator.randrange(8)
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        path.write_bytes(good)
        flip(path, place, bit)
        what, different = outcome(folder, before, ask)
        found[what] += 1
        if what == "silent":
            wrong.append((place, bit, different))
    return found, wrong


@pytest.mark.parametrize(("flips", "seed"), [(FLIPS, 1), BY_NIGHT])
def test_a_flipped_bit_of_the_file_gives_no_other_answer(closed, tmp_path, flips, seed):
    found, wrong = sweep(closed, tmp_path, flips, seed)
    assert not wrong, (found, wrong)
    assert found["told"] >= FLIPS // 10, found


@pytest.fixture
def store(copied, tmp_path):
    """A store with a back-up noted beside it."""
    back_up(copied, tmp_path / "copy.sqlite")
    with closing(opened(tmp_path)) as store:
        yield store


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
def test_a_damaged_row_is_healed_from_the_newest_back_up(store, statement):
    before, changed = questions(store), damage(store, statement)
    checked = store.check_database()
    assert (checked.healed, checked.damaged) == (changed, ())
    assert questions(store) == before


def test_a_row_that_changed_since_the_back_up_stays_damaged_and_is_named(store, tmp_path):
    (tmp_path / "copy.sqlite").unlink()
    damage(store, CHANGES[0])
    [told] = store.check_database().damaged
    assert told.startswith("run r1: the row of `layer` with run_id 'r1', layer 1 is damaged")


def test_reports_are_kept_while_what_is_known_of_their_stream_is_damaged(store):
    """Nobody reads it until it is healed: it says that report 7 is sealed, which nobody has sent yet."""
    stream = store.streams.stream_record("s0")
    [(good,)] = asked(store.path, "SELECT sealed FROM run_latest WHERE stream_id = 's0'")
    damage(store, "UPDATE run_latest SET sealed = '[[0,9]]' WHERE stream_id = 's0'")
    for known in (0, 1):
        outcome = append(store, stream, small_report(7, 8))
        assert (outcome.accepted, outcome.duplicates) == (1 - known, known)
    with pytest.raises(Damaged, match="row of `run_latest` with run_id 'r1', stream_id 's0' is damaged"):
        store.runs.get("r1")
    damage(store, f"UPDATE run_latest SET sealed = '{good}' WHERE stream_id = 's0'")
    assert questions(store)["layers"]["steps"] == list(range(1, 9))


def test_an_index_that_leads_to_a_row_no_more_is_made_again(copied, tmp_path):
    size = page_size(copied)
    [(page,)] = asked(copied, "SELECT pageno FROM dbstat WHERE name = 'sqlite_autoindex_entry_1'")
    with closing(opened(tmp_path)) as store:
        before = questions(store)
    content, lost = copied.read_bytes(), 0
    for found in re.finditer(b"r1", content[(page - 1) * size : page * size]):
        copied.write_bytes(content)
        flip(copied, (page - 1) * size + found.start())
        with closing(opened(tmp_path)) as store:
            lost += questions(store) != before
            assert store.check_database().damaged == ()
            assert questions(store) == before
    assert lost, "readers cannot notice it"


CELL_COUNT = 4
"""Where the lower byte of a page's number of cells lies in the page."""
CHECKED_TABLES = ("run", "layer", "stream", "event", "report", "layer_chunk", "model_chunk", "point_chunk")


@pytest.mark.parametrize("table", CHECKED_TABLES)
def test_the_check_ends_if_a_page_leads_back_to_rows_already_read(copied, tmp_path, table):
    """With 128 cells too many the last one's number is no larger than that of rows before."""
    [(page,)] = asked(copied, "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?", (table,))
    flip(copied, (page - 1) * page_size(copied) + CELL_COUNT, 7)
    goes_on = itertools.count()
    with closing(opened(tmp_path)) as store:
        assert store.check_database(lambda: next(goes_on) < 20).damaged
    assert next(goes_on) < 20


def test_a_check_that_is_to_end_ends_at_once(store, monkeypatch):
    monkeypatch.setattr(database_check, "_ROWS_AT_ONCE", 2)
    assert store.check_database(lambda: False).rows == 2


def flip_in_index(path, index, entry, place, bit):
    """Flip a bit of the entry's bytes in the index, which is out of order afterwards."""
    size = page_size(path)
    [(page,)] = asked(path, "SELECT rootpage FROM sqlite_master WHERE name = ?", (index,))
    flip(path, path.read_bytes().index(entry, (page - 1) * size, page * size) + place, bit)


def test_an_event_whose_number_is_taken_in_a_damaged_index_is_refused(store):
    """The last one is 6, and the third says 7: each try would take 7 again."""
    new = [NewEvent(origin=f"o{number}", kind="note", text="said") for number in range(9)]
    known = store.events.read("r1", 0, 9).cursor
    store.events.add("r1", new[known:6], NOW)
    store.close()
    flip_in_index(store.path, "sqlite_autoindex_event_1", b"r1\x03", 2, 2)
    store.open()
    with pytest.raises(Damaged, match="the events of run 'r1' take no new one, 7 is taken but not the last"):
        store.events.add("r1", new[8:], NOW)
    store.check_database()
    assert store.events.add("r1", new[8:], NOW) == 1


def test_runs_out_of_order_are_refused_and_not_listed_for_ever(store):
    times = [NOW + 2.5 + run for run in range(7)]
    for run, created_at in enumerate(times):
        store.runs.create("p", wire.RunCreate(run_id=f"a{run}"), created_at)
    store.close()
    flip_in_index(store.path, "run_by_age", struct.pack(">d", times[4]) + b"a4", 1, 6)
    store.open()
    with pytest.raises(Damaged, match="an index of the table `run` is damaged"):
        pages_of_runs(store)
    store.check_database()
    assert pages_of_runs(store) == [f"a{run}" for run in range(6, -1, -1)] + ["r1"]


def pages_of_runs(store):
    found, cursor = [], None
    for _ in range(9):
        page = store.runs.page(RunQuery(cursor=cursor, limit=1), NOW, 600.0)
        found += [run.run_id for run in page.runs]
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError(found)


def test_a_key_that_is_no_text_any_more_is_named_and_its_row_still_found(store):
    """An index made again from it would no longer lead to the row."""
    before = questions(store)
    store.close()
    flip(store.path, store.path.read_bytes().index(b"r1attempt/1"), 7)
    store.open()
    damaged = store.check_database().damaged
    assert [told.partition(":")[0] for told in damaged] == ["run �1", "the database's file"]
    assert questions(store) == before
