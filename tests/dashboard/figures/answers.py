"""Small answers with numbers that a test can name."""

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS


def series(values, metric="edq_ratio", *, steps=None, axis="step", layer=None, ranks=None, **more):
    """A series with these values, at steps 10, 20, … if no others are given."""
    steps = [10 * (place + 1) for place in range(len(values))] if steps is None else list(steps)
    world_size = more.pop("world_size", 1)
    told = {"run_id": "r", "metric": metric, "layer": layer, "axis": axis, "first_steps": steps, "steps": steps}
    told |= {"positions": [float(step) for step in steps], "ranks": ranks, "world_size": world_size}
    told |= {name: list(values) for name in ("values", "minimum", "maximum")}
    told["expected_ranks"] = None if ranks is None else [world_size] * len(ranks)
    return wire.Series(**told | more)


def heatmap_answer(values, metric="edq_ratio"):
    """A heatmap of layers layer.0, layer.1, … at steps 10, 20, …"""
    steps = [10 * (place + 1) for place in range(len(values[0]) if values else 0)]
    layers = [f"layer.{place}" for place in range(len(values))]
    return wire.Heatmap(run_id="r", metric=metric, layers=layers, first_steps=steps, steps=steps, values=values)


def histogram_answer(counts_by_label, *, run_id="r", layer=None, first_step=1, step=10):
    """A histogram with these counts, zero elsewhere."""
    return wire.Histogram(
        run_id=run_id,
        name="update_ulp_histogram",
        layer=layer,
        first_step=first_step,
        step=step,
        labels=list(HISTOGRAM_LABELS),
        counts=[float(counts_by_label.get(label, 0.0)) for label in HISTOGRAM_LABELS],
    )
