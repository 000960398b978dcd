"""Sealing: journal rows become chunks, in transactions so short that the writer hardly waits.

A read transaction builds the part; short write transactions store its blobs; the last one publishes blobs and
sealed ranges, a small part's only one does both; short ones delete the journal rows. If sealing is interrupted,
either unpublished blobs are left, which the next sealing overwrites, or sealed journal rows, which readers skip and
the next sealing deletes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

import numpy as np
from sqlalchemy import (
    Connection,
    Delete,
    Row,
    Select,
    Table,
    Update,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from collage_server.errors import Busy, Gone
from collage_server.memory_budget import hold, released_afterwards
from collage_server.store import schema
from collage_server.store.archive.archive_reader import ArchiveReader
from collage_server.store.chunks.blobs import ALL_RANKS, LEVELS, pack_points, pack_totals
from collage_server.store.chunks.contributors import pack_contributors, read_contributors
from collage_server.store.chunks.point_merging import AttemptPoints, model_of
from collage_server.store.reading import unsealed
from collage_server.store.reading.logged_scalars import pack_scalars
from collage_server.store.reading.run_view import RunView
from collage_server.store.records import FloatArray, IntArray
from collage_server.store.row_checks import (
    LAYER_PLACE,
    LOGGED_PARTS,
    MODEL_PARTS,
    chunk_check,
    layer_checks,
    point_checks,
    whole_rows,
)
from collage_server.store.row_crc import checks_of
from collage_server.store.row_helpers import add_numbers, int_bytes, ranges_from_json, ranges_to_json
from collage_server.store.sealing.chunk_levels import ChunkLevel, chunk_of, chunk_place, coarse_levels, reported
from collage_server.store.sealing.replica_comparison import ReplicaComparison, keep_mismatches
from collage_server.store.sealing.seal_plan import (
    JournalContents,
    SealLimits,
    SealPlan,
    numbers_between,
    of_stream,
    plan_seal,
    read_journal,
    read_planned,
)

__all__ = ["seal"]

Transaction = Callable[[], AbstractContextManager[Connection]]
_BlobRow = tuple[Any, dict[str, Any]]
_FLOAT: Final = np.dtype("<f8")
_PARTS_AT_ONCE: Final = 16
_COPIES: Final = 6
"""Of a part that stand side by side: its reports, its tables, those of its chunk, and what is written."""


@dataclass(frozen=True, eq=False)
class _PartContents:
    """One part, and the coarse levels of its chunk if it is whole."""

    plan: SealPlan
    part: ChunkLevel | None
    coarse: Mapping[int, ChunkLevel]
    scalars: Mapping[tuple[str, str], bytes]
    counts: Mapping[tuple[str, str], int]

    @property
    def levels(self) -> dict[int, ChunkLevel]:
        """The part's rows by level; nothing if only logged values are sealed."""
        return {} if self.part is None else {LEVELS[0]: self.part, **self.coarse}


