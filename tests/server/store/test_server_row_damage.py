"""Damaged rows of the server itself: tokens, audit log, incidents, silences, views, and what is said of runs."""

import logging
import shutil
import sqlite3
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest
from collage_server.auth.principals import digest_of
from collage_server.errors import Damaged, NotFound, ServerError
from collage_server.store import IncidentQuery, LogOut, TableQuery, row_checks, schema, server_tables
from collage_server.store.row_checks import require_row
from collage_server.store.sealing.replica_comparison import Mismatch, keep_mismatches
from collage_server.summariser import MADE_BY, newest_points
from sqlalchemy import literal_column, select

from collage_monitor import wire
from tests.server.reads import evaluate_due
from tests.server.store.incidents import LOW, silence
from tests.server.store.stores import NOW
from tests.server.store.test_database_check import FLIPS, asked, flip_in_index, opened, page_size, places, sweep
from tests.server.store.test_row_damage import OF_SERVER, SAMPLE, answers_of, cells, damage, silent, small_store

ALL_PAGES = "SELECT name, pageno FROM dbstat"
pytestmark = pytest.mark.slow

WITHOUT_CHECKS = {
    "lease": "written anew every few seconds; whoever holds another archive's id refuses to serve",
    "log_out": "a log-out token that is taken twice ends no more sessions than once",
    "deleted_run": "its key alone answers: 410; what an undo reads of it has a check before it",
    "segment_gone": "files that no row names; its key alone says which",
    "seal_claim": "has a key and nothing else",
}


def entry(number):
    about: dict[str, Any] = {"actor": "host:ada", "action": "token.create", "subject": f"t{number}"}
    return wire.AuditLogEntry(act_id=f"act-{number}", time=NOW + number, **about)


def served_store(folder):
    """`small_store` with what a server adds: tokens, a session, incidents, a silence, a view, an evaluation."""
    store = small_store(folder)
    roles: tuple[wire.Role, ...] = ("read", "ingest")
    for number, role in enumerate(roles):
        made: dict[str, Any] = {"created_at": NOW, "created_by": "host:ada"}
        token = wire.Token(token_id=f"t{number}", name="ada", role=role, projects=["p"], **made)
        if number:
            token = msgspec.structs.replace(token, subject="ada", expires_at=NOW + 900.0, idle_seconds=60.0)
        store.access.add_token(token, digest_of(f"secret {number}"), [entry(number)], "session" if number else None)
    store.access.note_uses({"t0": NOW + 1.0})
    labels = {"run_id": "r1", "project": "p"}
    for number, alert in enumerate(("CollageEdqLow", "CollageRunSilent")):
        new = replace(LOW, alert=alert, labels=labels, started_at=NOW + number)
        assert store.incidents.fire(new, NOW + number)
    assert store.incidents.resolve("CollageRunSilent", labels, "server", NOW + 5.0)
    store.incidents.silence(silence("s1", NOW + 99.0, alert="Other"))
    view = wire.SavedView(project="p", name="mine", search="q=a", made_by="t0", made_at=NOW)
    store.table.save_view(view)
    with store.writing() as connection:
        keep_mismatches(connection, "r1", [Mismatch(1, 2, 0, (1,))], NOW)
    assert evaluate_due(store) == ["r1"]
    return store


@pytest.fixture
def store(tmp_path):
    with closing(served_store(tmp_path)) as store:
        yield store


@contextmanager
def told_in_the_log():
    """What is left out of answers is told there, once an hour."""
    found: list[str] = []
    row_checks.tell_damage.cache_clear()
    logger = logging.getLogger(row_checks.__name__)
    with mock.patch.object(logger, "handle", lambda record: found.append(record.getMessage())):
        yield found


def of_snapshot(store, ask):
    with store.points.snapshot() as now:
        return ask(now)


def questions(store):
    """Each question with its answer, or the error; a row that is left out is one, for the log tells it."""
    every = {
        "tokens": store.access.tokens,
        "who may enter": store.access.unrevoked_tokens,
        "audit log": lambda: store.access.audit_log(None, 10),
        "incidents": lambda: store.incidents.read(IncidentQuery(), NOW + 10.0),
        "messages": lambda: list(store.incidents.unsettled(NOW + 10.0)),
        "firing": lambda: list(store.incidents.open_of_server()),
        "silences": lambda: store.incidents.silences(NOW + 10.0),
        "views": lambda: store.table.views(None),
        "overview": lambda: store.summaries.overview("r1", MADE_BY),
        "table": lambda: store.table.page(TableQuery(), NOW, 600.0).rows,
        "newest": lambda: of_snapshot(store, lambda now: newest_points(now, now.records(["r1"]))),
        "live": lambda: of_snapshot(store, lambda now: now.live_runs(None, NOW, None, 10).runs),
    }
    found: dict[str, Any] = {}
    for name, ask in every.items():
        with told_in_the_log() as told:
            found |= answers_of({name: ask})
        if told:
            found[name] = Damaged(told[0])
    return found


def after_a_round(store):
    """The answers once what the check has removed is made again, as a server does in the background."""
    with suppress(ServerError):
        evaluate_due(store)
    return questions(store)


def is_found_by_the_check(store, table, row):
    """Whether the check of the database finds it: it reads each row."""
    with store.reading() as connection:
        [stored] = connection.execute(select(table).where(literal_column("rowid") == row)).all()
    try:
        require_row(table, stored)
    except Damaged:
        return True
    return False


