"""Newest measured steps of many runs at once, where each rank has told its part in one report of the journal.

So it is for most running runs, and takes four statements for all of them; four more find those whose newest step
ends a sealed part. What has to be put together otherwise (parts of a report, two processes of a rank, a step that
is hidden) is left to `read_latest`, which takes about twenty statements a run: with it alone `/metrics` costs 12
times the CPU for 1,000 runs of 4 ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, func, select, tuple_

from collage_server.store import schema
from collage_server.store.chunks.blobs import ALL_RANKS, select_rows, unpack_totals
from collage_server.store.chunks.contributors import streams_of_last_point
from collage_server.store.chunks.index import LEVELS
from collage_server.store.reading.assemble import RowsByStep, merge_rows
from collage_server.store.reading.run_view import is_known, read_entries
from collage_server.store.records import FloatArray, NewestReport
from collage_server.store.rows import from_json, int_array
from collage_server.store.runs.latest import first_hidden_steps

__all__ = ["read_newest_reports", "sealed_steps"]

_FLOAT: Final = np.dtype("<f8")
_LEVEL: Final = LEVELS[0]
_Place = tuple[str, int]
_NEIGHBOURS: Final = 64
"""Among so many reports before a rank's newest measured one, and all after it, that of a step is looked for."""
_STREAMS_AT_ONCE: Final = 512
"""Of so many streams reports are in memory at a time, unless one run has more."""


@dataclass(frozen=True, eq=False)
class _Shard:
    """One rank's report: `layers` [statistic][layer], NaN where the rank does not hold a layer of the run."""

    replica: float
    model: FloatArray
    layers: FloatArray


def read_newest_reports(
    connection: Connection, run_ids: Sequence[str], layer_keys: Collection[str], stale_after_seconds: float
) -> dict[str, NewestReport]:
    """By run, as far as one report a rank tells all, or one sealed part; a run that was deleted is not in it.

    layer_keys: the statistics that are needed by layer.
    """
    measured: dict[str, list[Any]] = defaultdict(list)
    for row in _measured_streams(connection, run_ids):
        measured[row.run_id].append(row)
    hidden, sealed = _bounds(connection, run_ids), sealed_steps(connection, run_ids)
    told: dict[str, dict[str, Any]] = {}
    ended: dict[tuple[str, int], tuple[int, list[int]]] = {}
    for run_id, rows in measured.items():
        place = (run_id, max(row.attempt for row in rows))
        rows = [row for row in rows if row.attempt == place[1]]
        step = min(row.measured_step for row in rows)
        if _step_together(rows, stale_after_seconds) and sealed.get(place, -1) < step < hidden[place]:
            told[run_id] = {row.stream_id: row for row in rows}
        elif sealed.get(place) == step < hidden[place] and all(row.measured_step == step for row in rows):
            ended[place] = (step, [row.stream for row in rows])
    found = _read_newest_sealed(connection, ended, layer_keys)
    for some in _slices(told):
        found |= _merged(_shards(connection, {run_id: told[run_id] for run_id in some}))
    return found


def _step_together(rows: Sequence[Any], stale_after_seconds: float) -> bool:
    """Whether the newest step of all ranks is the oldest of theirs: none is waited for in vain (`awaited_streams`).

    Nor may a rank have two processes, or replicas beside shards of its own.
    """
    freshest, ahead = max(row.last_report_at for row in rows), max(row.measured_step for row in rows)
    return len({row.rank for row in rows}) == len(rows) and all(
        row.last_report_at >= freshest - stale_after_seconds
        and (row.measured_step == ahead or row.last_step - row.measured_step < _NEIGHBOURS)
        and len(set(int_array(row.replicas).tolist())) <= 1
        for row in rows
    )


