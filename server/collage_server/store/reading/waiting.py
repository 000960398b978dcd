"""Reports that stand in no chunk yet: a few are read at once, of many first where they stand, then slab by slab."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, TextClause, text

from collage_server.store.chunks.contributors import Contributors
from collage_server.store.contract import IntArray, Selection, StreamRecord
from collage_server.store.journal.reports import read_reports
from collage_server.store.reading.assemble import Places, visible
from collage_server.store.reading.run_view import RunView

__all__ = ["SLAB_BYTES", "ScalarRow", "Slab", "Waiting", "largest_row", "read_waiting", "waiting_rows"]

SLAB_BYTES: Final = 2**24
"""What a reader takes of the journal into memory at once; a step is never divided."""
_ROW_BYTES: Final = 512
_SPANS_A_STATEMENT: Final = 256


class ModelRow(NamedTuple):
    """A row of the journal with what `model_piece` needs."""

    run_id: str
    stream_id: str
    seq: int
    step: int
    time: float
    statistic_count: int
    model: bytes


class LayerRow(NamedTuple):
    """A row of the journal with what `layer_piece` needs."""

    run_id: str
    stream_id: str
    seq: int
    step: int
    time: float
    statistic_count: int
    layer_count: int
    statistics: bytes


class ScalarRow(NamedTuple):
    """A row of the journal with what was logged."""

    run_id: str
    stream_id: str
    seq: int
    step: int
    time: float
    scalars: str


class PlaceRow(NamedTuple):
    """Where a row of the journal stands."""

    run_id: str
    stream_id: str
    seq: int
    step: int


_Kind = TypeVar("_Kind", ModelRow, LayerRow, ScalarRow, PlaceRow)


class Slab(NamedTuple):
    """Rows of some steps of an attempt; `shards` is the most that any step of the attempt has, 0: any of these."""

    rows: Sequence[Any]
    shards: int


@dataclass(frozen=True, eq=False)
class Waiting:
    """Measured reports of one attempt that stand in no chunk, by their steps.

    Of a few the `rows` are known. Of many only where they stand is, an entry a row in each array.
    """

    steps: IntArray
    rows: Sequence[Any] | None = None
    streams: IntArray | None = None
    seqs: IntArray | None = None
    layers: bool = False
    slab_bytes: int = SLAB_BYTES

    def chosen(self, which: NDArray[np.bool_]) -> Waiting:
        """Only some of them."""
        return replace(
            self,
            steps=self.steps[which],
            rows=None if self.rows is None else list(compress(self.rows, which)),
            streams=None if self.streams is None else self.streams[which],
            seqs=None if self.seqs is None else self.seqs[which],
        )

    def slabs(self, view: RunView, known: Contributors) -> Iterator[Slab]:
        """All rows, a few at once; many in order of their steps, a step's rows together, without those unseen."""
        if self.rows is not None or self.streams is None or self.seqs is None:
            yield Slab(self.rows or (), 0)
            return
        order = _seen_order(view, self.streams, self.steps, known)
        if not len(order):
            return
        starts = np.flatnonzero(np.diff(self.steps[order], prepend=-1))
        shards = int(np.diff(starts, append=len(order)).max())
        size = max(self.slab_bytes // largest_row(view, layers=self.layers), 1)
        cuts = [0, *starts[1:][np.diff(starts // size) > 0].tolist(), len(order)]
        for first, last in pairwise(cuts):
            chosen = order[first:last]
            yield Slab(_read(view, self.streams[chosen], self.seqs[chosen], self.layers), shards)


def read_waiting(
    connection: Connection, views: Mapping[str, RunView], selection: Selection, slab_bytes: int, *, layers: bool
) -> dict[str, dict[int, Waiting]]:
    """Unsealed measured reports by run and attempt, for `layer_piece` or for `model_piece`."""
    kind, present = (LayerRow, "statistics") if layers else (ModelRow, "model")
    rows: dict[str, dict[int, list[Any]]] = {run_id: defaultdict(list) for run_id in views}
    held = 0
    with closing(waiting_rows(connection, views, kind, present, selection)) as found:  # type: ignore[type-var]
        for stream, row in found:
            rows[stream.run_id][stream.attempt].append(row)
            held += _ROW_BYTES + len(getattr(row, present))
            if held > slab_bytes:
                break
        else:
            return {
                run_id: {attempt: _few(members) for attempt, members in by_attempt.items()}
                for run_id, by_attempt in rows.items()
            }
    del rows
    return _places(connection, views, selection, slab_bytes, layers=layers)


def _few(rows: list[Any]) -> Waiting:
    rows.sort(key=attrgetter("seq"))
    return Waiting(np.array([row.step for row in rows], dtype=np.int64), rows)


def _places(
    connection: Connection, views: Mapping[str, RunView], selection: Selection, slab_bytes: int, *, layers: bool
) -> dict[str, dict[int, Waiting]]:
    packed: dict[str, dict[int, array[int]]] = {run_id: defaultdict(lambda: array("q")) for run_id in views}
    present = "statistics" if layers else "model"
    for stream, row in waiting_rows(connection, views, PlaceRow, present, selection):
        packed[stream.run_id][stream.attempt].extend((row.step, stream.stream, row.seq))
    found: dict[str, dict[int, Waiting]] = {run_id: {} for run_id in views}
    for run_id, by_attempt in packed.items():
        for attempt, values in by_attempt.items():
            steps, streams, seqs = np.frombuffer(values, dtype=np.int64).reshape(-1, 3).T
            found[run_id][attempt] = Waiting(steps, None, streams, seqs, layers, slab_bytes)
    return found


def waiting_rows(
    connection: Connection, views: Mapping[str, RunView], kind: type[_Kind], present: str, selection: Selection
) -> Generator[tuple[StreamRecord, _Kind], None, None]:
    """Rows that stand in no chunk yet, with their streams."""
    streams = {name: stream for view in views.values() for name, stream in view.streams.items()}
    for slab in read_reports(connection, list(views), kind._fields, present, selection):
        for row in map(kind._make, slab):
            stream = streams.get(row.stream_id)
            wanted = stream is not None and selection.rank in (None, stream.rank)
            if stream is not None and wanted and not views[row.run_id].sealed(row.stream_id, row.seq):
                yield stream, row


def _seen_order(view: RunView, streams: IntArray, steps: IntArray, known: Contributors) -> IntArray:
    """Indices of the rows that are seen (as `seen_rows` finds them), by step and stream."""
    records = sorted(view.streams.values(), key=lambda stream: stream.stream)
    numbers = np.array([stream.stream for stream in records], dtype=np.int64)
    place = np.searchsorted(numbers, streams)
    ranks = np.array([stream.rank for stream in records], dtype=np.int64)[place]
    contested = np.array([view.is_contested(stream.stream_id) for stream in records], dtype=bool)[place]
    left = np.arange(len(steps))
    if known:
        rows = zip(contested.tolist(), steps.tolist(), ranks.tolist(), strict=True)
        left = np.flatnonzero([not (other and rank in known.get(step, ())) for other, step, rank in rows])
    nothing = np.zeros(len(left), dtype=np.int64)
    places = Places(streams[left], nothing, ranks[left], steps[left], nothing.astype(np.float64))
    left = left[visible(places, {})]
    order: IntArray = left[np.lexsort((streams[left], steps[left]))]
    return order


def largest_row(view: RunView, *, layers: bool) -> int:
    """Bytes that a row of the run's journal takes at most, with or without its layers."""
    widths = [len(stream.layers) if layers else 1 for stream in view.streams.values()]
    counts = [len(stream.statistics) for stream in view.streams.values()]
    numbers = (width * count for width, count in zip(widths, counts, strict=True))
    return _ROW_BYTES + 8 * max(numbers, default=0)


def _read(view: RunView, streams: IntArray, seqs: IntArray, layers: bool) -> list[Any]:
    """These rows, by step, stream and number: a stream may tell of a step twice."""
    kind = LayerRow if layers else ModelRow
    names = {stream.stream: name for name, stream in view.streams.items()}
    order = np.lexsort((seqs, streams))
    streams, seqs = streams[order], seqs[order]
    first = np.append(True, (np.diff(streams) != 0) | (np.diff(seqs) != 1))
    last = np.append(first[1:], True)
    spans = list(zip(streams[first].tolist(), seqs[first].tolist(), seqs[last].tolist(), strict=True))
    rows: list[Any] = []
    for start in range(0, len(spans), _SPANS_A_STATEMENT):
        some = spans[start : start + _SPANS_A_STATEMENT]
        count = 1 << (len(some) - 1).bit_length()
        named = [(names[number], low, high) for number, low, high in some]
        named += [("", 0, -1)] * (count - len(some))
        values = {f"v{i}": value for i, value in enumerate(value for span in named for value in span)}
        found = view.connection.execute(_by_span(kind._fields, count), {**values, "run_id": view.run_id})
        rows += map(kind._make, found)
    return sorted(rows, key=lambda row: (row.step, view.streams[row.stream_id].stream, row.seq))


@lru_cache(maxsize=64)
def _by_span(columns: tuple[str, ...], count: int) -> TextClause:
    values = ", ".join(f"(:v{3 * i}, :v{3 * i + 1}, :v{3 * i + 2})" for i in range(count))
    return text(
        f"WITH w (stream_id, first_seq, last_seq) AS (VALUES {values}) "
        f"SELECT {', '.join(f't.{name}' for name in columns)} FROM w CROSS JOIN report t "
        "WHERE t.run_id = :run_id AND t.stream_id = w.stream_id AND t.seq BETWEEN w.first_seq AND w.last_seq"
    ).execution_options(blocks=True)
