"""Registrations of a launch before its first report: its attempt, one stream per rank, and their layers.

The routes of `api/streams.py` write and list them. Ingest looks up a stream's record to check its reports, and
`store/reading/` reads streams and layers in the snapshot of a question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from sqlalchemy import ColumnElement, Connection, Row, func, insert, select

from collage_monitor import wire
from collage_server.errors import Conflict, NotFound, Unprocessable, unknown_stream
from collage_server.memory_budget import held_rows
from collage_server.store import schema
from collage_server.store.engine.database import Database
from collage_server.store.journal.declarations import (
    UNKNOWN_MARK,
    check_declaration,
    stored_name,
    unknown_statistics,
)
from collage_server.store.journal.horizon import frozen_step
from collage_server.store.records import IntArray, NewEvent, StreamRecord, stream_record
from collage_server.store.row_checks import damaged_rows, require_row, update_rows, whole_rows
from collage_server.store.row_helpers import (
    count_numbers,
    from_json,
    int_bytes,
    ranges_from_json,
    require_run,
    to_json,
)
from collage_server.store.runs.events import (
    add_events,
    attempt_event,
    continuation_event,
    conversion_event,
    correct_event,
    expectation_event,
    kept_otherwise,
    kept_otherwise_event,
    rank_twice,
    resume_loss_event,
    second_writer_event,
    unknown_statistics_event,
)
from collage_server.store.runs.run_changes import go_on

__all__ = [
    "StreamStore",
    "read_layers",
    "read_streams",
]

_STREAM: Final = schema.stream
_LAYER: Final = schema.layer
_LAYER_BYTES: Final = 1024
"""What a layer takes as an object and in an answer, beside its name."""
_IDENTITY: Final = ("run_id", "stream_id", "attempt", "rank", "world_size", "process_id")


class StreamStore:
    """Attempts, streams, and the layers that they have declared.

    `most_numbers`: layers times statistics of a run, at most; a point has room for each of both.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.most_numbers = 2**63

    def create_attempt(self, run_id: str, create: wire.AttemptCreate, now: float) -> wire.Attempt:
        """Register a launch; sent again (by another rank, say) the same launch_id keeps the lowest first step."""
        with self._database.writing() as connection:
            require_run(connection, run_id, lock=True)
            table = schema.attempt
            mine = (table.c.run_id == run_id, table.c.launch_id == create.launch_id)
            known = _read_attempt(connection, *mine)
            if known is not None:
                first_step = min(known.first_step, create.first_step)
                update_rows(connection, table, {"first_step": first_step}, *mine)
                number, created_at, measured_from = known.attempt, known.created_at, known.measured_from
                if number > 0:
                    correct_event(connection, run_id, attempt_event(number, first_step, measured_from))
            else:
                number = _next_number(connection, run_id, create.role)
                first_step, created_at, measured_from = create.first_step, now, None
                connection.execute(
                    insert(table).values(
                        run_id=run_id,
                        attempt=number,
                        launch_id=create.launch_id,
                        first_step=first_step,
                        created_at=now,
                    )
                )
                began = attempt_event(number, first_step, measured_from)
                event = began if create.role is None else second_writer_event(create.role, number, first_step)
                add_events(connection, run_id, [event], now)
                if create.role is None:
                    go_on(connection, run_id, now)
            return wire.Attempt(
                run_id=run_id,
                attempt=number,
                launch_id=create.launch_id,
                first_step=first_step,
                created_at=created_at,
                measured_from=measured_from,
            )

    def create_stream(self, run_id: str, create: wire.StreamCreate, now: float) -> wire.Stream:
        """Register a stream, or extend it."""
        with self._database.writing() as connection:
            _create_stream(connection, run_id, create, now)
            _check_numbers(connection, run_id, create, self.most_numbers)
            return _read_stream(connection, create.stream_id)

    def of_run(self, run_id: str) -> list[wire.Stream]:
        """The run's streams, by attempt and rank."""
        with self._database.reading() as connection:
            return read_streams(connection, run_id)

    def stream_record(self, stream_id: str) -> StreamRecord:
        """The fields of a stream that ingest needs."""
        with self._database.reading() as connection:
            return _read_stream_record(connection, stream_id)

    def layers(self, run_id: str) -> list[wire.Layer]:
        """The run's layers in the order in which they were first seen."""
        with self._database.reading() as connection:
            return read_layers(connection, run_id)