def _slices(told: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    some: list[str] = []
    streams = 0
    for run_id, rows in told.items():
        if some and streams + len(rows) > _STREAMS_AT_ONCE:
            yield some
            some, streams = [], 0
        some.append(run_id)
        streams += len(rows)
    if some:
        yield some


def _shards(
    connection: Connection, told: dict[str, dict[str, Any]]
) -> dict[tuple[tuple[str, ...], int], dict[str, list[_Shard]]]:
    """By (statistics, layers) and run the reports of its newest step, where each rank has told its part in one."""
    reports: dict[str, list[Any]] = defaultdict(list)
    for report in _reports(connection, list(told)):
        if report.stream_id in told[report.run_id]:
            reports[report.run_id].append(report)
    groups: dict[tuple[tuple[str, ...], int], dict[str, list[_Shard]]] = defaultdict(dict)
    for run_id, found in reports.items():
        rows = told[run_id]
        whole = len(found) == len(rows) == len({report.stream_id for report in found})
        names = {_names(rows[report.stream_id].statistics)[: report.statistic_count] for report in found}
        if whole and len(names) == 1 and all(report.parts == 1 for report in found):
            found.sort(key=lambda report: rows[report.stream_id].stream)
            width = 1 + max(int(int_array(row.layers).max(initial=-1)) for row in rows.values())
            shards = [_decoded(rows[report.stream_id], report, width) for report in found]
            groups[names.pop(), width][run_id] = shards
    return groups


def _merged(groups: dict[tuple[tuple[str, ...], int], dict[str, list[_Shard]]]) -> dict[str, NewestReport]:
    """Shards of each run merged as its points are, without what only a newer server knows."""
    merged: dict[str, NewestReport] = {}
    for (names, _), runs in groups.items():
        known = [i for i, name in enumerate(names) if is_known(name)]
        if len(known) < len(names):
            names = tuple(names[i] for i in known)
            runs = {run_id: [_part(shard, known) for shard in shards] for run_id, shards in runs.items()}
        alone = {run_id: shards[0] for run_id, shards in runs.items() if len(shards) == 1}
        merged |= {run_id: NewestReport(names, shard.model, shard.layers) for run_id, shard in alone.items()}
        several = {run_id: shards for run_id, shards in runs.items() if len(shards) > 1}
        if several:
            merged |= _merged_ranks(names, several)
    return merged


def _part(shard: _Shard, rows: list[int]) -> _Shard:
    return _Shard(shard.replica, shard.model[rows], shard.layers[rows])


def _merged_ranks(names: tuple[str, ...], runs: dict[str, list[_Shard]]) -> dict[str, NewestReport]:
    rows = [(point, slot, shard) for point, shards in enumerate(runs.values()) for slot, shard in enumerate(shards)]
    points, slots = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(2))
    counts = np.bincount(points)
    grouped = RowsByStep(np.arange(len(runs)), np.zeros(len(runs)), counts, points, slots)
    model = np.stack([shard.model for *_, shard in rows], axis=1)
    layers = np.stack([shard.layers for *_, shard in rows], axis=1)
    replicas = np.array([shard.replica for *_, shard in rows])
    by_layer = np.repeat(replicas[:, None], layers.shape[2], axis=1)
    whole = merge_rows(grouped, dict(zip(names, model, strict=True)), replicas)
    parts = merge_rows(grouped, dict(zip(names, layers, strict=True)), by_layer)
    keys = tuple(whole)
    of_model = np.stack([whole[key] for key in keys], axis=1)
    of_layers = np.stack([parts[key] for key in keys], axis=1)
    return {run_id: NewestReport(keys, of_model[i], of_layers[i]) for i, run_id in enumerate(runs)}


def _measured_streams(connection: Connection, run_ids: Sequence[str]) -> Sequence[Any]:
    run, stream, latest = schema.run, schema.stream, schema.run_latest
    there = latest.join(run, run.c.run_id == latest.c.run_id).join(
        stream, (stream.c.run_id == latest.c.run_id) & (stream.c.stream_id == latest.c.stream_id)
    )
    columns = (latest.c[name] for name in ("run_id", "stream_id", "attempt", "measured_step", "last_step"))
    declared = (stream.c[name] for name in ("stream", "rank", "statistics", "layers", "replicas"))
    statement = select(*columns, latest.c.last_report_at, *declared).select_from(there)
    wanted = (latest.c.run_id.in_(run_ids), latest.c.measured_step.is_not(None))
    return connection.execute(statement.where(*wanted)).all()


def _bounds(connection: Connection, run_ids: Sequence[str]) -> dict[tuple[str, int], int]:
    """(run, attempt) → the step from which newer attempts hide it."""
    table = schema.attempt
    attempts: dict[str, list[tuple[int, int | None]]] = defaultdict(list)
    columns = (table.c.run_id, table.c.attempt, schema.measured_attempt.c.measured_from)
    statement = select(*columns).select_from(schema.attempts).where(table.c.run_id.in_(run_ids))
    for run_id, attempt, measured_from in connection.execute(statement).all():
        attempts[run_id].append((attempt, measured_from))
    return {
        (run_id, attempt): bound
        for run_id, known in attempts.items()
        for attempt, bound in first_hidden_steps(known).items()
    }


