"""Statements sent together: values arrive as they are, an error undoes all of it, and the connection goes on."""

from __future__ import annotations

import threading

import pytest
from collage_server.store.engine.pipeline import PipelineCursor, array, forget_prepared, pipeline_cursor
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DataError

NOTE = "INSERT INTO note VALUES ($1, $2)"


@pytest.fixture
def engine(empty_database):
    engine = create_engine(empty_database.replace("postgresql://", "postgresql+psycopg://"), pool_size=2)
    event.listen(engine, "rollback", forget_prepared)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE note (number int PRIMARY KEY, text text)"))
    yield engine
    engine.dispose()


def notes(engine):
    with engine.connect() as connection:
        return dict(connection.execute(text("SELECT number, text FROM note ORDER BY number")).all())


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("text", ["", "a\\b", '{"c": "ä, 🙂"}', None]),
        ("bigint", [0, -(2**63), 2**63 - 1, None]),
        ("int", [0, -(2**31), 2**31 - 1]),
        ("float8", [0.1, -0.0, 1e308, float("inf")]),
        ("bytea", [b"", b"\x00\xff" * 9000, None]),
        ("text", []),
    ],
)
def test_values_and_arrays_arrive_as_they_are(engine, kind, values):
    with engine.begin() as connection, pipeline_cursor(connection) as cursor:
        cursor.execute(f"SELECT unnest($1::{kind}[])", [array(kind, values)])
        assert [value for (value,) in cursor.fetchall()] == values
        for value in values:
            cursor.execute(f"SELECT $1::{kind}", [value])
            assert cursor.fetchall() == [(value,)]


def test_the_transaction_may_end_with_what_was_sent_last(engine):
    with engine.begin() as connection:
        with pipeline_cursor(connection) as cursor:
            cursor.executemany(NOTE, [(1, "a"), (2, "b")])
            cursor.commit()
        assert notes(engine) == {1: "a", 2: "b"}
    with pytest.raises(DataError):
        _commit(engine, (NOTE, (3, "c")), ("SELECT 1 / $1::int", (0,)))
    assert notes(engine) == {1: "a", 2: "b"}
    _commit(engine, (NOTE, (4, "d")))
    assert notes(engine) == {1: "a", 2: "b", 4: "d"}


def _commit(engine, *statements):
    with engine.begin() as connection, pipeline_cursor(connection) as cursor:
        for statement, values in statements:
            cursor.execute(statement, values)
        cursor.commit()


def test_all_is_in_the_transaction_that_the_engine_ends(engine):
    with engine.begin() as connection:
        with pipeline_cursor(connection) as cursor:
            cursor.executemany(NOTE, [(1, "a"), (2, "b")])
        connection.execute(text("INSERT INTO note VALUES (3, 'c')"))
        assert notes(engine) == {}
        with pipeline_cursor(connection) as cursor:
            cursor.execute("SELECT count(*) FROM note")
            assert cursor.fetchall() == [(3,)]
    assert notes(engine) == {1: "a", 2: "b", 3: "c"}


def send(connection, *rows, error=None):
    """Notes in a transaction of their own, and how many there are then."""
    with connection.begin(), pipeline_cursor(connection) as cursor:
        cursor.executemany(NOTE, rows)
        if error is not None:
            raise error
        cursor.execute("SELECT count(*) FROM note")
        return cursor.fetchall()[0][0]


@pytest.mark.parametrize("bad", [(2, "a\0b"), (2**40, "b")])
def test_an_error_undoes_all_and_the_connection_goes_on(engine, bad):
    """The statement behind the error was skipped, so it is not prepared either, and can be sent again."""
    with engine.connect() as connection:
        for number in (7, 8):
            with pytest.raises(DataError):
                send(connection, (1, "a"), bad)
            assert send(connection, (number, "z")) == number - 6
    assert notes(engine) == {7: "z", 8: "z"}


def test_what_was_sent_before_an_exception_is_not_kept(engine):
    with engine.connect() as connection:
        with pytest.raises(KeyError):
            send(connection, (1, "a"), error=KeyError())
        assert send(connection, (2, "b")) == 1
    assert notes(engine) == {2: "b"}


def test_a_pipeline_that_is_cut_off_leaves_no_connection_to_others(engine, monkeypatch):
    """Whatever ends the wait, a signal say: answers of this commit must not be taken for those of the next."""

    def cut(_cursor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, engine.connect() as connection:
        patch.setattr(PipelineCursor, "_answers", cut)
        with pytest.raises(KeyboardInterrupt):
            send(connection, (1, "a"))
    with engine.connect() as connection:
        assert send(connection, (2, "b")) == 1
    assert notes(engine) == {2: "b"}


def test_more_than_the_socket_holds_goes_both_ways(engine):
    large = "x" * 300_000
    with engine.begin() as connection, pipeline_cursor(connection) as cursor:
        for number in range(20):
            cursor.execute("INSERT INTO note VALUES ($1, $2) RETURNING text", (number, large))
        assert cursor.fetchall() == [(large,)]
    assert notes(engine) == dict.fromkeys(range(20), large)


def test_other_threads_run_while_it_waits(engine):
    """The thread that waits for a lock would otherwise keep the one that holds it from giving it up."""
    asked, got = threading.Event(), []

    def wait():
        with engine.begin() as connection, pipeline_cursor(connection) as cursor:
            cursor.execute("SET LOCAL lock_timeout = 20000")
            cursor.fetchall()
            asked.set()
            cursor.execute("SELECT pg_advisory_xact_lock(1) IS NULL")
            got.append(cursor.fetchall())

    thread = threading.Thread(target=wait)
    with engine.begin() as holding:
        holding.execute(text("SELECT pg_advisory_xact_lock(1)"))
        thread.start()
        asked.wait()
        waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        while not holding.scalar(waiting):
            pass
    thread.join()
    assert len(got) == 1
