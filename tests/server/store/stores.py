"""Stores of the tests: opened, sealed and archived as far as they can be; how many rows they hold."""

from typing import Any

from collage_server.store import PostgresqlStore, Selection, SqliteStore, schema
from collage_server.store.sealing.seal_plan import SealLimits
from sqlalchemy import func, select

from collage_monitor import wire

NOW = 1_700_000_000.0
AFTER_SILENCE = NOW + 601
"""When a run that nobody reports to any more counts as over, whichever rank has not come to its end."""
LIMITS = SealLimits(points=32, part_points=32, part_bytes=1, late_rows=4, slice_rows=3, delete_rows=5)
"""Small, so that few reports make chunks."""
ALL = Selection()


def opened(database, limits=LIMITS, **more) -> Any:
    """A store on the file at a path, or on the PostgreSQL of an address."""
    kind: Any = PostgresqlStore if isinstance(database, str) else SqliteStore
    store = kind(database, stale_after_seconds=600.0, limits=limits, **more)
    store.open()
    return store


def reopening(store, open_again):
    """The body of a fixture: what closes the store and opens the same data anew, as often as it is called."""
    opened = [store]

    def reopened():
        opened[-1].close()
        opened.append(open_again())
        return opened[-1]

    yield reopened
    for entry in opened[1:]:
        entry.close()


def seal_all(store, run_id="r1", now=NOW):
    """Seal all that is due; how many parts that made."""
    parts = 0
    while made := store.sealing.seal(run_id, now):
        parts += made
        assert parts < 1000
    return parts


def finish(store, run_id="r1"):
    """The run is over, and all of it is sealed."""
    store.runs.update(run_id, wire.RunUpdate(state="finished"), NOW)
    return seal_all(store, run_id, AFTER_SILENCE)


def archive_all(store, run_id="r1"):
    while store.archiving.archive(run_id):
        pass


def paths(store, table=schema.segment):
    """Of the archived files that the database names."""
    with store.reading() as connection:
        return set(connection.execute(select(table.c.path)).scalars())


def purge_all(store, rows=10):
    """All that was deleted for good goes."""
    while store.retention.purge(rows):
        pass


def rows(store, table, *where):
    """How many rows there are."""
    with store.reading() as connection:
        return connection.execute(select(func.count()).select_from(table).where(*where)).scalar_one()


def bits_of(content, places):
    """The content with one bit flipped, of each of these bits."""
    for place in places:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        yield bytes(damaged)


def flip(file, place, bit=0):
    """Flip one bit of a byte of the file."""
    [content] = bits_of(file.read_bytes(), [8 * place + bit])
    file.write_bytes(content)
