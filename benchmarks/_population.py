"""What benchmarks send and store: reports of a few shapes, and runs of them, over HTTP or in a store itself.

One run of each kind goes through journal and sealer. The others get copies of its rows under their own ids:
their rows are as many and as large as if they had been sealed themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
from collage_server.store import ReportGroup, SqliteStore, Store
from collage_server.store.row_checks import (
    LAYER_PLACE,
    LOGGED_PARTS,
    MODEL_PARTS,
    chunk_check,
    layer_checks,
    point_checks,
    report_checks,
)
from collage_server.store.row_crc import checks_of
from collage_server.store.server_tables import metadata
from collage_server.summariser import MADE_BY, Summariser, keep_overview
from sqlalchemy import Engine, Table, event, insert, select

from benchmarks._serving import Connection, request_of
from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS

__all__ = [
    "EDQ",
    "FAMILIES",
    "LARGE",
    "NOW",
    "SMALL",
    "TWENTY",
    "Shape",
    "UnsyncedStore",
    "batches",
    "copy_often",
    "declare",
    "evaluate",
    "numbers_in",
    "populate",
    "register",
    "report",
    "requests",
    "seal_run",
    "twenty",
]

NOW: Final = 1.7e9
_POINTS_A_BATCH: Final = 256
_TOTALS: Final = (
    "measured_steps",
    "elements",
    "sampled",
    "nonfinite",
    "idle",
    "lost",
    "intended_squared_sum",
    "intended_effective_sum",
    "effective_squared_sum",
    "gradient_squared_sum",
)
_MORE: Final = (
    "active_blocks",
    "stray",
    "distorted",
    "reversed",
    "faithful",
    "lost_visible",
    "unchanged",
    "intended_visible_sum",
    "visible_squared_sum",
    "parameter_squared_sum",
    "nonfinite_gradients",
    "nonfinite_parameters",
    "oracle_steps",
    "oracle_sampled",
    "oracle_elements",
    "oracle_active_blocks",
    "oracle_squared_sum",
    "oracle_effective_sum",
    "oracle_intended_squared_sum",
    "oracle_displacement_squared_sum",
    "oracle_displacement_effective_sum",
    "oracle_drift_squared_sum",
)
_STATES: Final = tuple(
    f"state_decrement_{kind}_sum/state_{number}" for number in range(14) for kind in ("observed", "intended")
)
_BINS: Final = tuple(f"update_ulp_histogram/{label}" for label in HISTOGRAM_LABELS)
EDQ: Final = ("measured_steps", "intended_effective_sum", "intended_squared_sum")
_OF_INTERVAL: Final = ("variance_numerator/edq_ratio", "variance_denominator/edq_ratio", "covariance/edq_ratio")
TWENTY: Final = (
    *_TOTALS,
    *(name for name in _MORE[:10] if name not in {"stray", "reversed", "visible_squared_sum"}),
    *_OF_INTERVAL,
)
"""Twenty statistics, with all that the interval of `edq_ratio` needs."""


@dataclass(frozen=True)
class Shape:
    """What every report of a stream holds: values from so many random `patterns`, and `fixed` ones."""

    name: str
    layers: int
    statistics: tuple[str, ...]
    patterns: int = 16
    fixed: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def numbers(self) -> int:
        """Numbers a report, the model's totals beside them not counted."""
        return self.layers * len(self.statistics)


SMALL: Final = Shape("small", 50, _TOTALS)
LARGE: Final = Shape("large", 200, (*_TOTALS, *_MORE, *_STATES, *_BINS), fixed={"measured_steps": 1.0})


def twenty(layers: int) -> Shape:
    """Reports of TWENTY that are judged like those of a training; without layers, of the model alone."""
    fixed = {"measured_steps": 1.0, "elements": 4096.0, "sampled": 1024.0, "active_blocks": 128.0}
    return Shape("twenty", layers, TWENTY, 64, fixed)


@cache
def _patterns(shape: Shape, seed: int) -> list[tuple[bytes | None, bytes]]:
    """Encoded totals of the layers, and of the model."""
    tables = np.random.default_rng(seed).random((shape.patterns, len(shape.statistics), max(shape.layers, 1)))
    for name, value in shape.fixed.items():
        tables[:, shape.statistics.index(name)] = value
    models = tables.sum(axis=2)
    if "measured_steps" in shape.fixed:
        models[:, shape.statistics.index("measured_steps")] = 1.0
    pairs = zip(tables, models, strict=True)
    return [(wire.array_to_bytes(table) if shape.layers else None, wire.array_to_bytes(m)) for table, m in pairs]


def report(shape: Shape, seq: int, seed: int = 0) -> wire.Report:
    """One report; its step is its number."""
    statistics, model = _patterns(shape, seed)[seq % shape.patterns]
    return wire.Report(
        seq=seq,
        step=seq,
        time=NOW + seq,
        scalars={"loss": 4.0 - seq * 1e-5, "tokens": 1024.0 * seq},
        statistic_count=len(shape.statistics),
        layer_count=shape.layers,
        statistics=statistics,
        model=model,
    )


def batches(shape: Shape, first_seq: int, count: int, batch: int, seed: int) -> Iterator[wire.ReportBatch]:
    """Batches of `batch` reports each, `count` reports in all."""
    end = first_seq + count
    for start in range(first_seq, end, batch):
        seqs = range(start, min(start + batch, end))
        yield wire.ReportBatch(reports=[report(shape, seq, seed) for seq in seqs])


def requests(stream_id: str, shape: Shape, first_seq: int, count: int, batch: int, seed: int = 0) -> list[bytes]:
    """The same as whole HTTP requests of a stream."""
    path = f"/streams/{stream_id}/reports"
    return [request_of(path, wire.encode_batch(entry)) for entry in batches(shape, first_seq, count, batch, seed)]


