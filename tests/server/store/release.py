"""A database as a release left it: every row of its schema, and what its own server answered about them.

`python -m tests.server.store.release FILE`, run at a release, writes the file that the next one's tests migrate.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
import tempfile
from pathlib import Path

from collage_server.app import create_app
from collage_server.settings import Settings
from collage_server.store.migrate import head_revision
from sqlalchemy import LargeBinary, MetaData, Table, bindparam, insert, inspect, select
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Clock, Server
from tests.server.samples import report
from tests.server.store.contract import LIMITS

__all__ = [
    "CHANGED_SINCE",
    "OLDEST",
    "PATHS",
    "PREVIOUS",
    "answers",
    "fill",
    "holds",
    "insert_rows",
    "read_release",
]

PREVIOUS = Path(__file__).parent / "release_0009.json.gz"
OLDEST = Path(__file__).parent / "release_0005.json.gz"
PATHS = (
    "/runs",
    "/runs/r1",
    "/runs/r1/series?metric=lost_update_ratio&points=10000",
    "/runs/r1/series?metric=edq_ratio&layer=blocks.0.weight&from=40&points=10000",
    "/runs/r1/series?metric=lost_update_ratio&rank=1&points=10000",
    "/runs/r1/series?metric=loss&axis=tokens",
    "/runs/r1/heatmap?metric=lost_update_ratio&points=20",
    "/runs/r1/histogram",
    "/runs/r1/layers",
    "/runs/r1/streams",
    "/runs/r1/latest",
    "/runs/r1/worst?metric=edq_ratio&k=3",
    "/runs/r2/series?metric=edq_ratio&points=10000",
    "/runs/r2/streams",
    "/runs/r1/series?metric=edq_ratio&layer=blocks.0.weight&points=2",
    "/runs/r1/series?metric=edq_ratio&points=3",
    "/runs/r2/series?metric=edq_ratio&points=7&axis=time",
    "/runs/r2/series?metric=lost_update_ratio&pattern=blocks*&points=10",
    "/runs/r2/series?metric=param_norm&points=100",
    "/runs/r2/heatmap?metric=edq_ratio&points=5",
    "/runs/r2/histogram?layer=blocks.0.weight",
    "/runs/r2/latest",
    "/runs/r2/worst?metric=edq_ratio&k=3",
    "/runs/r1/events",
    "/compare?run=r1&run=r2&metric=edq_ratio&points=50",
    "/compare?run=r1&run=r2&metric=loss&axis=tokens",
)


def fill(server):
    """Sealed, frozen and unsealed points of two ranks, two attempts, gaps, tags; a finished and a deleted run."""
    store = server.app.state.components.store
    store.sealing.limits = LIMITS
    server.run("r1", tags=["a", "b"], notes="kept", config={"lr": 0.1})
    server.attempt("r1")
    for rank in range(2):
        server.stream("r1", stream_id=f"s{rank}", rank=rank, world_size=2)
        server.reports([report(i, i + 1, rank=rank) for i in range(72 if rank else 80)], f"s{rank}")
    while store.sealing.seal("r1", server.clock.now):
        pass
    store.retention.expire("r1", {1: server.clock.now + 32.5})
    server.attempt("r1", "launch-2", 75)
    server.stream("r1", stream_id="s2", launch_id="launch-2")
    gap = wire.ReportGap(first_seq=5, last_seq=7, reason="spool_full")
    batch = wire.ReportBatch(reports=[report(i, 75 + i) for i in range(4)], gaps=[gap])
    server.post("/streams/s2/reports", batch, wire.BatchAnswer, encode=wire.encode_batch)
    for run_id in ("r2", "r3"):
        server.filled(run_id, f"{run_id}-s")
    server.send("PATCH", "/runs/r2", wire.RunUpdate(state="finished"), wire.Run)
    while store.sealing.seal("r2", server.clock.now):
        pass
    server.send("DELETE", "/runs/r3", kind=wire.Deleted)


def answers(server):
    """What the server says, by path."""
    return {path: json.loads(server.get(path)) for path in PATHS}


CHANGED_SINCE = {OLDEST: ("low", "high", "missing"), PREVIOUS: ()}
"""Endings of the fields whose numbers are made differently since a release.

0005: intervals use Student's quantile, and a gap beyond the newest report hides no missing one.
"""


def holds(answer, known, changed=()):
    """Whether an answer says all that an older server said, bit for bit; it may say more."""
    if isinstance(known, dict):
        kept = {key: value for key, value in known.items() if not (changed and key.endswith(changed))}
        return isinstance(answer, dict) and all(
            key in answer and holds(answer[key], kept[key], changed) for key in kept
        )
    if isinstance(known, list):
        return (
            isinstance(answer, list)
            and len(answer) == len(known)
            and all(holds(one, other, changed) for one, other in zip(answer, known, strict=True))
        )
    return answer == known


def read_release(path=PREVIOUS):
    """(revision, rows by table, answers by path)."""
    held = json.loads(gzip.decompress(path.read_bytes()))
    return (
        held["revision"],
        held["tables"],
        {path: held["answers"][path] for path in PATHS if path in held["answers"]},
    )


def insert_rows(connection, tables):
    """The release's rows into its own schema, as that schema stands in the database."""
    for name, rows in tables.items():
        table = Table(name, MetaData(), autoload_with=connection)
        binary = {column.name for column in table.columns if isinstance(column.type, LargeBinary)}
        if rows:
            values = [
                {key: base64.b64decode(v) if key in binary and v is not None else v for key, v in row.items()}
                for row in rows
            ]
            connection.execute(
                insert(table).values({key: bindparam(f"b_{key}") for key in rows[0]}), _bound(values)
            )


def _bound(rows):
    """Names that are no column's: some columns are called like SQL's own words."""
    return [{f"b_{key}": value for key, value in row.items()} for row in rows]


def _rows(connection, name):
    table = Table(name, MetaData(), autoload_with=connection)
    rows = connection.execute(select(table)).mappings()
    return [
        {key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in row.items()} for row in rows
    ]


def main(target):
    """Write a release's database and answers."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        app = create_app(Settings(folder=Path(folder), no_auth=True), clock=clock)
        with TestClient(app, base_url="http://127.0.0.1") as client:
            server = Server(client, clock, app)
            fill(server)
            engine = app.state.components.store.engine
            with engine.connect() as connection:
                names = [name for name in inspect(connection).get_table_names() if name != "alembic_version"]
                tables = {name: _rows(connection, name) for name in names}
            held = {"revision": head_revision(), "tables": tables, "answers": answers(server)}
    Path(target).write_bytes(gzip.compress(json.dumps(held).encode(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
