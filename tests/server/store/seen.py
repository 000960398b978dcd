"""What a reader sees of a run, as plain values that can be compared before and after."""

import numpy as np
from collage_server.store import Selection

from tests.server.reads import latest_point, layer_points, model_points, scalar_points
from tests.server.samples import LAYERS, STATISTICS
from tests.server.store.stores import ALL

__all__ = ["ALL", "arrays_of", "plain", "seen", "unchanged"]


def seen(store, run_id="r1"):
    """Everything that a reader can see of a run, as plain values."""
    found = {}
    for name, first, last in (("all", None, None), ("middle", 7, 50), ("one", 20, 20)):
        chosen = Selection(first_step=first, last_step=last)
        found[f"model {name}"] = plain(model_points(store, run_id, None, chosen))
        scalars = scalar_points(store, run_id, None, chosen)
        found[f"scalars {name}"] = {key: arrays(entry) for key, entry in scalars.items()}
        if name != "one":
            found[f"layers {name}"] = plain(layer_points(store, run_id, STATISTICS, chosen))
            found[f"layer {name}"] = plain(layer_points(store, run_id, STATISTICS, chosen, [LAYERS[1]]))
    latest = latest_point(store, run_id)
    found["latest"] = None if latest is None else (latest.step, latest.time, arrays_of(latest.model))
    found["streams"] = store.streams.of_run(run_id)
    record = store.runs.get(run_id)
    found["run"] = (record.reports, record.first_step, record.last_step, record.scalars)
    return found


def unchanged(before, after):
    """Fail with the names of what differs, not with everything there is."""
    assert list(before) == list(after)
    for name, held in before.items():
        if isinstance(held, dict):
            pairs = {key: (held.get(key), after[name].get(key)) for key in {*held, *after[name]}}
            different = [(key, *pair) for key, pair in pairs.items() if pair[0] != pair[1]]
            assert not different, (name, different[:3])
        else:
            assert after[name] == held, name


def plain(points):
    names = ("first_steps", "steps", "times", "ranks", "counts")
    return {name: getattr(points, name).tolist() for name in names} | arrays_of(points.totals)


def arrays(entry):
    return (entry.steps.tolist(), entry.times.tolist(), repr(entry.values.tolist()))


def arrays_of(totals):
    """By key, NaN comparable; keys that nobody reported at all are as good as absent."""
    return {key: repr(values.tolist()) for key, values in sorted(totals.items()) if not np.isnan(values).all()}
