"""Newest measured steps of many runs at once, where all of the step is the end of one sealed part.

So it is until the next report, whenever sealing has come up with the journal. `newest` reads those in the journal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, select, tuple_

from collage_server.store import schema
from collage_server.store.chunks.blobs import ALL_RANKS, select_rows
from collage_server.store.chunks.cache import LEVELS
from collage_server.store.chunks.contributors import streams_of_last_point
from collage_server.store.reading.run_view import is_known, read_entries
from collage_server.store.records import FloatArray, NewestReport
from collage_server.store.rows import int_array

__all__ = ["read_newest_sealed"]

_FLOAT: Final = np.dtype("<f8")
_LEVEL: Final = LEVELS[0]
_Place = tuple[str, int]


def read_newest_sealed(
    connection: Connection, wanted: Mapping[_Place, tuple[int, Collection[int]]], layer_keys: Collection[str]
) -> dict[str, NewestReport]:
    """By run the last point of its chunks, if it is the step that is `wanted` and these streams told all of it.

    wanted: (run, attempt) → step, numbers of streams. `layers` has `layer_keys` alone, NaN for others.
    """
    parts = dict(_parts(connection, wanted))
    chunks = {(run_id, attempt): [chunk] for run_id, (attempt, chunk, _) in parts.items()}
    entries = {
        run_id: {key: number for key, number in known.items() if is_known(key)}
        for run_id, known in read_entries(connection, list(parts)).items()
    }
    layers = _layers(connection, chunks, parts, entries, layer_keys)
    found: dict[str, NewestReport] = {}
    for run_id, totals in _model(connection, chunks, parts, entries):
        held = layers.get(run_id, {})
        by_layer = np.full((len(totals), max(map(len, held.values()), default=0)), np.nan)
        for row, key in zip(by_layer, totals, strict=True):
            if key in held:
                row[: len(held[key])] = held[key]
        found[run_id] = NewestReport(tuple(totals), np.array(list(totals.values())), by_layer)
    return found


def _parts(
    connection: Connection, wanted: Mapping[_Place, tuple[int, Collection[int]]]
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """(run, (attempt, chunk, part)) where one part holds all of the step: it then is the part's last."""
    table = schema.point_chunk
    ends = [(*place, step) for place, (step, _) in wanted.items()]
    here = tuple_(table.c.run_id, table.c.attempt, table.c.last_step).in_(ends)
    rows = connection.execute(select(table).where(here, table.c.level == _LEVEL)).all() if ends else []
    by_place: dict[_Place, list[Any]] = defaultdict(list)
    for row in rows:
        by_place[row.run_id, row.attempt].append(row)
    for place, held in by_place.items():
        if len(held) == 1 and streams_of_last_point(held[0]) == set(wanted[place][1]):
            yield place[0], (place[1], held[0].chunk, held[0].part)


def _model(
    connection: Connection,
    chunks: Mapping[_Place, list[int]],
    parts: Mapping[str, tuple[int, int, int]],
    entries: Mapping[str, Mapping[str, int]],
) -> Iterator[tuple[str, dict[str, float]]]:
    names = {run_id: {number: key for key, number in known.items()} for run_id, known in entries.items()}
    condition = "t.part = w.part AND t.rank = :rank"
    columns = ("point_count", "entries", "data")
    spans = {run_id: [(part,)] for run_id, (_, _, part) in parts.items()}
    for rows in select_rows(
        connection, "model_chunk", _LEVEL, chunks, columns, condition, {"rank": ALL_RANKS}, ("part",), spans
    ):
        for run_id, _, _, _, count, held, data in rows:
            pairs = zip(int_array(held).tolist(), _last(data, count).tolist(), strict=True)
            yield run_id, {names[run_id][number]: value for number, value in pairs if number in names[run_id]}


def _layers(
    connection: Connection,
    chunks: Mapping[_Place, list[int]],
    parts: Mapping[str, tuple[int, int, int]],
    entries: Mapping[str, Mapping[str, int]],
    layer_keys: Collection[str],
) -> dict[str, dict[str, FloatArray]]:
    spans: dict[str, list[tuple[int, ...]]] = {}
    names: dict[tuple[str, int], str] = {}
    for run_id, (_, _, part) in parts.items():
        known = {key: entries[run_id][key] for key in layer_keys if key in entries[run_id]}
        spans[run_id] = [(part, number) for number in known.values()]
        names |= {(run_id, number): key for key, number in known.items()}
    found: dict[str, dict[str, FloatArray]] = defaultdict(dict)
    condition = "t.part = w.part AND t.entry = w.entry"
    columns = ("entry", "point_count", "data")
    for rows in select_rows(
        connection, "layer_chunk", _LEVEL, chunks, columns, condition, {}, ("part", "entry"), spans
    ):
        for run_id, _, _, _, entry, count, data in rows:
            found[run_id][names[run_id, entry]] = _last(data, count).copy()
    return found


def _last(data: bytes, count: int) -> FloatArray:
    """Of [rows][points] the last point."""
    return np.frombuffer(data, dtype=_FLOAT).reshape(-1, count)[:, -1]
