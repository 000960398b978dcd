"""The tables of runs. Every unique key begins with run_id; columns are called as their fields on the wire.

It describes databases that exist: a change needs a step in `migrations/versions/`, and before a release another
baseline there. `tests/server/store/test_migrations.py` holds both equal.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.event import listen

from collage_server.store.row_crc import checks_of_new_row

__all__ = [
    "LONGEST_ID",
    "LONGEST_NAME",
    "OVERVIEW_NUMBERS",
    "attempt",
    "attempts",
    "deleted_run",
    "entry",
    "event",
    "layer",
    "layer_chunk",
    "measured_attempt",
    "metadata",
    "model_chunk",
    "numbered_export",
    "point_chunk",
    "replica_mismatch",
    "report",
    "row_checks",
    "run",
    "run_latest",
    "run_summary",
    "run_summary_narrow",
    "run_tag",
    "scalar_chunk",
    "seal_claim",
    "segment",
    "segment_gone",
    "stream",
]

metadata: Final = MetaData()
_PARTITIONS: Final = 8
OVERVIEW_NUMBERS: Final = (
    "edq_ratio",
    "lost_update_ratio",
    "state_decrement_ratio",
    "loss",
    "validation_loss",
    "bytes_per_parameter",
    "tokens_per_second",
)
"""Columns of `run_summary`: metrics over the recent past, and the newest logged values."""

LONGEST_ID: Final = 64
LONGEST_NAME: Final = 512
_ID = String(LONGEST_ID)
_NAME = String(LONGEST_NAME)


def row_checks() -> Column[bytes]:
    """Checks of the row: see `collage_server.store.row_crc`. Null in rows of servers that had none."""
    return Column("checks", LargeBinary, default=checks_of_new_row)


run: Final = Table(
    "run",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("project", _NAME, nullable=False),
    Column("name", _NAME, nullable=False),
    Column("group", _NAME),
    Column("notes", Text, nullable=False),
    Column("seed", BigInteger),
    Column("config", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("strategy", _NAME),
    Column("dtype", _NAME),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("changed_at", Double),
    Column("configuration", String(32), nullable=False),
    Column("treated_as", String(32)),
    row_checks(),
)
"""`updated_at`: the last launch or stated state; the later of it and the newest report is the last sign of life.
`changed_at`: when a request, or retention of coarse points, last changed the run; null where neither ever did.
`configuration` is the same for runs of a project that are configured alike but for seeds; `treated_as`: that of the
runs that people count it to."""
Index("run_by_age", run.c.created_at, run.c.run_id)
Index("run_by_project", run.c.project)

run_summary: Final = Table(
    "run_summary",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("updated_at", Double, nullable=False),
    Column("reports", BigInteger, nullable=False),
    Column("is_evaluated", Boolean, nullable=False),
    Column("last_step", BigInteger),
    *(Column(name, Double) for name in OVERVIEW_NUMBERS),
    Column("health", String(32)),
    Column("findings", Text),
    Column("intended_share", Double),
    Column("made_by", _ID),
    Column("made_at", Double),
    Column("point", LargeBinary),
    Column("overview", Text),
    row_checks(),
)
"""What is said of a run, made in the background after its reports.

`point` is its newest measured step as msgpack, null where nothing is measured; `updated_at` and `reports` are the
run's when the point was read, `reports` −1 if it was not, or cannot be. `overview` is a `wire.Overview`, null
before the first, and made by the code `made_by`; `is_evaluated`: it is of the same reports. The other columns sort
and filter. `findings`, as `wire.Finding`s, is what speaks against the run, null if nothing; alerts read it,
and `intended_share`, which is that of `wire.Overview`."""
run_summary_narrow: Final = Index(
    "run_summary_narrow",
    *(
        run_summary.c[name]
        for name in ("run_id", "updated_at", "last_step", *OVERVIEW_NUMBERS, "health", "made_at")
    ),
)
"""All that the table of runs is sorted, filtered and grouped by, a tenth of the rows themselves."""

run_tag: Final = Table(
    "run_tag",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("tag", _NAME, primary_key=True),
    Column("position", Integer, nullable=False),
    row_checks(),
)

attempt: Final = Table(
    "attempt",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("launch_id", _ID, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    row_checks(),
    UniqueConstraint("run_id", "launch_id"),
)

measured_attempt: Final = Table(
    "measured_attempt",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("measured_from", BigInteger, nullable=False),
    row_checks(),
)
"""From which step on an attempt hides older ones, of those that measure."""
attempts: Final = attempt.outerjoin(
    measured_attempt,
    (measured_attempt.c.run_id == attempt.c.run_id) & (measured_attempt.c.attempt == attempt.c.attempt),
)
"""All attempts, with `measured_from` where they measure."""

layer: Final = Table(
    "layer",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("layer", Integer, primary_key=True, autoincrement=False),
    Column("name", _NAME, nullable=False),
    Column("shape", Text, nullable=False),
    Column("dtype", _NAME, nullable=False),
    Column("module_type", _NAME, nullable=False),
    row_checks(),
    UniqueConstraint("run_id", "name"),
)
"""The run's layers, append-only, numbered from 0 in the order in which they were first seen."""

