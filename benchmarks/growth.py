"""Costs that grow with the number of servers, and with the number of runs.

Servers: 1, 2 and 4 on one PostgreSQL take the same reports of 500 numbers in turns, over 8 connections, until all
are sealed; CPU a report of the servers and of PostgreSQL, so that it holds on a busy machine, too. Runs: one of the
average size that docs/sizing.md reckons with goes through journal, sealer and archive, and its traces are counted.
The same catalogue with `--runs` runs (100,000) is then asked for a page of its table, and swept: rows and empty
files of every archived file, without the numbers.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import obstore
from collage_server.store import PostgresqlStore, Store, schema
from collage_server.store.archive.file_storage import Bucket, Folder
from collage_server.store.archive.paths import archived_path
from collage_server.store.engine.database_files import checkpoint_log
from collage_server.store.records import TableQuery
from sqlalchemy import delete, func, insert, select, update

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._population import SMALL, copy_often, evaluate, register, requests
from benchmarks._serving import Connection, cpu_seconds, run_cluster, serving
from benchmarks.archive import filled, opened, reports
from collage_monitor import wire

__all__ = ["LAYERS", "POINTS", "Left", "left_behind", "measure_servers"]

SERVERS: Final = (1, 2, 4)
CONNECTIONS: Final = 8
REPORTS: Final = 480
"""Of each connection and round."""
POINTS, LAYERS = 500, 100
"""Of a run of average size: a million numbers, with 20 statistics."""
_COPIES: Final = 100
_RUNS: Final = 100_000
_LATER: Final = 1e5
_DATABASE: Final = "collage.sqlite"


def measure_servers(folder: Path, rounds: int) -> Iterator[Figure]:
    """CPU a report with each number of servers, in turns; nothing without PostgreSQL on this machine."""
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in SERVERS}
    with run_cluster() as cluster:
        if cluster is None:
            return
        url, postgres = cluster
        for number in range(rounds):
            for count in SERVERS:
                where = folder / f"{number}-{count}"
                found[count].append(_taken(where, count, url, postgres))
    for count, taken in found.items():
        servers, database = zip(*taken, strict=True)
        yield Figure(f"{count} servers: CPU a report, servers", "µs", tuple(1e6 * value for value in servers))
        yield Figure(f"{count} servers: CPU a report, PostgreSQL", "µs", tuple(1e6 * value for value in database))


def _taken(folder: Path, count: int, url: str, postgres: int) -> tuple[float, float]:
    """CPU seconds per report of these servers together, and of PostgreSQL, until their reports are sealed."""
    with ExitStack() as stack:
        entered = [
            stack.enter_context(serving(folder / str(which), database=url, archive="off")) for which in range(count)
        ]
        run_id = folder.name
        register(entered[0][1], run_id, SMALL, CONNECTIONS)
        encoded = [requests(f"{run_id}-{rank}", SMALL, 0, REPORTS, 1) for rank in range(CONNECTIONS)]
        before = _cpu(entered), cpu_seconds(postgres)
        with ThreadPoolExecutor(CONNECTIONS) as threads:
            list(threads.map(lambda rank: _send(entered[rank % count][1], encoded[rank]), range(CONNECTIONS)))
        with closing(PostgresqlStore(url, stale_after_seconds=600.0)) as store:
            store.open()
            store.runs.update(run_id, wire.RunUpdate(state="finished"), time.time())
            while run_id in store.journal.runs():
                time.sleep(0.5)
        reports_sent = CONNECTIONS * REPORTS
        return (_cpu(entered) - before[0]) / reports_sent, (cpu_seconds(postgres) - before[1]) / reports_sent


def _cpu(servers: list[tuple[int, int]]) -> float:
    return sum(cpu_seconds(process) for process, _ in servers)


def _send(port: int, encoded: list[bytes]) -> None:
    with Connection(port) as connection:
        connection.send(encoded)


class Left(NamedTuple):
    """The traces of a finished run: files, their bytes and those of their footers, and all bytes of its rows."""

    files: int
    file_bytes: float
    footer_bytes: float
    database_bytes: float


def left_behind(folder: Path, points: int, layers: int, seed: int, copies: int = _COPIES) -> Left:
    """A run through journal, sealer and archive; the database's bytes from so many copies of its rows."""
    with ExitStack() as stack:
        store = opened(stack, folder, Folder(folder / "archive"))
        filled(store, "run", layers, reports(layers, points, seed))
        table = schema.segment
        with store.reading() as connection:
            columns = (func.count(), func.sum(table.c.bytes), func.sum(func.length(table.c.footer)))
            files, size, footers = connection.execute(select(*columns)).one()
        before = _size(store, folder)
        copy_often(store, "run", copies)
        database = (_size(store, folder) - before) / copies
    return Left(int(files), float(size), float(footers), database)


