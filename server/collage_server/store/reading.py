"""Reading a run's points: journal rows decoded into arrays, ranks merged. Only asked columns are decoded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, select

from collage_monitor.statistics import reduce_shards
from collage_server.errors import NotFound
from collage_server.store import schema
from collage_server.store.assemble import Places, group_steps, merge_rows, visible
from collage_server.store.contract import (
    FloatArray,
    IntArray,
    LatestPoint,
    Points,
    ScalarPoints,
    Selection,
    StreamRecord,
)
from collage_server.store.journal import read_reports
from collage_server.store.latest import hidden_from, pointed_rows
from collage_server.store.rows import scalars_from_json
from collage_server.store.streams import read_stream_records

__all__ = ["read_latest", "read_layer_points", "read_model_points", "read_scalar_points"]

_PLACE = ("stream_id", "step", "time")


class _Run:
    """What reading has to know of a run: its streams, what hides what, its layers."""

    def __init__(self, connection: Connection, run_id: str, rank: int | None = None) -> None:
        records = read_stream_records(connection, run_id)
        self.run_id = run_id
        self.streams = {record.stream_id: record for record in records if rank is None or record.rank == rank}
        if rank is not None and records and not self.streams:
            ranks = sorted({record.rank for record in records})
            raise NotFound(
                f"run {run_id!r} has no rank {rank}; its ranks are {ranks[0]} to {ranks[-1]}", field="rank"
            )
        attempt = schema.attempt
        rows = connection.execute(
            select(attempt.c.attempt, attempt.c.first_step).where(attempt.c.run_id == run_id)
        ).all()
        self.bounds = hidden_from([(row.attempt, row.first_step) for row in rows])
        newest = max((record.attempt for record in records), default=0)
        self.world_size = max((record.world_size for record in records if record.attempt == newest), default=1)

    def keys(self, wanted: Collection[str] | None) -> list[str]:
        """Statistics that some stream declares, in the order declared, only those wanted."""
        declared = dict.fromkeys(key for stream in self.streams.values() for key in stream.statistics)
        return [key for key in declared if wanted is None or key in wanted]

    def replicated(self) -> bool:
        """Whether some tensor stands on several ranks as replicas."""
        return any(stream.replicas.any() for stream in self.streams.values())

    def mixed(self) -> bool:
        """Whether some rank holds replicas beside shards of its own: its model vector then cannot be split."""
        return any(len(np.unique(stream.replicas)) > 1 for stream in self.streams.values())


def read_model_points(
    connection: Connection, run_id: str, wanted: Collection[str] | None, selection: Selection
) -> Points:
    """The whole model's totals, from the model vectors alone where replicas allow it."""
    run = _Run(connection, run_id, selection.rank)
    keys = run.keys(wanted)
    if run.mixed():
        points = read_layer_points(connection, run_id, keys, selection)
        return replace(points, totals=reduce_shards(points.totals, axis=1), layers=[])
    columns = (*_PLACE, "statistic_count", "model")
    rows = [row for slab in read_reports(connection, run_id, columns, "model", selection) for row in slab]
    rows = [row for row in rows if row.stream_id in run.streams]
    return _merge_model(run, rows, keys)


def _merge_model(run: _Run, rows: Sequence[Row[Any]], keys: Sequence[str]) -> Points:
    places = _places(run, rows)
    seen = visible(places, run.bounds)
    rows, places = [row for row, kept in zip(rows, seen, strict=True) if kept], places[seen]
    values = np.full((len(keys), len(rows)), np.nan)
    for (stream_id, count), members in _alike(rows, "statistic_count"):
        stream = run.streams[stream_id]
        block = np.frombuffer(b"".join(rows[i].model for i in members), dtype="<f8").reshape(len(members), count)
        for target, source in _columns(keys, stream.statistics[:count]):
            values[target, members] = block[:, source]
    grouped = group_steps(places)
    replicas = None
    if run.replicated():
        replicas = np.array([_uniform(run.streams[row.stream_id]) for row in rows], dtype=np.float64)
    totals = merge_rows(grouped, dict(zip(keys, values, strict=True)), replicas)
    return Points(
        steps=grouped.steps,
        times=grouped.times,
        ranks=grouped.ranks,
        world_size=run.world_size,
        totals=totals,
    )