def _streams(run_id: str, shape: Shape, ranks: int) -> Iterator[wire.StreamCreate]:
    layers = [
        wire.Layer(name=f"layer.{i}", shape=[64, 64], dtype="bfloat16", elements=4096) for i in range(shape.layers)
    ]
    for rank in range(ranks):
        yield wire.StreamCreate(
            stream_id=f"{run_id}-{rank}",
            launch_id="l",
            rank=rank,
            world_size=ranks,
            layers=layers,
            statistics=list(shape.statistics),
        )


def register(port: int, run_id: str, shape: Shape, streams: int) -> None:
    """A run with one attempt and so many streams, RUN_ID-0, RUN_ID-1, …, one a rank."""
    with Connection(port) as connection:
        connection.post("/projects/p/runs", wire.encode_message(wire.RunCreate(run_id=run_id)))
        attempt = wire.AttemptCreate(launch_id="l", first_step=0)
        connection.post(f"/runs/{run_id}/attempts", wire.encode_message(attempt))
        for stream in _streams(run_id, shape, streams):
            connection.post(f"/runs/{run_id}/streams", wire.encode_message(stream))


def declare(store: Store, run_id: str, shape: Shape, streams: int = 1) -> list[str]:
    """The same in a store itself; the streams' ids."""
    store.runs.create("p", wire.RunCreate(run_id=run_id), NOW)
    store.streams.create_attempt(run_id, wire.AttemptCreate(launch_id="l", first_step=0), NOW)
    created = list(_streams(run_id, shape, streams))
    for stream in created:
        store.streams.create_stream(run_id, stream, NOW)
    return [stream.stream_id for stream in created]


class UnsyncedStore(SqliteStore):
    """SQLite without waiting for the disk: filling is not measured."""

    def _connect(self) -> Engine:
        engine = super()._connect()
        event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF").close())
        return engine


def seal_run(
    store: Store, run_id: str, shape: Shape, points: int, streams: int = 1, *, seed: int = 0, sealed: bool = True
) -> None:
    """One run, sent through the journal, and unless `sealed` is False through the sealer."""
    for stream_id in declare(store, run_id, shape, streams):
        stream = store.streams.stream_record(stream_id)
        for batch in batches(shape, 0, points, _POINTS_A_BATCH, seed):
            store.journal.append([ReportGroup(stream, batch.reports)], NOW)
            while sealed and store.sealing.seal(run_id, NOW):
                pass


def copy_often(store: Store, source: str, count: int) -> None:
    """More runs like `source`, called `source`-1, `source`-2, …, with rows of their own; a second between them.

    Those of SOURCE-0 are called SOURCE-1 and so on. Checksums of rows are made again: they cover a row's place.
    """
    stem = f"{source.removesuffix('-0')}-"
    with store.engine.begin() as connection:
        for table in metadata.sorted_tables:
            if "run_id" not in table.c or table.name == "deleted_run":
                continue
            found = connection.execute(select(table).where(table.c.run_id == source)).mappings().all()
            for number in range(1, count + 1) if found else ():
                rows = [_copied(table, dict(row), source, f"{stem}{number}", number) for row in found]
                connection.execute(insert(table), rows)


def _copied(table: Table, row: Mapping[str, Any], source: str, run_id: str, number: int) -> dict[str, Any]:
    """The same row of another run, with checksums of its own: they cover the run's name."""
    own = {**row, "run_id": run_id}
    if "stream_id" in own:
        own["stream_id"] = run_id + row["stream_id"][len(source) :]
    if table.name == "run":
        own |= {"name": run_id, "created_at": row["created_at"] + number}
    if table.name in _CHECKS:
        own |= _CHECKS[table.name](own)
    elif "checks" in own:
        own["checks"] = checks_of(table, own)
    return own


_CHECKS: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "report": report_checks,
    "point_chunk": lambda row: {"checks": point_checks(row)},
    "model_chunk": lambda row: {"checks": chunk_check(*map(row.__getitem__, MODEL_PARTS))},
    "layer_chunk": lambda row: {"checks": layer_checks(row["data"], *map(row.__getitem__, LAYER_PLACE))},
    "scalar_chunk": lambda row: {"checks": chunk_check(*map(row.__getitem__, LOGGED_PARTS))},
}


def evaluate(store: Store, runs: int = 1) -> None:
    """Overviews and newest values: a server's background work is not measured."""
    Summariser(store).keep_points()
    for due in store.summaries.due(runs, MADE_BY):
        keep_overview(store, due.run_id)


Family = tuple[str, int, int, int]
"""Name, runs, points of each, layers."""
FAMILIES: Final[tuple[Family, ...]] = (
    ("layers", 10, 2_000, 200),
    ("layers-long", 1, 10_000, 200),
    ("model", 50, 10_000, 0),
    ("model-long", 1, 100_000, 0),
)


def populate(
    store: Store, families: Iterable[Family], seed: int, then: Callable[[Store, str], None] | None = None
) -> None:
    """Fill with runs of `twenty` statistics: NAME-0, NAME-1, …, where there is one NAME.

    then: called with the first run of each family, before that is copied.
    """
    for name, runs, points, layers in families:
        first = name if runs == 1 else f"{name}-0"
        seal_run(store, first, twenty(layers), points, seed=seed)
        if then is not None:
            then(store, first)
        if runs > 1:
            copy_often(store, first, runs - 1)


def numbers_in(families: Iterable[Family]) -> int:
    """Numbers that these hold."""
    return sum(runs * points * len(TWENTY) * (layers + 1) for _, runs, points, layers in families)
