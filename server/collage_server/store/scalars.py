"""Logged scalars: sealed parts and journal joined, by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from sqlalchemy import Connection, func, or_, select

from collage_server.store import schema
from collage_server.store.assemble import Places, group_steps, visible
from collage_server.store.contract import FloatArray, ScalarPoints, Selection, StreamRecord
from collage_server.store.journal import read_reports
from collage_server.store.rows import scalars_from_json
from collage_server.store.run_view import RunView

__all__ = ["read_newest_scalars", "read_scalar_points"]

_COLUMNS = ("stream_id", "seq", "step", "time", "scalars")


@dataclass
class _Values:
    """Values of one name on one stream, gathered in the order in which they count: later ones win."""

    stream: StreamRecord
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    parts: list[FloatArray] = field(default_factory=list)

    def table(self) -> FloatArray:
        """[3][values]: steps, times, values, one column a step, the last word on it."""
        tail = np.array([self.steps, self.times, self.values], dtype=np.float64).reshape(3, -1)
        joined = np.concatenate([*self.parts, tail], axis=1)
        if np.all(joined[0][1:] > joined[0][:-1]):
            return joined
        _, last = np.unique(joined[0][::-1], return_index=True)
        return joined[:, joined.shape[1] - 1 - last]


def read_scalar_points(
    connection: Connection, run_id: str, names: Collection[str] | None, selection: Selection
) -> dict[str, ScalarPoints]:
    """Logged values by name: a rank's last word on a step counts, then the mean over the ranks."""
    view = RunView(connection, run_id)
    view.check_rank(selection.rank)
    return _read(connection, view, names, selection, {})


def _read(
    connection: Connection,
    view: RunView,
    names: Collection[str] | None,
    selection: Selection,
    first_parts: Mapping[str, int],
) -> dict[str, ScalarPoints]:
    found: dict[tuple[str, str], _Values] = {}
    _read_sealed(connection, view, names, selection, first_parts, found)
    _read_journal(connection, view, names, selection, found)
    by_name: dict[str, list[_Values]] = defaultdict(list)
    for (name, _), values in found.items():
        by_name[name].append(values)
    merged = {name: _merge(view, members, selection) for name, members in sorted(by_name.items())}
    return {name: points for name, points in merged.items() if len(points.steps)}


def read_newest_scalars(connection: Connection, run_id: str, count: int) -> dict[str, FloatArray]:
    """The last `count` logged values by name, oldest first."""
    view = RunView(connection, run_id)
    alone = len(view.attempts) == len(view.streams) == 1
    parts = _newest_parts(connection, run_id, count) if alone else {}
    points = _read(connection, view, None, Selection(), parts)
    return {name: entry.values[-count:] for name, entry in points.items()}


def _newest_parts(connection: Connection, run_id: str, count: int) -> dict[str, int]:
    """By name, the first part that is needed for its last `count` values; twice as many, as steps may repeat."""
    table = schema.scalar_chunk
    rows = connection.execute(
        select(table.c.name, table.c.part, func.sum(table.c.point_count).label("values"))
        .where(table.c.run_id == run_id)
        .group_by(table.c.name, table.c.part)
        .order_by(table.c.name, table.c.part.desc())
    )
    first: dict[str, int] = {}
    held: dict[str, int] = defaultdict(int)
    for row in rows:
        if held[row.name] < 2 * count:
            first[row.name] = row.part
        held[row.name] += int(row.values)
    return first


def _read_sealed(
    connection: Connection,
    view: RunView,
    names: Collection[str] | None,
    selection: Selection,
    first_parts: Mapping[str, int],
    found: dict[tuple[str, str], _Values],
) -> None:
    table = schema.scalar_chunk
    statement = select(table).where(table.c.run_id == view.run_id)
    if names is not None:
        statement = statement.where(table.c.name.in_(list(names)))
    if first_parts:
        wanted = [(table.c.name == name) & (table.c.part >= part) for name, part in first_parts.items()]
        statement = statement.where(or_(*wanted))
    rows = connection.execute(statement.order_by(table.c.stream_id, table.c.name, table.c.part)).all()
    for (stream_id, name, count), members in groupby(rows, lambda row: (row.stream_id, row.name, row.point_count)):
        stream = view.streams.get(stream_id)
        if stream is not None and selection.rank in (None, stream.rank):
            values = found.setdefault((name, stream_id), _Values(stream))
            values.parts.append(_unpack(b"".join(row.data for row in members), count))


def _unpack(data: bytes, count: int) -> FloatArray:
    """[3][values]: steps, times, values of parts that hold `count` values each."""
    packed = np.frombuffer(data, dtype="<i8").reshape(-1, 3, count)
    steps = packed[:, 0].astype(np.float64).ravel()
    return np.stack([steps, packed[:, 1].ravel().view("<f8"), packed[:, 2].ravel().view("<f8")])


def _read_journal(
    connection: Connection,
    view: RunView,
    names: Collection[str] | None,
    selection: Selection,
    found: dict[tuple[str, str], _Values],
) -> None:
    rows = []
    for slab in read_reports(connection, view.run_id, _COLUMNS, "scalars", selection):
        for row in slab:
            stream = view.streams.get(row.stream_id)
            wanted = stream is not None and selection.rank in (None, stream.rank)
            if wanted and not view.sealed(row.stream_id, row.seq):
                rows.append(row)
    for row in sorted(rows, key=lambda row: row.seq):
        for name, value in scalars_from_json(row.scalars).items():
            if names is None or name in names:
                key = (name, row.stream_id)
                values = found.setdefault(key, _Values(view.streams[row.stream_id]))
                values.steps.append(row.step)
                values.times.append(row.time)
                values.values.append(value)


def _of_one_stream(view: RunView, values: _Values, selection: Selection) -> ScalarPoints:
    """Nothing to merge: only what is hidden or not asked for goes."""
    table = values.table()
    seen = table[0] < view.bound(values.stream.attempt)
    if selection.first_step is not None:
        seen &= table[0] >= selection.first_step
    if selection.last_step is not None:
        seen &= table[0] <= selection.last_step
    return ScalarPoints(table[0][seen].astype(np.int64), table[1][seen], table[2][seen])


def _merge(view: RunView, members: list[_Values], selection: Selection) -> ScalarPoints:
    if len(members) == 1:
        return _of_one_stream(view, members[0], selection)
    tables = [(entry.stream, entry.table()) for entry in members]
    sizes = [table.shape[1] for _, table in tables]
    joined = np.concatenate([table for _, table in tables], axis=1)
    places = Places(
        streams=np.repeat([stream.stream for stream, _ in tables], sizes),
        attempts=np.repeat([stream.attempt for stream, _ in tables], sizes),
        ranks=np.repeat([stream.rank for stream, _ in tables], sizes),
        steps=joined[0].astype(np.int64),
        times=joined[1],
    )
    seen = visible(places, view.bounds)
    if selection.first_step is not None:
        seen &= places.steps >= selection.first_step
    if selection.last_step is not None:
        seen &= places.steps <= selection.last_step
    grouped = group_steps(places[seen])
    with np.errstate(invalid="ignore"):
        sums = np.bincount(grouped.points, weights=joined[2][seen], minlength=len(grouped.steps))
    counts = np.bincount(grouped.points, minlength=len(grouped.steps))
    return ScalarPoints(grouped.steps, grouped.times, sums / np.maximum(counts, 1))