def _next_number(connection: Connection, run_id: str, role: str | None) -> int:
    """The number of the run's next launch: above the training's newest, or below second writers'."""
    number = schema.attempt.c.attempt
    of_run = select(func.min(number), func.max(number)).where(schema.attempt.c.run_id == run_id)
    lowest, highest = connection.execute(of_run).one()
    return max(highest or 0, 0) + 1 if role is None else min(lowest or 0, 0) - 1


def _create_stream(connection: Connection, run_id: str, create: wire.StreamCreate, now: float) -> None:
    """Register a stream, or extend the one of this id."""
    require_run(connection, run_id, lock=True)
    check_declaration(create)
    table = schema.attempt
    attempt = _read_attempt(connection, table.c.run_id == run_id, table.c.launch_id == create.launch_id)
    if attempt is None:
        raise NotFound(
            f"no attempt of run {run_id!r} has launch_id {create.launch_id!r}; "
            f"POST /api/v1/runs/{run_id}/attempts first",
            field="launch_id",
        )
    if attempt.attempt < 0 and (create.layers or create.statistics or create.watch is not None):
        raise Unprocessable(
            f"launch_id {create.launch_id!r} is a second writer's, which only logs: leave out layers, statistics "
            "and watch, or measure in the training",
            field="statistics",
        )
    known = connection.execute(select(_STREAM).where(_STREAM.c.stream_id == create.stream_id)).first()
    if known is not None and known.run_id == run_id:
        require_row(_STREAM, known)
    positions = _extend_dictionary(connection, run_id, create.layers)
    if known is not None:
        _extend(connection, known, run_id, attempt.attempt, create, positions)
    else:
        _insert_stream(connection, run_id, attempt.attempt, create, positions, now)
    if create.statistics:
        _measures(connection, attempt, create)
        if unknown := unknown_statistics(map(stored_name, create.statistics)):
            add_events(connection, run_id, [unknown_statistics_event(unknown, attempt.attempt)], now)
    if create.watch is not None:
        add_events(connection, run_id, list(_events_of_watch(connection, run_id, attempt.attempt, create)), now)


def _check_numbers(connection: Connection, run_id: str, create: wire.StreamCreate, most: int) -> None:
    """Refuse a stream with which a point of the run would hold too many numbers.

    Raises:
        Unprocessable: there are more than `most`.
    """
    mine = select(_STREAM.c.statistics, _STREAM.c.layers).where(_STREAM.c.stream_id == create.stream_id).cte()
    alike = (_STREAM.c.statistics == mine.c.statistics) & (_STREAM.c.layers == mine.c.layers)
    others = select(_STREAM.c.stream).join(mine, alike).where(_STREAM.c.run_id == run_id)
    if (
        not create.layers
        or connection.execute(others.where(_STREAM.c.stream_id != create.stream_id).limit(1)).first()
    ):
        return  # Nothing new: ranks of one model are alike.
    declared = select(_STREAM.c.statistics).where(_STREAM.c.run_id == run_id).distinct()
    keys = {key for text in connection.execute(declared).scalars() for key in from_json(text)}
    layers = connection.execute(
        select(func.count()).select_from(_LAYER).where(_LAYER.c.run_id == run_id)
    ).scalar_one()
    numbers = layers * len(keys)
    if numbers > most:
        raise Unprocessable(
            f"layers: {layers} in the run, of {len(keys)} statistics each, are {numbers} numbers a step, "
            f"at most {most}; watch fewer layers, or give the server more with --memory",
            field="layers",
            limit=most,
        )