def _uniform(stream: StreamRecord) -> int:
    return int(stream.replicas[0]) if len(stream.replicas) else 0


def _places(run: _Run, rows: Iterable[Row[Any]]) -> Places:
    return Places.of([(run.streams[row.stream_id], row.step, row.time) for row in rows])


def _alike(rows: Sequence[Row[Any]], *shape: str) -> list[tuple[tuple[Any, ...], IntArray]]:
    """Indices of rows that can be decoded together: same stream, same counts."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[(row.stream_id, *(getattr(row, name) for name in shape))].append(index)
    return [(key, np.array(members, dtype=np.int64)) for key, members in groups.items()]


def _columns(keys: Sequence[str], declared: Sequence[str]) -> list[tuple[int, int]]:
    sources = {key: index for index, key in enumerate(declared)}
    return [(target, sources[key]) for target, key in enumerate(keys) if key in sources]


def read_layer_points(
    connection: Connection,
    run_id: str,
    wanted: Collection[str],
    selection: Selection,
    layers: Sequence[str] | None = None,
) -> Points:
    """Totals by layer: of each block only the asked statistics and layers are kept."""
    run = _Run(connection, run_id, selection.rank)
    names, positions = _chosen_layers(connection, run_id, layers)
    keys = run.keys(wanted)
    columns = (*_PLACE, "statistic_count", "layer_count", "statistics")
    places: list[Places] = []
    blocks: list[FloatArray] = []
    owners: list[str] = []
    for slab in read_reports(connection, run_id, columns, "statistics", selection):
        rows = [row for row in slab if row.stream_id in run.streams]
        places.append(_places(run, rows))
        blocks.append(_decode_layers(run, rows, keys, positions))
        owners += [row.stream_id for row in rows]
    return _merge_layers(run, places, blocks, owners, keys, names, positions)


def _merge_layers(
    run: _Run,
    places: Sequence[Places],
    blocks: Sequence[FloatArray],
    owners: Sequence[str],
    keys: Sequence[str],
    names: list[str],
    positions: IntArray,
) -> Points:
    joined = Places(
        *(
            np.concatenate([getattr(part, name) for part in places] or [np.zeros(0, dtype=kind)])
            for name, kind in (
                ("streams", np.int64),
                ("attempts", np.int64),
                ("ranks", np.int64),
                ("steps", np.int64),
                ("times", np.float64),
            )
        )
    )
    block = np.concatenate([*blocks, np.zeros((len(keys), 0, len(names)))], axis=1)
    chosen = np.flatnonzero(visible(joined, run.bounds))
    grouped = group_steps(joined[chosen])
    replicas = None
    if run.replicated():
        by_stream = {stream_id: _replicas(stream, positions) for stream_id, stream in run.streams.items()}
        replicas = (
            np.stack([by_stream[owners[int(i)]] for i in chosen]) if len(chosen) else np.zeros((0, len(names)))
        )
    totals = merge_rows(grouped, dict(zip(keys, block[:, chosen], strict=True)), replicas)
    return Points(
        steps=grouped.steps,
        times=grouped.times,
        ranks=grouped.ranks,
        world_size=run.world_size,
        totals=totals,
        layers=names,
    )


def _replicas(stream: StreamRecord, positions: IntArray) -> FloatArray:
    placed = np.full(max(int(stream.layers.max(initial=-1)), int(positions.max(initial=-1))) + 1, np.nan)
    placed[stream.layers] = stream.replicas
    return placed[positions]


def _decode_layers(run: _Run, rows: Sequence[Row[Any]], keys: Sequence[str], positions: IntArray) -> FloatArray:
    """Values [keys, rows, layers] of the asked statistics and layers."""
    values = np.full((len(keys), len(rows), len(positions)), np.nan)
    target_of = {int(position): target for target, position in enumerate(positions)}
    for (stream_id, statistic_count, layer_count), members in _alike(rows, "statistic_count", "layer_count"):
        stream = run.streams[stream_id]
        data = b"".join(rows[i].statistics for i in members)
        block = np.frombuffer(data, dtype="<f8").reshape(len(members), statistic_count, layer_count)
        held = [(target_of[int(p)], i) for i, p in enumerate(stream.layers[:layer_count]) if int(p) in target_of]
        targets = np.array([target for target, _ in held], dtype=np.int64)
        sources = np.array([source for _, source in held], dtype=np.int64)
        for target, source in _columns(keys, stream.statistics[:statistic_count]):
            values[target, members[:, None], targets[None, :]] = block[:, source][:, sources]
    return values


def _chosen_layers(connection: Connection, run_id: str, layers: Sequence[str] | None) -> tuple[list[str], IntArray]:
    table = schema.layer
    rows = connection.execute(
        select(table.c.name, table.c.layer).where(table.c.run_id == run_id).order_by(table.c.layer)
    ).all()
    known = {row.name: row.layer for row in rows}
    names = list(known) if layers is None else list(layers)
    for name in names:
        if name not in known:
            raise NotFound(
                f"run {run_id!r} has no layer {name!r}; GET /api/v1/runs/{run_id}/layers lists them", field="layer"
            )
    return names, np.array([known[name] for name in names], dtype=np.int64)


def read_scalar_points(
    connection: Connection, run_id: str, names: Collection[str] | None, selection: Selection
) -> dict[str, ScalarPoints]:
    """Logged values by name: a rank's last word on a step counts, then the mean over the ranks."""
    run = _Run(connection, run_id, selection.rank)
    found: dict[str, list[tuple[Row[Any], float]]] = defaultdict(list)
    columns = (*_PLACE, "seq", "scalars")
    for slab in read_reports(connection, run_id, columns, "scalars", selection):
        for row in slab:
            if row.stream_id not in run.streams:
                continue
            for name, value in scalars_from_json(row.scalars).items():
                if names is None or name in names:
                    found[name].append((row, value))
    return {name: _merge_scalars(run, entries) for name, entries in sorted(found.items())}


