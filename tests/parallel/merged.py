"""What several ranks reported, put together as the server does it: replicas once, shards added."""

from __future__ import annotations

import numpy as np

from collage_monitor.statistics import reduce_shards


def merged_layers(ranks, index):
    """{layer: {key: total}} of the `index`-th measured step over what the ranks saw."""
    held: dict[str, list] = {}
    for seen in ranks:
        statistics, totals = seen["statistics"][index], seen["totals"][index]
        for column, layer in enumerate(seen["layers"][index]):
            values = dict(zip(statistics, totals[:, column], strict=True))
            if not all(np.isnan(value) for value in values.values()):
                held.setdefault(layer.name, []).append((layer.replica, values))
    merged = {}
    for name, parts in held.items():
        lowest = min(replica for replica, _ in parts)
        chosen = [values for replica, values in parts if replica == lowest]
        keys = dict.fromkeys(key for values in chosen for key in values)
        stacked = {key: np.array([values.get(key, np.nan) for values in chosen]) for key in keys}
        merged[name] = {key: float(value) for key, value in reduce_shards(stacked, axis=0).items()}
    return merged
