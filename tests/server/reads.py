"""Single questions to a store, each from a snapshot of its own."""

from dataclasses import replace

from collage_server.exposition import samples
from collage_server.summariser import Summariser, keep_overview

__all__ = [
    "current_samples",
    "due_runs",
    "evaluate_due",
    "latest_point",
    "layer_points",
    "model_points",
    "scalar_points",
]


def model_points(store, run_id, keys, selection):
    with store.points.snapshot() as snapshot:
        return snapshot.points([run_id], keys, selection)[run_id]


def layer_points(store, run_id, keys, selection, layers=None):
    by_layer = replace(selection, by_layer=True, layers=None if layers is None else tuple(layers))
    return model_points(store, run_id, keys, by_layer)


def scalar_points(store, run_id, names, selection):
    with store.points.snapshot() as snapshot:
        return snapshot.scalars([run_id], names, selection)[run_id]


def latest_point(store, run_id):
    with store.points.snapshot() as snapshot:
        return snapshot.latest_of([run_id])[run_id]


def current_samples(app_state):
    """What /metrics shows and alerts read, the newest of every run being written first."""
    app_state.summariser.keep_points()
    return samples(app_state)


def due_runs(store, limit=100, made_by=None):
    """The runs whose overview is due, once their newest steps are written."""
    Summariser(store).keep_points()
    return store.summaries.due(limit, made_by)


def evaluate_due(store, limit=100):
    """Evaluate the due runs, as the thread does in its next round, and list them."""
    due = due_runs(store, limit)
    for entry in due:
        keep_overview(store, entry.run_id)
    return [entry.run_id for entry in due]
