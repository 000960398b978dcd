"""Synthetic traces of a ratio over measured steps, with and without a change, drawn by seed."""

from dataclasses import dataclass

import numpy as np

from collage_monitor.onset import find_onset

__all__ = ["Trace", "changed", "steady", "within_one_interval"]

EVERY = 10


@dataclass(frozen=True)
class Trace:
    """steps [points], the model's and the layers' series; the change began after point `at` (None: no change)."""

    steps: list[int]
    model: np.ndarray
    layers: dict[str, np.ndarray]
    at: int | None


def noise(generator, points, kind):
    """Noise of standard deviation 1: normal, Student's with 3 degrees, or an autoregression of order 1."""
    if kind == "heavy tails":
        return generator.standard_t(3, points) / np.sqrt(3)
    normal = generator.normal(size=points)
    if kind != "autocorrelated":
        return normal
    hold = generator.uniform(0.3, 0.8)
    for index in range(1, points):
        normal[index] = hold * normal[index - 1] + np.sqrt(1 - hold**2) * normal[index]
    return normal


def trend(generator, points, kind):
    """What a schedule makes of a ratio: nothing, a slope, a cosine, a warm-up that bends or saturates."""
    time = np.arange(points) / points
    size = generator.uniform(0.02, 0.3)
    if kind == "slope":
        return size * time
    if kind == "cosine":
        return size * 0.5 * (1 + np.cos(np.pi * time))
    if kind == "linear warm-up":
        return size * np.minimum(time / generator.uniform(0.1, 0.4), 1.0)
    if kind == "saturating warm-up":
        return size * (1 - np.exp(-time / generator.uniform(0.05, 0.2)))
    return np.zeros(points)


NOISES = ("normal", "heavy tails", "autocorrelated")
TRENDS = ("none", "slope", "cosine", "linear warm-up", "saturating warm-up")


def steady(seed):
    """A trace without a change."""
    generator = np.random.default_rng([1, seed])
    points = int(generator.integers(30, 128))
    told, bent = NOISES[seed % 3], TRENDS[seed // 3 % 5]
    level = 10 ** generator.uniform(-3.5, -1.3)
    count = int(generator.choice([0, 0, 12, 40]))
    return drawn(generator, points, told, bent, level, dict.fromkeys(range(count), 0.0), 0.0)


def changed(seed):
    """A trace with one change, a step or a ramp of two or three points, 6 to 30 times the noise.

    Of the model alone, of few layers, or of all.
    """
    generator = np.random.default_rng([2, seed])
    points = int(generator.integers(40, 128))
    told, bent = NOISES[seed % 3], TRENDS[seed // 3 % 3]
    where = seed // 18 % 3
    level = 10 ** generator.uniform(-3, -1.5)
    size = -level * generator.uniform(8 if told == "autocorrelated" else 6, 30)
    at = int(generator.integers(12, points - 12))
    length = int(generator.integers(2, 4)) if seed // 9 % 2 else 1
    rise = size * np.clip((np.arange(points) - at) / length, 0.0, 1.0)
    layers = {index: rise if where == 2 or index < 3 else 0.0 for index in range(40 if where else 0)}
    return drawn(generator, points, told, bent, level, layers, rise * (3 / 40 if where == 1 else 1.0), at)


def drawn(generator, points, told, bent, level, changes, change, at=None):
    """changes: of each layer; change: of the model. A third of the traces lack a tenth of their points."""
    common = trend(generator, points, bent)
    layers = {
        f"layer {index}": 0.9 - generator.uniform(0, 1.2) * common + level * noise(generator, points, told) + own
        for index, own in changes.items()
    }
    model = 0.9 - common + level * noise(generator, points, told) + change
    if generator.random() <= 1 / 3:
        missing = generator.random(points) < 0.1
        for values in (model, *layers.values()):
            values[missing] = np.nan
    return Trace([EVERY * (index + 1) for index in range(points)], model, layers, at)


def within_one_interval(trace):
    """Whether the change is found within one measured interval of where it began; between measured points, if some
    are missing there."""
    found = find_onset(trace.steps, trace.model, trace.layers)
    if found is None or trace.at is None:
        return found is None and trace.at is None
    began = trace.steps[trace.at]
    return found.last_before - EVERY <= began <= max(found.last_before + EVERY, found.first_changed - EVERY)