def _events_of_watch(
    connection: Connection, run_id: str, attempt: int, create: wire.StreamCreate
) -> Iterator[NewEvent]:
    """Add events for the watch's description of storage, and for differences from the attempt before."""
    watch = create.watch
    assert watch is not None
    if watch.conversion is not None:
        yield conversion_event(attempt, watch.conversion)
    for breach in watch.broken:
        yield expectation_event(attempt, breach)
    for loss in watch.resume_losses:
        yield resume_loss_event(attempt, loss)
    if watch.continuation is not None:
        yield continuation_event(attempt, watch.continuation)
    if attempt > 1 and watch.fingerprint is not None and watch.fingerprint.states:
        mine = (_STREAM.c.run_id == run_id, _STREAM.c.rank == create.rank, _STREAM.c.attempt < attempt)
        earlier = select(_STREAM.c.watch, _STREAM.c.attempt).where(*mine, _STREAM.c.watch.is_not(None))
        row = connection.execute(earlier.order_by(_STREAM.c.attempt.desc()).limit(1)).first()
        if row is not None:
            before = msgspec.json.decode(row.watch, type=wire.WatchInfo)
            if changes := kept_otherwise(before, watch):
                yield kept_otherwise_event(attempt, row.attempt, changes)


def _read_attempt(connection: Connection, *which: ColumnElement[bool]) -> Row[Any] | None:
    statement = select(schema.attempt, schema.measured_attempt.c.measured_from).select_from(schema.attempts)
    row = connection.execute(statement.where(*which)).first()
    if row is not None:
        require_row(schema.attempt, row)
    return row


def _measures(connection: Connection, attempt: Row[Any], create: wire.StreamCreate) -> None:
    """Let the attempt hide older ones from the lowest step on from which one of its streams measures."""
    begin = attempt.first_step if create.measured_from is None else create.measured_from
    if attempt.measured_from is not None and attempt.measured_from <= begin:
        return
    table = schema.measured_attempt
    if attempt.measured_from is None:
        row = {"run_id": attempt.run_id, "attempt": attempt.attempt, "measured_from": begin}
        connection.execute(insert(table).values(row))
    else:
        mine = (table.c.run_id == attempt.run_id, table.c.attempt == attempt.attempt)
        update_rows(connection, table, {"measured_from": begin}, *mine)
    correct_event(connection, attempt.run_id, attempt_event(attempt.attempt, attempt.first_step, begin))


def _extend_dictionary(connection: Connection, run_id: str, layers: list[wire.Layer]) -> IntArray:
    """Positions of these layers in the run's dictionary; new names are appended to it."""
    columns = (_LAYER.c[name] for name in ("run_id", "name", "layer", "checks"))
    found = connection.execute(select(*columns).where(_LAYER.c.run_id == run_id))
    known = {row.name: row.layer for row in whole_rows(_LAYER, found, [0])}
    fresh = [layer for layer in layers if layer.name not in known]
    limit = wire.LIMITS["layers_per_run"]
    if len(known) + len(fresh) > limit:
        raise Unprocessable(
            f"layers: {len(known) + len(fresh)} in the run, at most {limit}", field="layers", limit=limit
        )
    rows = []
    for layer in fresh:
        known[layer.name] = len(known)
        rows.append(
            {
                "run_id": run_id,
                "layer": known[layer.name],
                "name": layer.name,
                "shape": to_json(layer.shape),
                "dtype": layer.dtype,
                "module_type": layer.module_type,
            }
        )
    if rows:
        connection.execute(insert(_LAYER), rows)
    return np.array([known[layer.name] for layer in layers], dtype=np.int64)


