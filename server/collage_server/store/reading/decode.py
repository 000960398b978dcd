"""Totals out of journal rows: of the model [rows], and by layer [rows, layers]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from sqlalchemy import Row

from collage_monitor.table import Axis, Table
from collage_server.store.records import FloatArray, IntArray, StreamRecord

__all__ = ["Streams", "decode_layers", "decode_model", "layer_replicas", "model_replica"]

Streams = Mapping[str, StreamRecord]
_DECODED_AT_ONCE: Final = 2**22
"""Bytes of totals by layer, side by side: all at once they would stand in memory twice."""


def decode_model(streams: Streams, rows: Sequence[Row[Any]], keys: Sequence[str]) -> Table[FloatArray]:
    """Model totals [rows] by key; NaN where a row's stream does not declare the key."""
    values = np.full((len(keys), len(rows)), np.nan)
    declared: dict[tuple[str, ...], list[IntArray]] = defaultdict(list)
    for (stream_id, count), members in _rows_by_shape(rows, "statistic_count"):
        declared[streams[stream_id].statistics[:count]].append(members)
    for statistics, parts in declared.items():
        members = np.concatenate(parts)
        data = b"".join(rows[i].model for i in members.tolist())
        totals = np.frombuffer(data, dtype="<f8").reshape(len(members), len(statistics))
        for target, source in _columns(keys, statistics):
            values[target, members] = totals[:, source]
    return Table(Axis(keys), None, values)


def decode_layers(
    streams: Streams, rows: Sequence[Row[Any]], keys: Sequence[str], positions: IntArray
) -> Table[FloatArray]:
    """Layer totals [rows, layers] by key, of the layers at these positions of the run's dictionary."""
    values = np.full((len(keys), len(rows), len(positions)), np.nan)
    order = np.argsort(positions)
    ordered = positions[order]
    for (stream_id, statistic_count, layer_count), members in _rows_by_shape(
        rows, "statistic_count", "layer_count"
    ):
        stream = streams[stream_id]
        held = stream.layers[:layer_count]
        place = np.minimum(np.searchsorted(ordered, held), max(len(ordered) - 1, 0))
        sources = np.flatnonzero(ordered[place] == held) if len(ordered) else place[:0]
        if not len(sources):
            continue
        targets = order[place[sources]]
        columns = _columns(keys, stream.statistics[:statistic_count])
        width = max(_DECODED_AT_ONCE // max(8 * statistic_count * layer_count, 1), 1)
        for start in range(0, len(members), width):
            some = members[start : start + width]
            data = b"".join(rows[i].statistics for i in some.tolist())
            totals = np.frombuffer(data, dtype="<f8").reshape(len(some), statistic_count, layer_count)
            for target, source in columns:
                values[target, some[:, None], targets[None, :]] = totals[:, source][:, sources]
    return Table(Axis(keys), None, values)


def model_replica(stream: StreamRecord) -> float:
    """The replica number of all the stream's layers, where it is one number."""
    return float(stream.replicas[0]) if len(stream.replicas) else 0.0


def layer_replicas(stream: StreamRecord, positions: IntArray) -> FloatArray:
    """Replica numbers of the layers at these positions; NaN where the stream does not hold the layer."""
    placed = np.full(max(int(stream.layers.max(initial=-1)), int(positions.max(initial=-1))) + 1, np.nan)
    placed[stream.layers] = stream.replicas
    return placed[positions]


def _rows_by_shape(rows: Sequence[Row[Any]], *shape: str) -> list[tuple[tuple[Any, ...], IntArray]]:
    """Indices of rows that can be decoded together: same stream, same counts."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[(row.stream_id, *(getattr(row, name) for name in shape))].append(index)
    return [(key, np.array(members, dtype=np.int64)) for key, members in groups.items()]


def _columns(keys: Sequence[str], declared: Sequence[str]) -> list[tuple[int, int]]:
    sources = {key: index for index, key in enumerate(declared)}
    return [(target, sources[key]) for target, key in enumerate(keys) if key in sources]