def seal(
    run_id: str,
    reading: Transaction,
    writing: Transaction,
    limits: SealLimits,
    replicas: ReplicaComparison,
    archive: ArchiveReader,
    *,
    now: float,
    closed: bool,
    journal_full: bool,
    stale_after_seconds: float,
) -> int:
    """Seal the due part of the run's journal; returns how many parts were made, 0 when nothing is due.

    Replicas are compared first: once sealed they cannot be. Leftovers of an interrupted sealing are deleted next,
    and count as a part. A run with statistics that this server cannot merge is left to a newer server.
    """
    with released_afterwards(), reading() as connection:
        view = RunView(connection, run_id)
        if view.has_unknown_statistics:
            return 0
        mismatches, compared = replicas.find(view)
        journal = read_journal(
            connection,
            view,
            now=now,
            closed=closed,
            journal_full=journal_full,
            stale_after_seconds=stale_after_seconds,
        )
        largest = max((report.bytes for members in journal.waiting.values() for report in members), default=1)
        limits = replace(limits, delete_rows=max(min(limits.delete_rows, limits.delete_bytes // largest), 1))
    if mismatches:
        with writing() as connection:
            _require(connection, run_id)
            keep_mismatches(connection, run_id, mismatches, now)
    if compared is not None:
        replicas.remember(run_id, compared)
    if journal.leftovers:
        _delete_reports(run_id, writing, journal.leftovers, limits)
        return 1
    for number in range(_PARTS_AT_ONCE):
        with released_afterwards():
            with reading() as connection:
                view = RunView(connection, run_id)
                built = _next_part(connection, view, journal, limits, archive)
            if built is None:
                return number
            _write(run_id, writing, built, limits)
        _delete_reports(run_id, writing, sorted(built.plan.reports), limits)
        journal = journal.without(built.plan.reports)
        if not journal.waiting:
            return number + 1
    return _PARTS_AT_ONCE


def _next_part(
    connection: Connection, view: RunView, journal: JournalContents, limits: SealLimits, archive: ArchiveReader
) -> _PartContents | None:
    """The next part that is due. While an archive is away, late reports of what lies there wait, and newer ones do
    not."""
    for late in (True, False):
        plan = plan_seal(connection, view, journal, limits, late=late)
        hold(_COPIES * limits.bytes if plan else 0)
        if plan is None:
            return None
        try:
            return _build(connection, view, plan, limits, archive)
        except Busy:
            if not late:
                raise
    return None


def _build(
    connection: Connection, view: RunView, plan: SealPlan, limits: SealLimits, archive: ArchiveReader
) -> _PartContents:
    rows = read_planned(connection, view, plan)
    frozen = plan.info is not None and plan.info.frozen
    measured = [] if frozen else [row for row in rows if row.model is not None]
    scalars = pack_scalars(rows)
    part = _part(connection, view, plan, measured) if measured else None
    if part is not None and not len(part.points.steps):
        part = None
    coarse: Mapping[int, ChunkLevel] = {}
    if part is not None:
        coarse = coarse_levels(view, plan, part, limits, archive)
    return _PartContents(
        plan=plan,
        part=part,
        coarse=coarse,
        scalars={key: data for key, (_, data) in scalars.items()},
        counts={key: count for key, (count, _) in scalars.items()},
    )


def _part(connection: Connection, view: RunView, plan: SealPlan, rows: Sequence[Row[Any]]) -> ChunkLevel:
    """Ranks merged; where there are several, also one by one, for the model."""
    declared = {key for row in rows for key in view.streams[row.stream_id].statistics[: row.statistic_count]}
    keys = view.statistics(declared.intersection(view.statistics(None)))
    contributors = read_contributors(connection, view.run_id, plan.attempt, plan.chunk_so_far)
    with_layers = [row for row in rows if row.statistics is not None]
    width = max((view.prefix(row.stream_id, row.layer_count) for row in with_layers), default=0)
    positions = np.arange(width, dtype=np.int64)
    layers = unsealed.layer_table(view, plan.attempt, with_layers, keys, positions, contributors)
    model = unsealed.model_table(view, plan.attempt, rows, keys, contributors)
    if view.replicas_beside_shards:
        model = model_of(layers)
    seen = unsealed.visible_rows(view, rows, contributors)
    counts = unsealed.count_step_reports(view, seen)
    ranks = {}
    contributing = sorted({view.ranks_by_stream[stream] for _, stream in counts})
    if len(contributing) > 1 or view.replicated:
        ranks = {rank: _one_rank(view, plan, seen, keys, model, rank) for rank in contributing}
    return ChunkLevel(
        points=model,
        model=_stored(model.totals),
        ranks=ranks,
        layers=_stored(_aligned(layers, model.steps)),
        contributors=pack_contributors(model.steps, counts, view.ranks_by_stream),
    )


def _one_rank(
    view: RunView, plan: SealPlan, rows: Sequence[Row[Any]], keys: Sequence[str], model: AttemptPoints, rank: int
) -> Mapping[str, FloatArray]:
    own = [row for row in rows if view.streams[row.stream_id].rank == rank]
    return _stored(_aligned(unsealed.model_table(view, plan.attempt, own, keys, {}), model.steps))


def _aligned(table: AttemptPoints, steps: IntArray) -> dict[str, FloatArray]:
    """The table's totals at these steps; NaN where it has no point."""
    place = np.searchsorted(steps, table.steps)
    aligned = {}
    for key, values in table.totals.items():
        aligned[key] = np.full((len(steps), *values.shape[1:]), np.nan)
        aligned[key][place] = values
    return aligned


def _stored(totals: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Without totals that can be computed from a single step's others, and those that nobody reported."""
    return reported({key: v for key, v in totals.items() if not key.startswith("variance_product_root/")})


def _write(run_id: str, writing: Transaction, built: _PartContents, limits: SealLimits) -> None:
    """Blobs in slices, then everything visible at once; in one transaction where one slice holds them all."""
    plan = built.plan
    with writing() as connection:
        _require(connection, run_id)
        entries = _entry_numbers(connection, run_id, built)
        for table in (schema.model_chunk, schema.layer_chunk):
            if built.levels:
                connection.execute(_blobs_of_part(table), {**chunk_place(run_id, plan), "of_part": plan.part})
        every = [_blob_rows(run_id, plan, level, held, entries) for level, held in built.levels.items()]
        slices = _slices(chain.from_iterable(every), limits)
        _insert(connection, next(slices, []))
        following = next(slices, None)
        if following is None:
            _publish(connection, run_id, built, entries)
            return
    for blob_rows in chain([following], slices):
        with writing() as connection:
            _require(connection, run_id)
            _insert(connection, blob_rows)
    with writing() as connection:
        _require(connection, run_id)
        _publish(connection, run_id, built, entries)


def _insert(connection: Connection, blob_rows: Iterable[_BlobRow]) -> None:
    for table, rows in groupby(blob_rows, itemgetter(0)):
        connection.execute(insert(table), [values for _, values in rows])


def _slices(blob_rows: Iterable[_BlobRow], limits: SealLimits) -> Iterator[list[_BlobRow]]:
    """Blob rows by transaction: so few rows or bytes that the next commit of reports hardly waits."""
    held: list[_BlobRow] = []
    size = 0
    for row in blob_rows:
        held.append(row)
        size += len(row[1]["data"])
        if len(held) >= limits.slice_rows or size >= limits.slice_bytes:
            yield held
            held, size = [], 0
    if held:
        yield held


@cache
def _blobs_of_part(table: Table) -> Delete:
    return delete(table).where(*chunk_of(table), table.c.part == bindparam("of_part"))


@cache
def _coarse_of_others(table: Table) -> Delete:
    """Coarse levels that other parts of the chunk made."""
    others = (table.c.level != LEVELS[0], table.c.part != bindparam("of_part"))
    return delete(table).where(*chunk_of(table), *others)


@cache
def _held_run() -> Select[Any]:
    run_id = schema.run.c.run_id
    return select(run_id).where(run_id == bindparam("run")).with_for_update(read=True)


def _require(connection: Connection, run_id: str) -> None:
    """The run must still be there, and stay as long as this transaction lasts."""
    if connection.execute(_held_run(), {"run": run_id}).first() is None:
        raise Gone(f"run {run_id!r} was deleted while it was being sealed", field="run_id")


def _entry_numbers(connection: Connection, run_id: str, built: _PartContents) -> dict[str, int]:
    """The number of each entry of the run, by its key; entries that are new in this part are appended."""
    rows = connection.execute(_known_entries(), {"run": run_id})
    known = {row.key: row.entry for row in whole_rows(schema.entry, rows)}
    keys = dict.fromkeys(
        key for level in built.levels.values() for held in (level.model, level.layers) for key in held
    )
    fresh = [key for key in keys if key not in known]
    for key in fresh:
        known[key] = len(known)
    if fresh:
        values = [{"run_id": run_id, "entry": known[key], "key": key} for key in fresh]
        connection.execute(insert(schema.entry), values)
    return known


@cache
def _known_entries() -> Select[Any]:
    table = schema.entry
    return select(table).where(table.c.run_id == bindparam("run"))


def _blob_rows(
    run_id: str, plan: SealPlan, level: int, held: ChunkLevel, entries: Mapping[str, int]
) -> Iterator[_BlobRow]:
    """(table, values) of every blob row of a level."""
    count = len(held.points.steps)
    place = {"run_id": run_id, "attempt": plan.attempt, "level": level, "chunk": plan.chunk, "part": plan.part}
    for rank, totals in ((ALL_RANKS, held.model), *held.ranks.items()):
        numbers = np.array([entries[key] for key in totals], dtype=np.int64)
        array = np.stack(list(totals.values())) if totals else np.zeros((0, count))
        data = pack_totals(array) if level == LEVELS[0] else _float_bytes(array)
        row = {**place, "rank": rank, "point_count": count, "entries": int_bytes(numbers), "data": data}
        yield schema.model_chunk, row | {"checks": chunk_check(*map(row.__getitem__, MODEL_PARTS))}
    for key, table in held.layers.items():
        row = {**place, "entry": entries[key], "point_count": count, "layer_count": table.shape[1]}
        data = _float_bytes(table.T)
        checks = layer_checks(data, *map(row.__getitem__, LAYER_PLACE))
        yield schema.layer_chunk, row | {"checks": checks, "data": data}


def _float_bytes(array: FloatArray) -> bytes:
    return np.ascontiguousarray(array, dtype=_FLOAT).tobytes()


def _publish(connection: Connection, run_id: str, built: _PartContents, entries: Mapping[str, int]) -> None:
    """Points of every level, scalars, and the ranges that are now sealed: all of it or nothing.

    Coarse levels are numbered as the part that made them, and take the place of earlier ones.
    """
    plan = built.plan
    for table in (schema.point_chunk, schema.model_chunk, schema.layer_chunk) if built.coarse else ():
        connection.execute(_coarse_of_others(table), {**chunk_place(run_id, plan), "of_part": plan.part})
    if built.levels:
        rows = [_point_row(run_id, plan, level, held) for level, held in built.levels.items()]
        connection.execute(insert(schema.point_chunk), rows)
    if built.scalars:
        _publish_scalars(connection, run_id, built)
    for stream_id, seqs in plan.seqs_by_stream().items():
        mine = {"run": run_id, "own_stream": stream_id}
        [row] = whole_rows(schema.run_latest, connection.execute(_latest_of_stream(), mine))
        merged = ranges_to_json(add_numbers(ranges_from_json(row.sealed), seqs))
        checks = checks_of(schema.run_latest, {**row._mapping, "sealed": merged})
        connection.execute(_set_sealed(), {**mine, "merged": merged, "anew": checks})


def _point_row(run_id: str, plan: SealPlan, level: int, held: ChunkLevel) -> dict[str, Any]:
    points = held.points
    row = {
        "run_id": run_id,
        "attempt": plan.attempt,
        "level": level,
        "chunk": plan.chunk,
        "part": plan.part,
        "point_count": len(points.steps),
        "first_step": int(points.first_steps[0]),
        "last_step": int(points.steps[-1]),
        "points": pack_points(points.first_steps, points.steps, points.times, points.ranks, points.counts),
        **held.contributors,
    }
    return row | {"checks": point_checks(row)}


def _publish_scalars(connection: Connection, run_id: str, built: _PartContents) -> None:
    found = connection.execute(_logged_parts(), {"run": run_id})
    parts = {(row.stream_id, row.name): row.parts for row in found}
    rows = [
        {
            "run_id": run_id,
            "stream_id": stream_id,
            "name": name,
            "part": parts.get((stream_id, name), -1) + 1,
            "point_count": built.counts[stream_id, name],
            "data": data,
        }
        for (stream_id, name), data in built.scalars.items()
    ]
    checked = [row | {"checks": chunk_check(*map(row.__getitem__, LOGGED_PARTS))} for row in rows]
    connection.execute(insert(schema.scalar_chunk), checked)


@cache
def _logged_parts() -> Select[Any]:
    """The newest part of each name of each stream of a run."""
    table = schema.scalar_chunk
    newest = func.max(table.c.part).label("parts")
    place = (table.c.stream_id, table.c.name)
    return select(*place, newest).where(table.c.run_id == bindparam("run")).group_by(*place)


@cache
def _latest_of_stream() -> Select[Any]:
    return select(schema.run_latest).where(*of_stream(schema.run_latest)).with_for_update()


@cache
def _set_sealed() -> Update:
    changed: dict[str, Any] = {"sealed": bindparam("merged"), "checks": bindparam("anew")}
    return update(schema.run_latest).where(*of_stream(schema.run_latest)).values(changed)


def _delete_reports(
    run_id: str, writing: Transaction, reports: Sequence[tuple[str, int]], limits: SealLimits
) -> None:
    """By ranges of numbers that follow on each other: naming each one costs 1.8 times the CPU."""
    for start in range(0, len(reports), limits.delete_rows):
        numbers: dict[str, list[int]] = defaultdict(list)
        for stream_id, seq in reports[start : start + limits.delete_rows]:
            numbers[stream_id].append(seq)
        ranges = [
            {"run": run_id, "own_stream": stream_id, "first": first, "last": last}
            for stream_id, seqs in numbers.items()
            for first, last in add_numbers((), seqs)
        ]
        with writing() as connection:
            connection.execute(_without_numbers(), ranges)


@cache
def _without_numbers() -> Delete:
    return delete(schema.report).where(*numbers_between())