def sealed_steps(connection: Connection, run_ids: Collection[str]) -> dict[tuple[str, int], int]:
    """(run, attempt) → the last step that is sealed."""
    table = schema.point_chunk
    statement = select(table.c.run_id, table.c.attempt, func.max(table.c.last_step))
    statement = statement.where(table.c.run_id.in_(run_ids), table.c.level == 1)
    rows = connection.execute(statement.group_by(table.c.run_id, table.c.attempt)).all()
    return {(run_id, attempt): step for run_id, attempt, step in rows}


def _reports(connection: Connection, run_ids: Sequence[str]) -> Sequence[Any]:
    """Of each attempt's streams, at the newest step that all of them have measured."""
    report, latest = schema.report, schema.run_latest
    mine = (latest.c.run_id.in_(run_ids), latest.c.measured_step.is_not(None))
    step = func.min(latest.c.measured_step).label("step")
    common = (
        select(latest.c.run_id, latest.c.attempt, step).where(*mine).group_by(latest.c.run_id, latest.c.attempt)
    )
    at = common.subquery()
    one = (latest.c.run_id == at.c.run_id) & (latest.c.attempt == at.c.attempt)
    same = (report.c.run_id == latest.c.run_id) & (report.c.stream_id == latest.c.stream_id)
    near = report.c.seq >= latest.c.measured_seq - _NEIGHBOURS
    names = ("run_id", "stream_id", "parts", "statistic_count", "layer_count", "model", "statistics")
    there = latest.join(at, one).join(report, same & near)
    statement = select(*(report.c[name] for name in names)).select_from(there)
    return connection.execute(statement.where(report.c.step == at.c.step, report.c.model.is_not(None))).all()


@lru_cache(maxsize=1024)
def _names(text: str) -> tuple[str, ...]:
    return tuple(from_json(text))


def _decoded(row: Any, report: Any, width: int) -> _Shard:
    layers = np.full((report.statistic_count, width), np.nan)
    if report.statistics:
        held = int_array(row.layers)[: report.layer_count]
        layers[:, held] = np.frombuffer(report.statistics, dtype="<f8").reshape(report.statistic_count, -1)
    replicas = int_array(row.replicas)
    return _Shard(float(replicas[0]) if len(replicas) else 0.0, np.frombuffer(report.model, dtype="<f8"), layers)


def _read_newest_sealed(
    connection: Connection, wanted: Mapping[_Place, tuple[int, Collection[int]]], layer_keys: Collection[str]
) -> dict[str, NewestReport]:
    """By run the last point of its chunks, if it is the step that is `wanted` and these streams told all of it.

    wanted: (run, attempt) → step, numbers of streams. `layers` has `layer_keys` alone, NaN for others.
    """
    parts = dict(_sealed_parts(connection, wanted))
    chunks = {(run_id, attempt): [chunk] for run_id, (attempt, chunk, _) in parts.items()}
    entries = {
        run_id: {key: number for key, number in known.items() if is_known(key)}
        for run_id, known in read_entries(connection, list(parts)).items()
    }
    layers = _sealed_layers(connection, chunks, parts, entries, layer_keys)
    found: dict[str, NewestReport] = {}
    for run_id, totals in _sealed_model(connection, chunks, parts, entries):
        held = layers.get(run_id, {})
        by_layer = np.full((len(totals), max(map(len, held.values()), default=0)), np.nan)
        for row, key in zip(by_layer, totals, strict=True):
            if key in held:
                row[: len(held[key])] = held[key]
        found[run_id] = NewestReport(tuple(totals), np.array(list(totals.values())), by_layer)
    return found


def _sealed_parts(
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


def _sealed_model(
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
            numbers = int_array(held).tolist()
            pairs = zip(numbers, unpack_totals(data, len(numbers), count)[:, -1].tolist(), strict=True)
            yield run_id, {names[run_id][number]: value for number, value in pairs if number in names[run_id]}


def _sealed_layers(
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
            found[run_id][names[run_id, entry]] = _last_point(data, count).copy()
    return found


def _last_point(data: bytes, count: int) -> FloatArray:
    """Of [rows][points] the last point."""
    return np.frombuffer(data, dtype=_FLOAT).reshape(-1, count)[:, -1]
