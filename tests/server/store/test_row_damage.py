"""Damaged rows of the database: whichever bit of a number is flipped, no wrong number is read."""

import random
import sqlite3
import struct
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from collage_server.errors import Damaged
from collage_server.store import Selection, schema, server_tables
from collage_server.store.row_crc import checks_of
from collage_server.store.sealing.seal_plan import SealLimits
from sqlalchemy import BigInteger, Boolean, ColumnDefault, Double, Integer, LargeBinary

from collage_monitor import wire
from tests.server.migrated import put_migrated
from tests.server.reads import latest_point, layer_points, model_points, scalar_points
from tests.server.samples import LAYERS, STATISTICS, block, layer, report
from tests.server.store.seen import arrays, arrays_of, plain
from tests.server.store.sending import append, launch, register
from tests.server.store.stores import AFTER_SILENCE, ALL, NOW, bits_of, opened, seal_all

KEYS = [*STATISTICS[:2], STATISTICS[9]]
NUMBERS = (schema.report, schema.point_chunk, schema.model_chunk, schema.layer_chunk, schema.scalar_chunk)
_SERVERS = (schema.run_summary, schema.replica_mismatch, *server_tables.SERVER_TABLES)
OF_SERVER = tuple(table for table in _SERVERS if "checks" in table.c)
"""Their rows are tried in `test_server_row_damage.py`."""
_CHECKED = [table for table in schema.metadata.sorted_tables if "checks" in table.c and table not in OF_SERVER]
OF_RUNS = tuple(table for table in _CHECKED if isinstance(table.c.checks.default, ColumnDefault))
SAMPLE = 2
"""Flips of each column by day; there are 17,000 in all."""
IN_AN_INDEX = {schema.point_chunk: ("point_count", "first_step", "last_step"), schema.entry: ("key",)}
"""A disk damages either the row, which is compared with its check, or the entry of the index, which the check of
the database finds. Here both would change."""


def small_report(seq, step, rank=0):
    """Few statistics of two layers, so that there are few bits."""
    rows = [STATISTICS.index(key) for key in KEYS]
    totals = block(step, rank, layers=2)[rows] / 3
    return msgspec.structs.replace(
        report(seq, step, scalars={"loss": 1 / step}, measured=False),
        statistic_count=totals.shape[0],
        layer_count=totals.shape[1],
        statistics=wire.array_to_bytes(totals),
        model=wire.array_to_bytes(totals.sum(axis=1)),
    )


def small_store(folder):
    """A run of two ranks, in chunks of every level and with reports that are not sealed; rank 1 misses some."""
    store = opened(put_migrated(folder), SealLimits(points=4, part_points=2, part_bytes=1))
    store.points.limit_cache(0)
    told = wire.RunCreate(run_id="r1", name="first", config={"lr": 0.25}, tags=["a", "b"], notes="said", seed=3)
    store.runs.create("p", told, NOW)
    launch(store, 1, 1)
    for rank in range(2):
        layers = [layer(name) for name in LAYERS[:2]]
        stream = register(store, f"s{rank}", rank=rank, world_size=2, layers=layers, statistics=KEYS)
        sent = [small_report(seq, seq + 1, rank) for seq in range(5) if not rank or seq % 2]
        append(store, stream, *sent)
    seal_all(store, now=AFTER_SILENCE)
    append(store, store.streams.stream_record("s0"), small_report(5, 6), small_report(6, 7))
    return store


@pytest.fixture
def store(tmp_path):
    with closing(small_store(tmp_path)) as store:
        yield store


def questions(store):
    """Each question with its answer, or the error."""
    coarse, rank = Selection(points=1), Selection(rank=1)
    return answers_of(
        {
            "layers": lambda: plain(layer_points(store, "r1", KEYS, ALL)),
            "slice": lambda: plain(layer_points(store, "r1", KEYS, ALL, [LAYERS[1]])),
            "coarse layers": lambda: plain(layer_points(store, "r1", KEYS, coarse)),
            "model": lambda: plain(model_points(store, "r1", None, ALL)),
            "rank": lambda: plain(model_points(store, "r1", None, rank)),
            "coarse model": lambda: plain(model_points(store, "r1", None, coarse)),
            "logged": lambda: {name: arrays(held) for name, held in scalar_points(store, "r1", None, ALL).items()},
            "latest": lambda: plain_latest(latest_point(store, "r1")),
            "run": lambda: store.runs.get("r1"),
            "streams": lambda: store.streams.of_run("r1"),
            "layer names": lambda: store.streams.layers("r1"),
            "events": lambda: store.events.read("r1", 0, 100),
        }
    )


def answers_of(asked):
    """Each question's answer, or the error."""
    found: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except Exception as error:
            # Not all of them are in good words: a text that is none any more, a row that is missing.
            found[name] = error
    return found


def plain_latest(point):
    return point and (point.step, point.time, arrays_of({key: np.asarray(point.model[key]) for key in point.model}))


