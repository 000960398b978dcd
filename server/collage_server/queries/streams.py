"""Health of a run's streams beside each other: who lags."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collage_monitor import wire

__all__ = ["with_health"]


def with_health(streams: Sequence[wire.Stream]) -> list[wire.Stream]:
    """The streams with their `lag_steps` behind the furthest of their attempt."""
    furthest: dict[int, int] = {}
    for stream in streams:
        if stream.last_step is not None:
            furthest[stream.attempt] = max(furthest.get(stream.attempt, 0), stream.last_step)
    return [
        msgspec.structs.replace(
            stream,
            lag_steps=None if stream.last_step is None else furthest[stream.attempt] - stream.last_step,
        )
        for stream in streams
    ]
