"""Runs for benchmarks: one of each kind goes through journal and sealer, the others hold its rows again.

A copied run has rows of its own under its own ids, as large and as many as if it had been sealed itself.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from collage_server.store import ReportGroup, SqliteStore, Store
from collage_server.store.schema import metadata
from sqlalchemy import Connection, Engine, String, Table, cast, event, insert, literal, select, true

from collage_monitor import wire

__all__ = [
    "LAYERED",
    "LAYERS",
    "MODELS",
    "STATISTICS",
    "UnsyncedStore",
    "copy_often",
    "copy_run",
    "populate",
    "seal_run",
]

LAYERS: Final = 200
STATISTICS: Final = (
    "measured_steps",
    "elements",
    "sampled",
    "active_blocks",
    "nonfinite",
    "idle",
    "lost",
    "distorted",
    "faithful",
    "lost_visible",
    "unchanged",
    "intended_squared_sum",
    "intended_effective_sum",
    "effective_squared_sum",
    "intended_visible_sum",
    "gradient_squared_sum",
    "parameter_squared_sum",
    "variance_numerator/edq_ratio",
    "variance_denominator/edq_ratio",
    "covariance/edq_ratio",
)
"""Twenty, with all that the interval of `edq_ratio` needs."""
LAYERED: Final = {**{f"layers-{i}": 2_000 for i in range(10)}, "layers-long": 10_000}
MODELS: Final = {**{f"model-{i}": 10_000 for i in range(50)}, "model-long": 100_000}
_POINTS_A_BATCH: Final = 256
_NOW: Final = 1.7e9


class UnsyncedStore(SqliteStore):
    """SQLite without waiting for the disk: filling is not what is measured."""

    def _connect(self) -> Engine:
        engine = super()._connect()
        event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF").close())
        return engine


def populate(store: Store, seed: int) -> int:
    """Fill with LAYERED and MODELS; the number of numbers stored."""
    numbers = 0
    for runs, layers in ((LAYERED, LAYERS), (MODELS, 0)):
        first: dict[int, str] = {}
        for run_id, points in runs.items():
            if points in first:
                copy_run(store, first[points], run_id)
            else:
                first[points] = run_id
                seal_run(store, run_id, points, layers, seed)
            numbers += points * len(STATISTICS) * (layers + 1)
    return numbers


def seal_run(store: Store, run_id: str, points: int, layers: int, seed: int) -> None:
    """One run, sent through journal and sealer."""
    generator = np.random.default_rng(seed)
    names = [wire.Layer(name=f"layer.{i}", shape=[64, 64], dtype="bfloat16", elements=4096) for i in range(layers)]
    tables = generator.random((64, len(STATISTICS), max(layers, 1)))
    tables[:, 0] = 1.0
    tables[:, STATISTICS.index("elements")] = 4096.0
    tables[:, STATISTICS.index("sampled")] = 1024.0
    tables[:, STATISTICS.index("active_blocks")] = 128.0
    store.runs.create("p", wire.RunCreate(run_id=run_id), _NOW)
    store.streams.create_attempt(run_id, wire.AttemptCreate(launch_id="l", first_step=0), _NOW)
    create = wire.StreamCreate(
        stream_id=run_id, launch_id="l", layers=names, statistics=list(STATISTICS), watch=None
    )
    store.streams.create_stream(run_id, create, _NOW)
    stream = store.streams.stream_record(run_id)
    for start in range(0, points, _POINTS_A_BATCH):
        seqs = range(start, min(start + _POINTS_A_BATCH, points))
        store.journal.append([ReportGroup(stream, [_report(seq, tables[seq % 64], layers) for seq in seqs])], _NOW)
        while store.sealing.seal(run_id, _NOW):
            pass


def _report(seq: int, table: np.ndarray, layers: int) -> wire.Report:
    model = table.sum(axis=1)
    model[0] = 1.0
    return wire.Report(
        seq=seq,
        step=10 * (seq + 1),
        time=_NOW + seq,
        scalars={"loss": 4.0 - seq * 1e-5, "tokens": 1024.0 * seq},
        statistic_count=len(STATISTICS),
        layer_count=layers,
        statistics=wire.array_to_bytes(table) if layers else None,
        model=wire.array_to_bytes(model),
    )


def copy_often(store: Store, source: str, count: int) -> None:
    """More runs like `source`, called `source`-1, `source`-2, …, with rows of their own; a second between them."""
    numbers = select(literal(1).label("number")).cte("numbers", recursive=True)
    numbers = numbers.union_all(select(numbers.c.number + 1).where(numbers.c.number < count))
    run_id = literal(f"{source}-", String) + cast(numbers.c.number, String)
    with store.engine.begin() as connection:
        for table in metadata.sorted_tables:
            if "run_id" not in table.c or table.name == "deleted_run":
                continue
            own: dict[str, Any] = {"run_id": run_id, "stream_id": run_id}
            if table.name == "run":
                own |= {"name": run_id, "created_at": table.c.created_at + numbers.c.number}
            columns = [own.get(column.name, column).label(column.name) for column in table.c]
            rows = select(*columns).select_from(table.join(numbers, true())).where(table.c.run_id == source)
            connection.execute(insert(table).from_select([column.name for column in table.c], rows))


def copy_run(store: Store, source: str, run_id: str) -> None:
    """Another run with rows of its own, as many and as large as those of `source`."""
    with store.engine.begin() as connection:
        for table in metadata.sorted_tables:
            if "run_id" in table.c and table.name != "deleted_run":
                _copy_rows(connection, table, source, run_id)


def _copy_rows(connection: Connection, table: Table, source: str, run_id: str) -> None:
    """A stream is called as its run is, so both ids are replaced alike."""
    columns = [
        literal(run_id).label(column.name) if column.name in {"run_id", "stream_id"} else column
        for column in table.columns
    ]
    rows = select(*columns).where(table.c.run_id == source)
    connection.execute(insert(table).from_select([column.name for column in table.columns], rows))
