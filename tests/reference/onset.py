"""The change point by its definition: jumps are rows of a [points, points] matrix, ramps are tried one by one, and
each series is compared with each. Quadratic in points and in series."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

WINDOW, BESIDE, LONGEST = 12, 6, 5


def onset(steps, model, layers, least=0.0):
    """(last before, first changed, settled, before, after, [(layer, before, after)]), or None."""
    names, table = list(layers), np.array([model, *layers.values()], dtype=float)
    known = np.isfinite(table).any(0)
    table, steps = table[:, known], np.array(steps)[known]
    if len(steps) < 24:
        return None
    rows = [row for row in range(len(table)) if np.isfinite(table[row]).sum() >= max(24, 0.5 * len(steps))]
    if not rows:
        return None
    times = (steps - steps[0]) / np.median(np.diff(steps))
    series = [cleaned(filled(table[row], times)) for row in rows]
    matrix = jump_matrix(times)
    threshold = 6.0 + 0.25 * np.log2(len(rows))
    found = {}
    for index, values in enumerate(series):
        if not promising(values, matrix):
            continue
        ramp = ramp_at(int(np.abs(matrix @ values).argmax()), values, times)
        if ramp and size(values, ramp, times, matrix) > threshold and gap(values, ramp) >= least:
            found[index] = ramp
    if not found:
        return None
    ramp, together = common(found, series, times)
    changed = [
        index
        for index, values in enumerate(series)
        if index in together or (size(values, ramp, times, matrix) > 4.0 and gap(values, ramp) >= least)
    ]
    changed.sort(key=lambda index: -gap(series[index], ramp))
    of_model = levels(filled(table[0], times), ramp) if np.isfinite(table[0]).any() else (np.nan, np.nan)
    of_layers = [(names[rows[i] - 1], *levels(series[i], ramp)) for i in changed if rows[i]]
    return int(steps[ramp[0]]), int(steps[ramp[0] + 1]), int(steps[ramp[1]]), *of_model, of_layers


def filled(values, times):
    known = np.isfinite(values)
    return np.interp(times, times[known], values[known])


def cleaned(values):
    middle = np.median(sliding_window_view(np.pad(values, 2, mode="edge"), 5), axis=1)
    away = np.abs(values - middle)
    scale = 1.4826 * np.median(away[away > 0]) if (away > 0).any() else 0.0
    return np.where(away > 5.0 * scale, middle, values)


def jump_matrix(times):
    """[points, points]: row i makes of a series its jump between point i and i + 1; 0 near the ends."""
    matrix = np.zeros((len(times), len(times)))
    for place in range(BESIDE - 1, len(times) - BESIDE):
        here = 0.5 * (times[place] + times[place + 1])
        for sign, side in (
            (-1, slice(max(place + 1 - WINDOW, 0), place + 1)),
            (1, slice(place + 1, place + 1 + WINDOW)),
        ):
            centred = times[side] - times[side].mean()
            line = 1 / len(centred) + (here - times[side].mean()) * centred / (centred @ centred)
            matrix[place, side] += sign * line
    return matrix


def promising(values, matrix):
    noise = 1.4826 * np.median(np.abs(np.diff(values, 2))) / np.sqrt(6)
    return np.abs(matrix @ values).max() > 3.5 * noise * np.sqrt((matrix**2).sum(1).max())


def size(values, ramp, times, matrix):
    rise = ramp_over(times, *ramp)
    near = slice(max(ramp[0] + 1 - WINDOW, 0), min(ramp[1] + WINDOW, len(times)))
    line, shape = without_parabola(times[near], values[near]), without_parabola(times[near], rise[near])
    height = line @ shape / (shape @ shape)
    inner = slice(BESIDE - 1, len(times) - BESIDE)
    noise = 1.4826 * np.median(np.abs((matrix @ (values - height * rise))[inner]))
    return abs(height) / max(noise, 1e-9 * np.abs(values).max(), np.finfo(float).tiny)


def ramp_at(place, values, times):
    near = slice(max(place + 1 - WINDOW, 0), min(place + 1 + WINDOW, len(values)))
    squares = ramps(near, values, times)
    if not squares:
        return None
    best = min(squares, key=lambda ramp: squares[ramp])
    bent = min(
        left_over(values[near], times[near], np.maximum(times[near] - bend, 0.0))
        for bend in times[near.start + 1 : near.stop - 1]
    )
    return best if squares[best] <= 1000.0 ** (-2 / (near.stop - near.start)) * bent else None


def ramps(near, values, times):
    """By (start, end), what a ramp leaves."""
    margin = BESIDE // 2
    return {
        (start, start + length): left_over(values[near], times[near], ramp_over(times, start, start + length)[near])
        * 1.1 ** (length - 1)
        for start in range(near.start + margin, near.stop - margin)
        for length in range(1, LONGEST + 1)
        if start + length <= near.stop - margin
    }


def ramp_over(times, start, end):
    return np.clip((times - times[start]) / (times[end] - times[start]), 0.0, 1.0)


def left_over(values, times, further):
    plain, shape = without_parabola(times, values), without_parabola(times, further)
    explained = (shape @ plain) ** 2 / max(shape @ shape, np.finfo(float).tiny)
    return max(plain @ plain - explained, 0.0) + len(values) * (1e-9 * np.abs(values).max()) ** 2


def without_parabola(times, values):
    basis, _ = np.linalg.qr(np.vander(times - times.mean(), 3))
    return values - (values @ basis) @ basis.T


def common(found, series, times):
    groups = {index: {other for other in found if abs(found[other][0] - found[index][0]) <= 2} for index in found}
    together = max(groups.values(), key=lambda group: (len(group), 0 in group))
    first = min(found[index][0] for index in together)
    near = slice(max(first + 1 - WINDOW, 0), min(first + 1 + WINDOW, len(times)))
    squares = [ramps(near, series[index], times) for index in together]
    costs = {ramp: sum(np.log(one[ramp] / min(one.values())) for one in squares) for ramp in squares[0]}
    return min(costs, key=lambda ramp: costs[ramp]), together


def levels(values, ramp):
    before = values[max(ramp[0] + 1 - WINDOW, 0) : ramp[0] + 1]
    return float(np.median(before)), float(np.median(values[ramp[1] : ramp[1] + WINDOW]))


def gap(values, ramp):
    before, after = levels(values, ramp)
    return abs(after - before)
