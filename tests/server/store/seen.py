"""What a reader sees of a run, as plain values that can be compared before and after."""

from __future__ import annotations

import numpy as np
from collage_server.store import Selection
from sqlalchemy import func, select

from tests.server.reads import latest_point, layer_points, model_points, scalar_points
from tests.server.samples import LAYERS, STATISTICS
from tests.server.store.contract import NOW

__all__ = ["AFTER_SILENCE", "ALL", "arrays_of", "plain", "rows", "seal_all", "seen", "unchanged"]

ALL = Selection()


def seen(store, run_id="r1", ranks=(None,)):
    """Everything that a reader can see of a run, as plain values."""
    found = {}
    for rank in ranks:
        for name, chosen in (
            ("all", Selection(rank=rank)),
            ("middle", Selection(rank=rank, first_step=7, last_step=50)),
            ("one", Selection(rank=rank, first_step=20, last_step=20)),
        ):
            found[f"model {name} {rank}"] = plain(model_points(store, run_id, None, chosen))
            scalars = scalar_points(store, run_id, None, chosen)
            found[f"scalars {name} {rank}"] = {key: arrays(entry) for key, entry in scalars.items()}
    for name, chosen in (("all", ALL), ("middle", Selection(first_step=7, last_step=50))):
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
            keys = {*held, *after[name]}
            different = [
                (key, held.get(key), after[name].get(key)) for key in keys if held.get(key) != after[name].get(key)
            ]
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


def rows(store, table):
    with store.engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar()


AFTER_SILENCE = NOW + 601
"""When a run that nobody reports to any more counts as over, whichever rank has not come to its end."""


def seal_all(store, run_id="r1", now=NOW):
    parts = 0
    while made := store.sealing.seal(run_id, now):
        parts += made
        assert parts < 1000
    return parts
