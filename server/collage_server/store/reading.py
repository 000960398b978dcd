"""Reading a run's points: journal, sealed parts and coarse levels joined. Only asked columns are decoded."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Row

from collage_monitor.statistics.merge import with_variance_product_roots
from collage_server.errors import Unprocessable
from collage_server.store import unsealed
from collage_server.store.chunks import (
    ALL_RANKS,
    LEVELS,
    ChunkInfo,
    PointRows,
    maximum_key,
    minimum_key,
    read_chunk_infos,
    read_layer_data,
    read_model_data,
    read_point_rows,
)
from collage_server.store.contract import FloatArray, IntArray, LatestPoint, Points, Selection
from collage_server.store.contributors import Contributors, rank_contributed, read_contributors
from collage_server.store.latest import newest_measured_step
from collage_server.store.pieces import Piece, join
from collage_server.store.run_view import RunView

__all__ = ["read_latest", "read_layer_points", "read_model_points", "sealed_layers", "sealed_model"]

Rows = Mapping[int, Sequence[Row[Any]]]
_COARSE_FROM: Final = {16: 8, 256: 128}
"""A level is used when more than so many measured points fall on one wanted: at least half of them are left."""


@dataclass(frozen=True)
class _Plan:
    """Which chunks are read at which level, by attempt, and who stands in those with late reports."""

    chunks: dict[tuple[int, int], list[int]]
    known: dict[int, Contributors]


def read_model_points(
    connection: Connection, run_id: str, wanted: Collection[str] | None, selection: Selection
) -> Points:
    """The whole model's totals, from model vectors alone where replicas allow it."""
    view = RunView(connection, run_id)
    view.check_rank(selection.rank)
    infos = read_chunk_infos(connection, run_id)
    rows = _without_frozen(unsealed.journal_rows(connection, view, selection, layers=view.mixed), infos)
    plan = _plan(view, rows, selection, infos)
    pieces = [
        sealed_model(view, attempt, level, chunks, wanted, selection)
        for (attempt, level), chunks in plan.chunks.items()
    ]
    keys = view.statistics(wanted)
    positions = np.array(list(view.layers.values()) if view.mixed else [], dtype=np.int64)
    for attempt, members in rows.items():
        known = plan.known.get(attempt, {})
        if view.mixed:
            piece = unsealed.model_of(unsealed.layer_piece(view, attempt, members, keys, positions, known))
        else:
            piece = unsealed.model_piece(view, attempt, members, keys, known)
        pieces.append(piece)
    return join(pieces, view.bound, selection, view.world_size)


def read_layer_points(
    connection: Connection,
    run_id: str,
    wanted: Collection[str],
    selection: Selection,
    layers: Sequence[str] | None = None,
) -> Points:
    """Totals by layer: of each block only the asked statistics and layers are kept."""
    view = RunView(connection, run_id)
    view.check_rank(selection.rank)
    chosen = view.chosen_layers(layers)
    positions = np.array(list(chosen.values()), dtype=np.int64)
    infos = read_chunk_infos(connection, run_id)
    rows = _without_frozen(unsealed.journal_rows(connection, view, selection, layers=True), infos)
    if selection.rank is not None and any(view.ranks(info.attempt) != {selection.rank} for info in infos):
        raise Unprocessable(
            "layers of a single rank are kept until they are sealed only; leave rank out, or leave layer out",
            field="rank",
        )
    plan = _plan(view, rows, selection, infos)
    pieces = [
        sealed_layers(view, attempt, level, chunks, wanted, positions, selection.extremes_of)
        for (attempt, level), chunks in plan.chunks.items()
    ]
    keys = view.statistics(wanted)
    for attempt, members in rows.items():
        known = plan.known.get(attempt, {})
        pieces.append(unsealed.layer_piece(view, attempt, members, keys, positions, known))
    return join(pieces, view.bound, selection, view.world_size, list(chosen))


def _plan(view: RunView, rows: Rows, selection: Selection, infos: Sequence[ChunkInfo]) -> _Plan:
    late = {(attempt, chunk) for attempt in rows for chunk in _late_chunks(attempt, rows[attempt], infos)}
    inside = [info for info in infos if _overlaps(view, info, selection)]
    level = _level(view, inside, rows, selection)
    chunks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for info in inside:
        fine = not _contained(view, info, selection) or (info.attempt, info.chunk) in late
        chunks[info.attempt, _held_level(info, 1 if fine else level)].append(info.chunk)
    known: dict[int, Contributors] = {}
    for attempt in {attempt for attempt, _ in late}:
        members = [chunk for owner, chunk in late if owner == attempt]
        known[attempt] = read_contributors(view.connection, view.run_id, attempt, members)
    return _Plan(chunks, known)


def _held_level(info: ChunkInfo, wanted: int) -> int:
    """The coarsest level that the chunk has up to the one wanted; a frozen chunk may only have coarser ones."""
    return max((level for level in info.levels if level <= wanted), default=min(info.levels))


def _without_frozen(rows: Rows, infos: Sequence[ChunkInfo]) -> Rows:
    """Without reports that came too late: their steps are frozen into coarse points."""
    frozen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for info in infos:
        if info.frozen:
            frozen[info.attempt].append((info.first_step, info.last_step))
    return {
        attempt: [row for row in members if not any(a <= row.step <= b for a, b in frozen[attempt])]
        for attempt, members in rows.items()
    }


def _late_chunks(attempt: int, rows: Sequence[Row[Any]], infos: Sequence[ChunkInfo]) -> set[int]:
    """Chunks in whose steps some reports are not sealed yet."""
    own = [info for info in infos if info.attempt == attempt]
    ends = [info.last_step for info in own]
    found = set()
    for step in {row.step for row in rows}:
        index = bisect_left(ends, step)
        if index < len(own) and own[index].first_step <= step:
            found.add(own[index].chunk)
    return found