stream: Final = Table(
    "stream",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("stream_id", _ID, primary_key=True),
    Column("stream", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("rank", BigInteger, nullable=False),
    Column("world_size", BigInteger, nullable=False),
    Column("process_id", BigInteger, nullable=False),
    Column("statistics", Text, nullable=False),
    Column("layers", LargeBinary, nullable=False),
    Column("elements", LargeBinary, nullable=False),
    Column("replicas", LargeBinary, nullable=False),
    Column("watch", Text),
    Column("created_at", Double, nullable=False),
    row_checks(),
    UniqueConstraint("run_id", "stream"),
)
"""`layers` (positions in the run's dictionary), `elements` and `replicas`: little-endian int64, one per layer."""
Index("stream_by_id", stream.c.stream_id)

report: Final = Table(
    "report",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("stream_id", _ID, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    Column("time", Double, nullable=False),
    Column("scalars", Text),
    Column("statistic_count", Integer, nullable=False),
    Column("layer_count", Integer, nullable=False),
    Column("parts", Integer, nullable=False, server_default="1"),
    Column("step_check", BigInteger),
    Column("checks", LargeBinary),
    Column("model", LargeBinary),
    Column("statistics", LargeBinary),
)
"""The journal. `statistics` stands last: SQLite then skips its pages when only the model is asked.

`step_check` (-1 - step), and `checks`, here and in chunks: see `collage_server.store.row_checks`; null in rows of
servers that had none."""

run_latest: Final = Table(
    "run_latest",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("stream_id", _ID, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("rank", BigInteger, nullable=False),
    Column("reports", BigInteger, nullable=False),
    Column("last_seq", BigInteger),
    Column("first_step", BigInteger),
    Column("last_step", BigInteger),
    Column("first_time", Double),
    Column("last_report_at", Double),
    Column("measured_seq", BigInteger),
    Column("measured_step", BigInteger),
    Column("scalars", Text, nullable=False),
    Column("sealed", Text, nullable=False, server_default="[]"),
    Column("given_up", Text, nullable=False, server_default="[]"),
    Column("clock_skew_seconds", Double),
    Column("frozen_step", BigInteger),
    Column("unfinished", Text, nullable=False, server_default="{}"),
    row_checks(),
)
"""Per stream, written with its reports: counts, newest places, `scalars` {name: [step, value]}; `sealed`, the
ranges [[first_seq, last_seq], …] that have left the journal for chunks; `given_up`, those that will never come;
`frozen_step`, up to which the attempt takes no more totals; `unfinished` {step: [parts that came, parts there are]}
of the newest steps that were sent in several reports and are not whole yet."""

entry: Final = Table(
    "entry",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("entry", Integer, primary_key=True, autoincrement=False),
    Column("key", _NAME, nullable=False),
    row_checks(),
    UniqueConstraint("run_id", "key"),
)
"""The run's dictionary of what chunks hold: statistics, and "minimum METRIC", "maximum METRIC" at coarse levels."""

point_chunk: Final = Table(
    "point_chunk",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("chunk", Integer, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("point_count", Integer, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("checks", LargeBinary),
    Column("points", LargeBinary, nullable=False),
    Column("contributor_ranks", LargeBinary, nullable=False),
    Column("contributors", LargeBinary, nullable=False),
    Column("contributor_streams", LargeBinary),
    Column("unfinished", LargeBinary),
    postgresql_partition_by="HASH (run_id)",
)
"""The points of a chunk, one part each time some were sealed; a part without a row here does not exist yet.

`points` packs [5][point_count] of eight bytes each: first steps, steps, times, ranks, measured points merged.
What is longer than 8 KiB is compressed.
`contributors` packs bits [point_count][contributor_streams]; empty: every stream contributed to every point.
`contributor_ranks` are the ranks of these streams.
`unfinished` packs rows of four int64: step, stream, and how many of how many parts of the step have come.
"""

Index(
    "point_chunk_by_place",
    *(
        point_chunk.c[name]
        for name in ("run_id", "attempt", "chunk", "level", "point_count", "first_step", "last_step")
    ),
)

model_chunk: Final = Table(
    "model_chunk",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("rank", BigInteger, primary_key=True, autoincrement=False),
    Column("chunk", Integer, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("point_count", Integer, nullable=False),
    Column("entries", LargeBinary, nullable=False),
    Column("checks", LargeBinary),
    Column("data", LargeBinary, nullable=False),
    postgresql_partition_by="HASH (run_id)",
)
"""Totals of the whole model, float64 [entries][point_count], compressed at level 1; rank −1 is all ranks merged."""

layer_chunk: Final = Table(
    "layer_chunk",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("entry", Integer, primary_key=True, autoincrement=False),
    Column("chunk", Integer, primary_key=True, autoincrement=False),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("point_count", Integer, nullable=False),
    Column("layer_count", Integer, nullable=False),
    Column("checks", LargeBinary),
    Column("data", LargeBinary, nullable=False),
    postgresql_partition_by="HASH (run_id)",
)
"""One statistic by layer, float64 [layer_count][point_count]: one layer is a slice. Ranks are merged."""

scalar_chunk: Final = Table(
    "scalar_chunk",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("stream_id", _ID, primary_key=True),
    Column("name", _NAME, primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("point_count", Integer, nullable=False),
    Column("checks", LargeBinary),
    Column("data", LargeBinary, nullable=False),
    postgresql_partition_by="HASH (run_id)",
)
"""Logged values of one stream and name, [3][point_count] of eight bytes each: steps, times, values."""

numbered_export: Final = Table(
    "numbered_export",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("stream_id", _ID, primary_key=True),
    Column("known", Text, nullable=False),
    row_checks(),
)
"""Of a stream of OpenTelemetry's, whose senders do not number: which report each of the newest exports became."""

event: Final = Table(
    "event",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("event", Integer, primary_key=True, autoincrement=False),
    Column("origin", _NAME, nullable=False),
    Column("time", Double, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("text", Text, nullable=False),
    Column("attempt", Integer),
    Column("step", BigInteger),
    Column("layers", Text, nullable=False),
    row_checks(),
    UniqueConstraint("run_id", "origin"),
)
"""What happened to a run, numbered from 1; `origin` is what it comes from, so that it is stored once."""
Index("event_by_time", event.c.time)

replica_mismatch: Final = Table(
    "replica_mismatch",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("layer", Integer, primary_key=True, autoincrement=False),
    Column("replicas", Text, nullable=False),
    row_checks(),
)
"""Where ranks that should hold the same weights did not; `replicas` [number, …] are those apart from the most."""

segment: Final = Table(
    "segment",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("first_chunk", Integer, primary_key=True, autoincrement=False),
    Column("last_chunk", Integer, nullable=False),
    Column("path", _NAME, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("has_rows", Boolean, nullable=False),
    Column("digest", LargeBinary(32)),
    Column("checks", LargeBinary),
    Column("checked_at", Double),
    Column("problem", Text),
    Column("footer", LargeBinary, nullable=False),
)
"""Archived files: layers of the chunks `first_chunk` to `last_chunk` of an attempt at a level, whose rows of
`layer_chunk` go. A negative level: the model's totals at that level, whose rows of `model_chunk` go; 0: logged
values, without chunks. `has_rows`: some rows may still be there. `footer` is the file's own, which is large.

`digest` is the file's SHA-256, null for files of servers that had none until they are first verified. `checked_at`:
when it was last verified; `problem`: what was wrong with it then, null if nothing."""
Index("segment_by_path", segment.c.path)
Index("segment_by_size", segment.c.bytes)
Index("segment_by_check", segment.c.checked_at)
Index(
    "segment_with_problem",
    segment.c.run_id,
    sqlite_where=segment.c.problem.is_not(None),
    postgresql_where=segment.c.problem.is_not(None),
)
Index("segment_with_rows", segment.c.run_id, sqlite_where=segment.c.has_rows, postgresql_where=segment.c.has_rows)

segment_gone: Final = Table(
    "segment_gone",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("path", _NAME, primary_key=True),
    Column("gone_at", Double, nullable=False),
)
"""Archived files that no row of `segment` names any more, and since when (the clock of `Database.time`)."""

seal_claim: Final = Table("seal_claim", metadata, Column("run_id", _ID, primary_key=True))
"""A row to lock: on a database with several servers, the one that holds it seals the run."""

deleted_run: Final = Table(
    "deleted_run",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("project", _NAME, nullable=False),
    Column("deleted_at", Double, nullable=False),
    Column("kept_until", Double),
    Column("kept", LargeBinary),
)
"""Tombstones: a deleted run's id answers 410 for good.

`kept`, while the deletion can be undone: the rows that went with the run, as msgpack behind a check; its journal
and chunks stay in their tables. After `kept_until` maintenance makes both null, and the rest goes."""


def _on_postgresql(table: Table, statement: str) -> None:
    """The text after the table's creation there."""
    ddl = DDL(statement)  # type: ignore[no-untyped-call]
    listen(table, "after_create", ddl.execute_if(dialect="postgresql"))


def _keep_blobs_plain(table: Table, *columns: str) -> None:
    """Blobs are stored uncompressed: a slice of one is then read without the rest."""
    for column in columns:
        _on_postgresql(table, f"ALTER TABLE {table.name} ALTER COLUMN {column} SET STORAGE EXTERNAL")


def _partition(table: Table) -> None:
    for number in range(_PARTITIONS):
        rows = f"FOR VALUES WITH (MODULUS {_PARTITIONS}, REMAINDER {number})"
        _on_postgresql(table, f"CREATE TABLE {table.name}_{number} PARTITION OF {table.name} {rows}")


_keep_blobs_plain(report, "model", "statistics")
_keep_blobs_plain(point_chunk, "points")
_keep_blobs_plain(segment, "footer")
for _chunk in (model_chunk, layer_chunk, scalar_chunk):
    _keep_blobs_plain(_chunk, "data")
for _chunk in (point_chunk, model_chunk, layer_chunk, scalar_chunk):
    _partition(_chunk)