def flips(value, kind):
    """Every value that differs from one in the database by one bit."""
    if isinstance(kind, Double):
        [bits] = struct.unpack("<q", struct.pack("<d", value))
        return [struct.unpack("<d", struct.pack("<q", turned(bits, place, 64)))[0] for place in range(64)]
    if isinstance(kind, Integer | Boolean):
        width = 64 if isinstance(kind, BigInteger) else 32
        return [turned(value, place, width) for place in range(width)]
    data = value.encode() if isinstance(value, str) else value
    return list(bits_of(data, range(8 * len(data))))


def turned(number, place, width):
    """The signed integer with one bit flipped."""
    bits = (number ^ 1 << place) & (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits


def cells(*tables, connection, sample=None):
    """(column, rowid, value, a flipped one) of every bit of what lies in the tables, or of some of each column, but
    of keys."""
    generator = random.Random(1)
    for table in tables:
        for column in table.c:
            if column.primary_key or column.name in IN_AN_INDEX.get(table, ()):
                continue
            held = connection.execute(f'SELECT rowid, "{column.name}" FROM {table.name} ORDER BY rowid').fetchall()
            known = [(row, value) for row, value in held if value is not None]
            every = [(column, row, value, bad) for row, value in known for bad in flips(value, column.type)]
            yield from every if sample is None else generator.sample(every, min(sample, len(every)))


def put(connection, column, row, value):
    # Bytes that are no UTF-8 can lie in a text, too.
    cast = "?" if isinstance(column.type, LargeBinary) or not isinstance(value, bytes) else "CAST(? AS TEXT)"
    with connection:
        connection.execute(f'UPDATE {column.table} SET "{column.name}" = {cast} WHERE rowid = ?', (value, row))


def differing(before, after):
    """Questions whose answers differ without an error."""
    told = {name: answer for name, answer in after.items() if not isinstance(answer, Exception)}
    return [name for name, answer in told.items() if answer != before[name]]


def damage(store, statement):
    """Change the file by SQL; how many rows that changed."""
    with closing(sqlite3.connect(store.path)) as connection, connection:
        return connection.execute(statement).rowcount


def silent(store, chosen, ask=questions, is_found=lambda *_: False):
    """Flips after which some answer is neither right nor refused, nor found; and how many were refused."""
    before, wrong, refused = ask(store), [], 0
    assert not any(isinstance(answer, Exception) for answer in before.values())
    with closing(sqlite3.connect(store.path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for column, row, value, damaged in [*chosen(connection=connection)]:
            try:
                put(connection, column, row, damaged)
            except sqlite3.IntegrityError:
                continue  # NaN, which SQLite keeps as null.
            after, found = ask(store), is_found(store, column.table, row)
            put(connection, column, row, value)
            refused += any(isinstance(answer, Exception) for answer in after.values())
            if (different := differing(before, after)) and not found:
                wrong.append((str(column), row, value, damaged, different))
    assert ask(store) == before
    return wrong, refused


def test_a_flipped_bit_of_a_row_gives_no_wrong_number(store):
    wrong, refused = silent(store, partial(cells, *NUMBERS, *OF_RUNS, sample=SAMPLE))
    assert not wrong, (len(wrong), wrong[:3])
    assert refused > 10 * SAMPLE


def test_what_a_row_s_checks_are_made_of_never_changes():
    """Rows keep them over releases; whole numbers of numpy, and floats that are whole, are as Python's."""
    layer = {"run_id": "r1", "layer": 3, "name": "é\ud800", "shape": "[8,16]", "dtype": "bf16", "module_type": "L"}
    assert checks_of(schema.layer, layer).hex() == "64b307c630903d55"
    tag = {"run_id": "r1", "tag": "a", "position": np.int64(2)}
    assert checks_of(schema.run_tag, tag).hex() == "424372f6"
    attempt = {"run_id": "r1", "attempt": 1, "launch_id": "l", "first_step": 1, "created_at": 1700000000}
    assert checks_of(schema.attempt, attempt).hex() == "af90c4da"


def test_a_damaged_row_is_named_and_the_rest_of_the_run_answers(store):
    damage(store, "UPDATE layer_chunk SET data = zeroblob(length(data)) WHERE level = 1 AND chunk = 0")
    told = "run r1: part 0 of chunk 0 at level 1, steps 1 to 4, is damaged in the database, .* or restore a back-up"
    with pytest.raises(Damaged, match=told):
        layer_points(store, "r1", KEYS, ALL)
    assert layer_points(store, "r1", KEYS, Selection(first_step=5)).steps.tolist() == [5, 6, 7]
    assert len(model_points(store, "r1", None, ALL).steps) == 7


def test_a_damaged_report_is_not_sealed(store):
    damage(store, "UPDATE report SET scalars = replace(scalars, '0.1', '0.2') WHERE seq = 6")
    with pytest.raises(Damaged, match="run r1: report 6 of stream s0, step 7, is damaged"):
        seal_all(store, now=AFTER_SILENCE)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("table", [*NUMBERS, *OF_RUNS], ids=lambda table: table.name)
def test_no_flipped_bit_of_a_row_gives_a_wrong_number(store, table):
    wrong, _ = silent(store, partial(cells, table))
    assert not wrong, (len(wrong), wrong[:3])
