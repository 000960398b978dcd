"""Small answers with numbers that a test can name."""

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS


def series(values, metric="edq_ratio", *, low=None, high=None, ranks=None, world_size=1, axis="step", layer=None):
    """A series at steps 10, 20, … with these values."""
    steps = [10 * (place + 1) for place in range(len(values))]
    return wire.Series(
        run_id="r",
        metric=metric,
        layer=layer,
        axis=axis,
        first_steps=steps,
        steps=steps,
        positions=[float(step) for step in steps],
        values=list(values),
        minimum=list(values),
        maximum=list(values),
        low=low,
        high=high,
        ranks=ranks,
        world_size=world_size,
        expected_ranks=None if ranks is None else [world_size] * len(ranks),
    )


def heatmap_answer(values, metric="edq_ratio"):
    """A heatmap of layers layer.0, layer.1, … at steps 10, 20, …"""
    steps = [10 * (place + 1) for place in range(len(values[0]) if values else 0)]
    return wire.Heatmap(
        run_id="r",
        metric=metric,
        layers=[f"layer.{place}" for place in range(len(values))],
        first_steps=steps,
        steps=steps,
        values=values,
    )


def histogram_answer(counts_by_label):
    """A histogram with these counts, zero elsewhere."""
    return wire.Histogram(
        run_id="r",
        name="update_ulp_histogram",
        layer=None,
        first_step=1,
        step=10,
        labels=list(HISTOGRAM_LABELS),
        counts=[float(counts_by_label.get(label, 0.0)) for label in HISTOGRAM_LABELS],
    )