def _overlaps(view: RunView, info: ChunkInfo, selection: Selection) -> bool:
    first, last = selection.first_step or 0, selection.last_step
    return (
        info.last_step >= first
        and info.first_step < view.bound(info.attempt)
        and (last is None or info.first_step <= last)
    )


def _contained(view: RunView, info: ChunkInfo, selection: Selection) -> bool:
    first, last = selection.first_step or 0, selection.last_step
    return (
        info.first_step >= first
        and info.last_step < view.bound(info.attempt)
        and (last is None or info.last_step <= last)
    )


def _level(view: RunView, infos: Iterable[ChunkInfo], rows: Rows, selection: Selection) -> int:
    """The coarsest level that still leaves at least half of the points wanted."""
    several = selection.rank is not None and any(view.ranks(info.attempt) != {selection.rank} for info in infos)
    metric = selection.extremes_of
    lacking = metric is not None and minimum_key(metric) not in view.entries
    if selection.points is None or several or lacking:
        return 1
    measured = sum(info.count for info in infos)
    measured += sum(len({row.step for row in members}) for members in rows.values())
    bucket = -(-measured // selection.points)
    return max((level for level in LEVELS if level == 1 or bucket > _COARSE_FROM[level]), default=1)


def _entries(view: RunView, wanted: Collection[str] | None, metric: str | None, level: int) -> dict[str, int]:
    """Entries to read: the wanted statistics, and at coarse levels the extremes of the metric."""
    extremes = {key for key in view.entries if key.startswith((minimum_key(""), maximum_key("")))}
    keys = {key: entry for key, entry in view.entries.items() if key not in extremes}
    if wanted is not None:
        keys = {key: entry for key, entry in keys.items() if key in wanted}
    if level > 1 and metric is not None:
        both = (minimum_key(metric), maximum_key(metric))
        keys.update({key: view.entries[key] for key in both if key in view.entries})
    return keys


def sealed_model(
    view: RunView,
    attempt: int,
    level: int,
    chunks: Sequence[int],
    wanted: Collection[str] | None,
    selection: Selection,
) -> Piece:
    """Sealed points of the model at a level; with `selection.rank` those of one rank."""
    several = selection.rank is not None and view.ranks(attempt) != {selection.rank}
    rank = selection.rank if several and selection.rank is not None else ALL_RANKS
    points = read_point_rows(view.connection, view.run_id, attempt, level, chunks)
    keys = _entries(view, wanted, selection.extremes_of, level)
    values = read_model_data(view.connection, view.run_id, attempt, level, points, keys, rank)
    if several:
        return _of_one_rank(view, attempt, points, chunks, values, keys, rank)
    return _piece(attempt, level, points, values)


def _of_one_rank(
    view: RunView,
    attempt: int,
    points: PointRows,
    chunks: Sequence[int],
    values: dict[str, FloatArray],
    keys: Mapping[str, int],
    rank: int,
) -> Piece:
    """Only the points to which the rank contributed; where it was the only one, the merged totals are its own."""
    merged = read_model_data(view.connection, view.run_id, attempt, 1, points, keys)
    there = np.zeros(len(points.steps), dtype=bool)
    contributed = rank_contributed(view.connection, view.run_id, attempt, chunks, rank)
    for part, (present, alone) in contributed.items():
        place = points.where[part]
        there[place] = present
        if alone and not view.replicated:
            for key, array in values.items():
                array[place] = merged[key][place]
    chosen = _piece(attempt, 1, points, values)
    fields = {name: getattr(chosen, name)[there] for name in ("first_steps", "steps", "times", "counts")}
    totals = {key: array[there] for key, array in chosen.totals.items()}
    return replace(chosen, **fields, ranks=np.ones(int(there.sum()), dtype=np.int64), totals=totals)


def sealed_layers(
    view: RunView,
    attempt: int,
    level: int,
    chunks: Sequence[int],
    wanted: Collection[str],
    positions: IntArray,
    metric: str | None = None,
) -> Piece:
    """Sealed points by layer at a level."""
    points = read_point_rows(view.connection, view.run_id, attempt, level, chunks)
    keys = _entries(view, wanted, metric, level)
    values = read_layer_data(view.connection, view.run_id, attempt, level, points, keys, positions)
    return _piece(attempt, level, points, values)


def _piece(attempt: int, level: int, points: PointRows, values: dict[str, FloatArray]) -> Piece:
    low, high = minimum_key(""), maximum_key("")
    extremes = {
        key.removeprefix(low): (values[key], values[maximum_key(key.removeprefix(low))])
        for key in values
        if key.startswith(low)
    }
    totals = {key: array for key, array in values.items() if not key.startswith((low, high))}
    return Piece(
        attempt=attempt,
        first_steps=points.first_steps,
        steps=points.steps,
        times=points.times,
        ranks=points.ranks,
        counts=points.counts,
        totals=with_variance_product_roots(totals) if level == 1 else totals,
        extremes=extremes,
    )


def read_latest(connection: Connection, run_id: str, stale_after_seconds: float) -> LatestPoint | None:
    """The newest measured step that every live rank has reached, with the model's totals."""
    view = RunView(connection, run_id)
    step = newest_measured_step(connection, run_id, view.bounds, stale_after_seconds)
    if step is None:
        steps = read_model_points(connection, run_id, ("measured_steps",), Selection()).steps
        if not len(steps):
            return None
        step = int(steps[-1])
    points = read_model_points(connection, run_id, None, Selection(first_step=step, last_step=step))
    if not len(points.steps):
        return None
    return LatestPoint(step, float(points.times[0]), {key: values[0] for key, values in points.totals.items()})
