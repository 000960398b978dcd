"""How long questions about few runs take where 10,000 are stored, through HTTP, SQLite and PostgreSQL in turns.

Each run has 32 measured steps × 4 layers × 20 statistics, went through journal, sealer and evaluation, and has rows
of its own. Asked and gated as `benchmarks.query` does it: beside each question its reference, the rows and columns
that it is about read by key, all runs counted where it counts them, and its answer encoded once. Each round asks
for one run less, or for another run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from collage_server.store import Store

from benchmarks._harness import Measuring, Options, main
from benchmarks._population import EDQ, NOW, evaluate, populate
from benchmarks.query import Question, StoredColumns, StoredRows, measure_answers
from collage_monitor import wire

RUNS: Final = 10_000
STEPS, LAYERS = 32, 4
_PAGE: Final = 50
_DEEP: Final = 5_000
_TABLES: Final = ("run", "run_tag", "attempt", "run_latest", "stream")
_TABLE_LIMITS: Final = ((10.0, 8.0), (10.0, 12.0))


def fill(store: Store, seed: int, runs: int = RUNS) -> None:
    """One run as if it had been sent, and the others like it."""
    populate(store, [("run", runs, STEPS, LAYERS)], seed, _finish)


def _finish(store: Store, run_id: str) -> None:
    store.runs.update(run_id, wire.RunUpdate(state="finished", group="sweep", tags=["a", "b"]), NOW)
    while store.sealing.seal(run_id, NOW):
        pass
    evaluate(store)


def _newest(place: int, count: int = _PAGE) -> list[str]:
    """Runs from so deep in the list on."""
    return [f"run-{RUNS - 1 - place - i}" for i in range(count)]


def _rows(runs: list[str], *more: str) -> StoredRows:
    return StoredRows((*_TABLES, *more), runs, counted=bool(more))


def questions() -> list[Question]:
    """The requests of the dashboard's first page, and of a script that goes through all runs."""
    ten = [f"run-{999 * i + 1}" for i in range(10)]
    compared = "&".join(f"run={run}" for run in ten)
    one = f"run-{_DEEP}"
    first, deep = (_rows(_newest(place), "run_summary") for place in (0, _DEEP))
    return [
        Question("the first page of the table", ["/run-table?limit={points}"], _PAGE, [first], _TABLE_LIMITS),
        Question(
            "a page in the middle of the table",
            [f"/run-table?limit={{points}}&offset={_DEEP}"],
            _PAGE,
            [deep],
            _TABLE_LIMITS,
        ),
        Question("the table by EDQ", ["/run-table?sort=edq_ratio&limit={points}"], _PAGE, [first], _TABLE_LIMITS),
        Question(
            "the list with newest values",
            ["/runs?limit={points}"],
            _PAGE,
            [_rows(_newest(0)), StoredColumns("model_chunk", _newest(0))],
            ((30, 40), (6, 10)),
        ),
        Question(
            "newest values of a run",
            ["/runs/run-{points}/latest"],
            _DEEP,
            [_rows([one]), StoredColumns("model_chunk", [one]), StoredColumns("layer_chunk", [one], 1, EDQ)],
            # One run's rows are read in a tenth of a millisecond: beside them even 23 statements by key are many.
            ((150, 80), (25, 25)),
        ),
        Question(
            "10 of the runs compared",
            [f"/compare?{compared}&metric=edq_ratio&points={{points}}"],
            1000,
            [_rows(ten), StoredColumns("point_chunk", ten), StoredColumns("model_chunk", ten)],
            ((30, 30), (6, 12)),
        ),
    ]


def measure(options: Options) -> Measuring:
    """Fill with 10,000 runs, then ask every question of both databases, warm and cold."""
    into: Callable[[Store], Any] = partial(fill, seed=options.seed)
    notes = yield from measure_answers(options, questions(), into)
    return [f"{RUNS} runs on each", *notes]


if __name__ == "__main__":
    sys.exit(main("runs", __doc__ or "", measure))