def _insert_stream(
    connection: Connection, run_id: str, attempt: int, create: wire.StreamCreate, positions: IntArray, now: float
) -> None:
    newest = connection.execute(select(func.max(_STREAM.c.stream)).where(_STREAM.c.run_id == run_id)).scalar()
    same = (_STREAM.c.run_id == run_id, _STREAM.c.attempt == attempt, _STREAM.c.rank == create.rank)
    if connection.execute(select(_STREAM.c.stream).where(*same).limit(1)).first() is not None:
        event = rank_twice(create.stream_id, attempt, create.rank, create.process_id)
        add_events(connection, run_id, [event], now)
    connection.execute(
        insert(_STREAM).values(
            run_id=run_id,
            stream_id=create.stream_id,
            stream=(newest or 0) + 1,
            attempt=attempt,
            rank=create.rank,
            world_size=create.world_size,
            process_id=create.process_id,
            created_at=now,
            **_declared(create, positions),
        )
    )
    connection.execute(
        insert(schema.run_latest).values(
            run_id=run_id,
            stream_id=create.stream_id,
            attempt=attempt,
            rank=create.rank,
            reports=0,
            scalars="{}",
            frozen_step=frozen_step(connection, run_id, attempt),
        )
    )
    _describe_run(connection, run_id, create)


def _declared(create: wire.StreamCreate, positions: IntArray) -> dict[str, Any]:
    return {
        "statistics": to_json([stored_name(key) for key in create.statistics]),
        "layers": int_bytes(positions),
        "elements": int_bytes(np.array([layer.elements for layer in create.layers], dtype=np.int64)),
        "replicas": int_bytes(np.array([layer.replica for layer in create.layers], dtype=np.int64)),
        "watch": None if create.watch is None else to_json(create.watch),
    }


def _extend(
    connection: Connection,
    known: Row[Any],
    run_id: str,
    attempt: int,
    create: wire.StreamCreate,
    positions: IntArray,
) -> None:
    """Append layers and statistics; a shorter list is a late repetition and changes nothing."""
    if (known.run_id, known.attempt, known.rank) != (run_id, attempt, create.rank):
        raise Conflict(
            f"stream_id {create.stream_id!r} belongs to another run, attempt or rank; make a new random one",
            field="stream_id",
        )
    declared = _declared(create, positions)
    old_statistics = from_json(known.statistics)
    shorter = min(len(old_statistics), len(create.statistics))
    if [key.removeprefix(UNKNOWN_MARK) for key in old_statistics[:shorter]] != create.statistics[:shorter]:
        raise Conflict("statistics: may only be appended to those declared before", field="statistics")
    size = min(len(known.layers), len(declared["layers"]))
    if known.layers[:size] != declared["layers"][:size]:
        raise Conflict("layers: may only be appended to those declared before", field="layers")
    values: dict[str, Any] = {}
    if len(create.statistics) > len(old_statistics):
        # What was unknown when it was declared stays so: totals have been dropped.
        values["statistics"] = to_json([*old_statistics, *from_json(declared["statistics"])[shorter:]])
    if len(declared["layers"]) > len(known.layers):
        values.update({name: declared[name] for name in ("layers", "elements", "replicas")})
    is_late = len(create.statistics) < len(old_statistics) or len(declared["layers"]) < len(known.layers)
    if create.watch is not None and not is_late:
        values["watch"] = declared["watch"]
        _describe_run(connection, run_id, create)
    if values:
        mine = (_STREAM.c.run_id == run_id, _STREAM.c.stream_id == create.stream_id)
        update_rows(connection, _STREAM, values, *mine)


def _describe_run(connection: Connection, run_id: str, create: wire.StreamCreate) -> None:
    """Let the run list filter by the strategy and dtype of rank 0 (any rank as long as rank 0 is unknown)."""
    watch = create.watch
    if watch is None:
        return
    run = schema.run
    mine = [run.c.run_id == run_id, *([run.c.strategy.is_(None)] if create.rank != 0 else [])]
    update_rows(connection, run, {"strategy": watch.shown_strategy, "dtype": watch.dtype}, *mine)


