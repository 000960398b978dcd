"""Reports for benchmarks of the server: two shapes, registered streams, and whole requests encoded beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks._serving import Connection, request_of
from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS

__all__ = ["LARGE", "SMALL", "Shape", "batches", "register", "requests"]

_PATTERNS: Final = 16
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


@dataclass(frozen=True)
class Shape:
    """What every report of a stream holds."""

    name: str
    layers: int
    statistics: tuple[str, ...]

    @property
    def numbers(self) -> int:
        """Numbers a report, the model's totals beside them not counted."""
        return self.layers * len(self.statistics)


SMALL: Final = Shape("small", 50, _TOTALS)
LARGE: Final = Shape("large", 200, (*_TOTALS, *_MORE, *_STATES, *_BINS))


def register(port: int, run_id: str, shape: Shape, streams: int) -> None:
    """A run with one attempt and so many streams, RUN_ID-0, RUN_ID-1, …, one a rank."""
    layers = [
        wire.Layer(name=f"layer.{i}", shape=[64, 64], dtype="bfloat16", elements=4096) for i in range(shape.layers)
    ]
    with Connection(port) as connection:
        connection.post("/projects/p/runs", wire.encode_message(wire.RunCreate(run_id=run_id)))
        attempt = wire.AttemptCreate(launch_id="l", first_step=0)
        connection.post(f"/runs/{run_id}/attempts", wire.encode_message(attempt))
        for rank in range(streams):
            stream = wire.StreamCreate(
                stream_id=f"{run_id}-{rank}",
                launch_id="l",
                rank=rank,
                world_size=streams,
                layers=layers,
                statistics=list(shape.statistics),
            )
            connection.post(f"/runs/{run_id}/streams", wire.encode_message(stream))


def batches(shape: Shape, first_seq: int, count: int, batch: int, seed: int) -> Iterator[wire.ReportBatch]:
    """Batches of `batch` reports each, `count` reports in all, a step a report."""
    tables = np.random.default_rng(seed).random((_PATTERNS, len(shape.statistics), shape.layers))
    packed = [(wire.array_to_bytes(table), wire.array_to_bytes(table.sum(axis=1))) for table in tables]
    for start in range(first_seq, first_seq + count, batch):
        yield wire.ReportBatch(
            reports=[
                wire.Report(
                    seq=seq,
                    step=seq,
                    time=1.7e9 + seq,
                    scalars={"loss": 2.5, "tokens": 1024.0 * seq},
                    statistic_count=len(shape.statistics),
                    layer_count=shape.layers,
                    statistics=packed[seq % _PATTERNS][0],
                    model=packed[seq % _PATTERNS][1],
                )
                for seq in range(start, min(start + batch, first_seq + count))
            ]
        )


def requests(stream_id: str, shape: Shape, first_seq: int, count: int, batch: int, seed: int = 0) -> list[bytes]:
    """The same as whole HTTP requests of a stream."""
    path = f"/streams/{stream_id}/reports"
    return [request_of(path, wire.encode_batch(entry)) for entry in batches(shape, first_seq, count, batch, seed)]