def _size(store: Store, folder: Path) -> int:
    while store.release_space():
        pass
    checkpoint_log(folder / _DATABASE)
    return (folder / _DATABASE).stat().st_size


def measure_catalogue(folder: Path, runs: int, rounds: int, left: Left, seed: int) -> Iterator[Figure]:
    """A page of the table, and the hourly sweep, where so many runs have ended; files are empty, in memory."""
    with ExitStack() as stack:
        bucket = Bucket("memory:///", folder / "cache", 2**20)
        store = opened(stack, folder, bucket)
        filled(store, "run", 4, reports(4, 20, seed))
        evaluate(store)
        _multiply(store, runs, left.files)
        for path in _paths(store):
            obstore.put(bucket._bucket, path, b"")
        # Once before, for what the run itself had left.
        store.archiving.sweep(time.time() + _LATER)  # type: ignore[union-attr]
        page = partial(store.table.page, TableQuery(), time.time(), 600.0)
        yield Figure(f"{runs:,} runs: the table's first page", "CPU-ms", _cpu_ms(page, rounds))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sweep = partial(_swept, store)
        yield Figure(f"{runs:,} runs, {left.files * runs:,} files: a sweep", "CPU-ms", _cpu_ms(sweep, rounds))
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        yield Figure("memory that a sweep takes", "MiB", (more,))


def _multiply(store: Store, runs: int, files: int) -> None:
    """So many runs of so many files each; rows of files without footers."""
    table = schema.segment
    with store.engine.begin() as connection:
        row = dict(connection.execute(select(table)).mappings().first() or {})
        connection.execute(delete(table))
        rows = [{**row, "first_chunk": number, "last_chunk": number, "footer": b""} for number in range(files)]
        for number, entry in enumerate(rows):
            entry["path"] = archived_path("p", "run", 1, 1, f"{number}-{number}-{number:032x}.parquet")
        connection.execute(insert(table), rows)
    copy_often(store, "run", runs - 1)
    with store.engine.begin() as connection:
        own = func.replace(table.c.path, "/run=run/", "/run=" + table.c.run_id + "/")
        connection.execute(update(table).values(path=own))


def _paths(store: Store) -> list[str]:
    with store.reading() as connection:
        return list(connection.execute(select(schema.segment.c.path)).scalars())


def _swept(store: Store) -> None:
    if store.archiving is None or store.archiving.sweep(time.time() + _LATER):
        raise RuntimeError("a file that a row names was swept")


def _cpu_ms(work: Callable[[], Any], rounds: int) -> tuple[float, ...]:
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - began))
    return tuple(taken)


def command(arguments: list[str]) -> int:
    """The command line: `--runs`, then what every benchmark takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--runs", type=int, default=_RUNS)
    chosen, others = parser.parse_known_args(arguments)

    def measure(options: Options) -> Measuring:
        rounds = options.rounds or 3
        with tempfile.TemporaryDirectory() as name:
            yield from measure_servers(Path(name), rounds)
            left = left_behind(Path(name) / "left", POINTS, LAYERS, options.seed)
            yield Figure("a run of a million numbers leaves: files", "", (left.files,))
            for what in ("file_bytes", "footer_bytes", "database_bytes"):
                yield Figure(f"a run of a million numbers leaves: {what}", "bytes", (getattr(left, what),))
            yield from measure_catalogue(Path(name) / "catalogue", chosen.runs, rounds, left, options.seed)
        return [f"{rounds} rounds; {CONNECTIONS} connections, {REPORTS} reports each, one a request"]

    return main("growth", __doc__ or "", measure, others)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
