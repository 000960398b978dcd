"""Since when a number is beyond its bound: by level, so that ramps count as jumps do.

The first measured step after which it stays beyond, whatever a single point does. `onset.py` finds abrupt changes
of a metric, beyond a bound or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

from collage_monitor.onset import Onset

__all__ = ["History", "Track", "since_beyond"]

_MOST_READINGS: Final = 4


@dataclass(frozen=True)
class Track:
    """A metric over measured steps: point i merges the steps first_steps[i] to last_steps[i]; NaN: undefined."""

    first_steps: Sequence[int]
    last_steps: Sequence[int]
    values: ArrayLike

    @property
    def known(self) -> Track:
        """The track without its undefined points."""
        values = np.asarray(self.values, dtype=np.float64)
        places = np.flatnonzero(np.isfinite(values))
        if len(places) == len(values):
            return self
        chosen = places.tolist()
        firsts, lasts = ([steps[place] for place in chosen] for steps in (self.first_steps, self.last_steps))
        return Track(firsts, lasts, values[places])

    @property
    def merges(self) -> bool:
        """Whether a point merges several steps."""
        return any(first < last for first, last in zip(self.first_steps, self.last_steps, strict=True))


@dataclass(frozen=True)
class History:
    """Metrics over the whole run, those of the model by key.

    of_layer: reads a layer's metric. changes: the abrupt changes of EDQ. finer: reads the model's tracks between
    two steps, in finer points."""

    tracks: Mapping[str, Track] = field(default_factory=dict)
    of_layer: Callable[[str, str], Track | None] | None = None
    changes: Sequence[Onset] = ()
    finer: Callable[[int, int], Mapping[str, Track]] | None = None

    def since(self, key: str, layer: str | None, bound: float, *, below: bool) -> tuple[int | None, str] | None:
        """The first measured step from which a metric has stayed beyond a bound (None: from the first one on), and
        how it reads after a clause: ", since step 1,020"; None where it is not beyond it now, or not known."""
        if layer is None:
            track = self.tracks.get(key)
        else:
            track = None if self.of_layer is None else self.of_layer(key, layer)
        place = None if track is None else _first_beyond(track, bound, below=below)
        if track is None or place is None:
            return None
        begun, track = track.first_steps[:2], track.known
        # What the first measured step says is often that of a warm-up, and no state is there before it.
        if place <= 1:
            step = track.first_steps[0]
            whole = begun[0] <= 1 and step in begun
            return None, ", from the start" if whole else f", since the first measured step ({step:,})"
        for _ in range(_MOST_READINGS):
            if self.finer is None or layer is not None or not track.merges or place == 0:
                break
            finer = self.finer(track.first_steps[place - 1], track.last_steps[place]).get(key)
            within = None if finer is None else _first_beyond(finer, bound, below=below)
            if finer is None or within is None:
                break
            track, place = finer.known, within
        # The merged point was beyond the bound by its last step at the latest.
        step = track.last_steps[place]
        return step, f", since step {step:,}"


def since_beyond(track: Track, bound: float, *, below: bool) -> int | None:
    """The first measured step from which the metric has stayed beyond the bound; None if it is not beyond it now,
    or one step alone was measured."""
    place = _first_beyond(track, bound, below=below)
    if place is None:
        return None
    return track.known.first_steps[0] if place <= 1 else track.known.last_steps[place]


def _first_beyond(track: Track, bound: float, *, below: bool) -> int | None:
    """The place among the known points; one point on the other side, between points beyond, does not count."""
    values = np.asarray(track.known.values, dtype=np.float64)
    if len(values) < 2:
        return None
    beyond = values < bound if below else values > bound
    windows = sliding_window_view(np.pad(beyond, 1, mode="edge"), 3)
    most = windows.sum(axis=1) >= 2
    most[-1] = most[-1] or (len(most) > 2 and most[-2])
    inside = np.flatnonzero(~most)
    place = int(inside[-1]) + 1 if len(inside) else 0
    return place if place < len(most) else None