def _merge_scalars(run: _Run, entries: list[tuple[Row[Any], float]]) -> ScalarPoints:
    entries = sorted(entries, key=lambda entry: entry[0].seq)
    last = {(row.stream_id, row.step): (row, value) for row, value in entries}
    rows = [row for row, _ in last.values()]
    values = np.array([value for _, value in last.values()], dtype=np.float64)
    places = _places(run, rows)
    seen = visible(places, run.bounds)
    grouped = group_steps(places[seen])
    with np.errstate(invalid="ignore"):
        sums = np.bincount(grouped.points, weights=values[seen], minlength=len(grouped.steps))
    counts = np.bincount(grouped.points, minlength=len(grouped.steps))
    return ScalarPoints(grouped.steps, grouped.times, sums / np.maximum(counts, 1))


def read_latest(connection: Connection, run_id: str, stale_after_seconds: float) -> LatestPoint | None:
    """The newest measured step: from the rows that `run_latest` points at, else from all visible points."""
    run = _Run(connection, run_id)
    rows = pointed_rows(connection, run_id, run.bounds, stale_after_seconds)
    step = rows[0].step if rows else None
    if step is None:
        steps = read_model_points(connection, run_id, ("measured_steps",), Selection()).steps
        if not len(steps):
            return None
        step = int(steps[-1])
    return _point_at(connection, run, step, rows)


def _point_at(connection: Connection, run: _Run, step: int, rows: Sequence[Row[Any]]) -> LatestPoint:
    selection = Selection(first_step=step, last_step=step)
    keys = run.keys(None)
    names, positions = _chosen_layers(connection, run.run_id, None)
    if not rows:
        model = read_model_points(connection, run.run_id, keys, selection)
        layers = read_layer_points(connection, run.run_id, keys, selection)
    else:
        with_layers = [row for row in rows if row.statistics is not None]
        layers = _merge_layers(
            run,
            [_places(run, with_layers)],
            [_decode_layers(run, with_layers, keys, positions)],
            [row.stream_id for row in with_layers],
            keys,
            names,
            positions,
        )
        model = _merge_model(run, rows, keys)
        if run.mixed():
            model = replace(layers, totals=reduce_shards(layers.totals, axis=1), layers=[])
    return LatestPoint(
        step=step,
        time=float(model.times[0]),
        model={key: values[0] for key, values in model.totals.items()},
        layer_totals={key: values[0] for key, values in layers.totals.items() if len(values)},
        layers=names,
    )