@pytest.mark.parametrize("table", OF_SERVER, ids=lambda table: table.name)
def test_no_damaged_row_gives_another_answer(store, table):
    wrong, refused = silent(store, partial(cells, table, sample=SAMPLE), questions, is_found_by_the_check)
    assert not wrong
    assert refused >= SAMPLE or table is schema.replica_mismatch, "its rows are counted, none is shown"


def test_rows_that_their_index_does_not_lead_to_are_told(store):
    """Entries of a damaged index are out of order, so that nothing is found by them."""
    damage(store, "UPDATE token SET role = 'admin' WHERE token_id = 't0'")
    store.close()
    flip_in_index(store.path, "sqlite_autoindex_token_1", b"t0", 0, 0)
    store.open()
    with told_in_the_log() as told:
        assert store.access.tokens() == []
    rows = [f"left out: the row of `token` with token_id '{key}' cannot be" for key in ("t0", "t1")]
    assert sorted(message[:57] for message in told) == rows


def test_a_damaged_token_opens_nothing_and_all_others_do(store):
    damage(store, "UPDATE token SET role = 'admin' WHERE token_id = 't0'")
    with told_in_the_log() as told:
        assert list(store.access.unrevoked_tokens()) == [digest_of("secret 1")]
        assert [token.token_id for token in store.access.tokens()] == ["t1"]
    [message] = told
    assert message.startswith("left out: the row of `token` with token_id 't0' is damaged")
    with pytest.raises(Damaged, match=r"token_id 't0' is damaged .* restore a back-up"):
        store.access.revoke_token("t0", NOW, [])
    with pytest.raises(NotFound):
        store.access.revoke_token("t2", NOW, [])
    store.access.note_uses({"t0": NOW + 50.0, "t1": NOW + 50.0})
    assert store.access.tokens()[0].last_used_at == NOW + 50.0


def test_a_damaged_session_that_its_provider_ends_is_gone(store):
    """Healed from a back-up, it would open the server again."""
    damage(store, "UPDATE token SET role = 'admin' WHERE token_id = 't1'")
    log_out = LogOut(b"0" * 32, NOW + 9.0, "ada", None)
    assert store.access.end_sessions(log_out, NOW + 1.0, lambda token_id: entry(7)) == ["t1"]
    assert asked(store.path, "SELECT token_id FROM token") == [("t0",)]


def test_a_damaged_entry_of_the_audit_log_is_named_in_its_page(store):
    damage(store, "UPDATE act SET subject = 't9' WHERE act_id = 'act-0'")
    page = store.access.audit_log(None, 10)
    assert [act.act_id for act in page.acts] == ["act-1"]
    [told] = page.damaged
    assert told.startswith("the row of `act` with act_id 'act-0' is damaged in the database")


def test_what_is_said_of_a_run_is_made_again(store):
    before = questions(store)
    damage(store, "UPDATE run_summary SET findings = '[]', edq_ratio = 2")
    assert isinstance(questions(store)["live"], Damaged)
    checked = store.check_database()
    assert (checked.healed, checked.damaged) == (1, ())
    assert store.summaries.overview("r1", MADE_BY) is None
    assert evaluate_due(store) == ["r1"]
    after = questions(store)
    assert after["overview"] == before["overview"]
    assert not [name for name, answer in after.items() if isinstance(answer, Exception)]


def test_every_table_has_checks_or_a_reason():
    without = {name for name, table in schema.metadata.tables.items() if "checks" not in table.c}
    assert without == set(WITHOUT_CHECKS)
    assert set(server_tables.SERVER_TABLES) - set(OF_SERVER) == {server_tables.lease, server_tables.log_out}


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    served_store(folder).close()
    return folder


def of_server(path):
    """Bytes of the pages of the server's tables and their indexes, not of the tables' description."""
    names, size = tuple(table.name for table in OF_SERVER), page_size(path)
    known = ((name.removeprefix("sqlite_autoindex_"), page) for name, page in asked(path, ALL_PAGES))
    pages = {page for name, page in known if name.startswith(names)}
    return [place for place in places(path) if place // size + 1 in pages]


@pytest.mark.parametrize(("flips", "seed"), [(FLIPS, 3), pytest.param(400, None, marks=pytest.mark.nightly)])
def test_a_flipped_bit_of_the_file_gives_no_other_answer(closed, tmp_path, flips, seed):
    found, wrong = sweep(closed, tmp_path, flips, seed, after_a_round, of_server)
    assert not wrong, (found, wrong)
    assert found["told"] >= FLIPS // 10, found


def test_a_file_without_these_checks_is_taken_over(closed, tmp_path):
    path = shutil.copy(closed / "collage.sqlite", tmp_path)
    with closing(sqlite3.connect(path)) as connection, connection:
        for table in OF_SERVER:
            connection.execute(f"ALTER TABLE {table.name} DROP COLUMN checks")
        connection.execute("DROP TABLE numbered_export")
        for column in ("kept_until", "kept"):
            connection.execute(f"ALTER TABLE deleted_run DROP COLUMN {column}")
        connection.execute("UPDATE alembic_version SET version_num = 'r0013'")
    store = opened(tmp_path)
    assert [token.token_id for token in store.access.tokens()] == ["t0", "t1"]
    assert store.incidents.resolve("CollageEdqLow", {"run_id": "r1"}, "server", NOW)
    assert store.check_database().damaged == ()
    store.close()