def _read_stream_records(connection: Connection, run_id: str) -> list[StreamRecord]:
    """All streams of a run, oldest first."""
    require_run(connection, run_id)
    rows = connection.execute(select(_STREAM).where(_STREAM.c.run_id == run_id).order_by(_STREAM.c.stream)).all()
    return [stream_record(row) for row in whole_rows(_STREAM, rows)]


def _read_stream_record(connection: Connection, stream_id: str) -> StreamRecord:
    """One stream by its id."""
    row = connection.execute(select(_STREAM).where(_STREAM.c.stream_id == stream_id)).first()
    if row is None:
        raise unknown_stream(stream_id)
    require_run(connection, row.run_id)
    require_row(_STREAM, row)
    return stream_record(row)


def read_streams(connection: Connection, run_id: str) -> list[wire.Stream]:
    """The run's streams with the reports that arrived on each, by attempt, rank and age."""
    records = _read_stream_records(connection, run_id)
    latest = schema.run_latest
    found = connection.execute(select(latest).where(latest.c.run_id == run_id))
    rows = {row.stream_id: row for row in whole_rows(latest, found)}
    return [
        _described(record, _latest_of(rows, record))
        for record in sorted(records, key=lambda record: (record.attempt, record.rank, record.number))
    ]


def _latest_of(rows: Mapping[str, Row[Any]], record: StreamRecord) -> Row[Any]:
    """A stream's row of `run_latest`, which is made with the stream."""
    if record.stream_id not in rows:
        raise damaged_rows(record.run_id, f"the row of `run_latest` of stream {record.stream_id}")
    return rows[record.stream_id]


def _read_stream(connection: Connection, stream_id: str) -> wire.Stream:
    """One stream, as `read_streams` has it: a thousand ranks register without reading each other."""
    record = _read_stream_record(connection, stream_id)
    latest = schema.run_latest
    mine = (latest.c.run_id == record.run_id, latest.c.stream_id == stream_id)
    found = {row.stream_id: row for row in whole_rows(latest, connection.execute(select(latest).where(*mine)))}
    return _described(record, _latest_of(found, record))


def _described(record: StreamRecord, latest: Row[Any]) -> wire.Stream:
    return wire.Stream(
        **{name: getattr(record, name) for name in _IDENTITY},
        layers=len(record.layers),
        statistics=[key for key in record.statistics if not key.startswith(UNKNOWN_MARK)],
        unknown_statistics=unknown_statistics(record.statistics),
        watch=record.watch,
        **_arrived(latest),
    )


def _arrived(row: Row[Any]) -> dict[str, Any]:
    """A stream's fields in `run_latest`. A report given up may have come nevertheless: `missing` is a bound."""
    ranges = ranges_from_json(row.given_up)
    given_up = count_numbers(ranges)
    newest = max((-1 if row.last_seq is None else row.last_seq, *(last for _, last in ranges)))
    return {
        "reports": row.reports,
        "last_seq": row.last_seq,
        "last_step": row.last_step,
        "last_report_at": row.last_report_at,
        "given_up": given_up,
        "missing": max(newest + 1 - row.reports - given_up, 0),
        "clock_skew_seconds": row.clock_skew_seconds,
    }


def read_layers(connection: Connection, run_id: str) -> list[wire.Layer]:
    """The run's dictionary of layers, in its order."""
    require_run(connection, run_id)
    found = connection.execute(select(_LAYER).where(_LAYER.c.run_id == run_id).order_by(_LAYER.c.layer))
    rows = held_rows((row, _LAYER_BYTES + 2 * len(row.name)) for row in whole_rows(_LAYER, found))
    return [
        wire.Layer(
            name=row.name,
            shape=(shape := from_json(row.shape)),
            dtype=row.dtype,
            elements=math.prod(shape),
            module_type=row.module_type,
        )
        for row in rows
    ]
