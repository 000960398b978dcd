"""A small run made of numbers whose metrics are known in closed form, and helpers to send it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from collage_monitor import wire
from collage_monitor.statistics import merge_shards

VALUES: dict[str, Callable[..., Any]] = {
    "measured_steps": lambda step, scale, depth: 1,
    "elements": lambda step, scale, depth: 128,
    "sampled": lambda step, scale, depth: 64,
    "active_blocks": lambda step, scale, depth: 30,
    "nonfinite": lambda step, scale, depth: 0,
    "idle": lambda step, scale, depth: 8,
    "lost": lambda step, scale, depth: 10 * scale,
    "lost_visible": lambda step, scale, depth: 11 * scale,
    "unchanged": lambda step, scale, depth: 20 * scale,
    "intended_squared_sum": lambda step, scale, depth: scale * (1 + step % 7),
    "intended_effective_sum": lambda step, scale, depth: scale * (1 + step % 7) * (0.9 - 0.1 * depth),
    "effective_squared_sum": lambda step, scale, depth: scale * (1 + step % 7),
    "intended_visible_sum": lambda step, scale, depth: 0.5 * scale,
    "gradient_squared_sum": lambda step, scale, depth: 2.0 * scale,
    "parameter_squared_sum": lambda step, scale, depth: 100.0 + step,
    "update_ulp_histogram/-3": lambda step, scale, depth: 10.0,
    "update_ulp_histogram/0": lambda step, scale, depth: 110.0,
    "state_decrement_observed_sum/exp_avg_sq": lambda step, scale, depth: -0.25 * scale,
    "state_decrement_intended_sum/exp_avg_sq": lambda step, scale, depth: -1.0 * scale,
    "variance_numerator/edq_ratio": lambda step, scale, depth: 0.01 * scale,
    "variance_denominator/edq_ratio": lambda step, scale, depth: 0.02 * scale,
    "covariance/edq_ratio": lambda step, scale, depth: 0.001 * scale,
}
"""Of a step, its layers' scales, and their places."""
STATISTICS = [*VALUES]
LAYERS = ["embedding.weight", "blocks.0.weight", "blocks.1.weight"]


def layer(name, replica=0):
    kind = "Embedding" if name.startswith("embedding") else "Linear"
    return wire.Layer(name=name, shape=[8, 16], dtype="bfloat16", elements=128, module_type=kind, replica=replica)


def block(step, rank=0, layers=3):
    """[statistic][layer] of one step: every number differs by layer, step and rank, all positive."""
    depth = np.arange(layers)
    scale = (depth + 1) * (1.0 + rank)
    return np.array([np.zeros(layers) + value(step, scale, depth) for value in VALUES.values()])


def model_of(values):
    """The rank's layers merged as shards."""
    merged = merge_shards([dict(zip(STATISTICS, column, strict=True)) for column in values.T])
    return np.array([float(merged[name]) for name in STATISTICS])


def report(seq, step, *, rank=0, values=None, measured=True, scalars=None, time=None):
    given = {"loss": 4.0 - 0.01 * step, "tokens": 100.0 * step} if scalars is None else scalars
    when = 1_700_000_000.0 + step if time is None else time
    if not measured:
        return wire.Report(seq=seq, step=step, time=when, scalars=given)
    totals = _totals(step, rank) if values is None else _totals_of(values)
    return wire.Report(seq=seq, step=step, time=when, scalars=given, **totals)


def report_of_totals(seq, step, table, **more):
    """A report of [statistic][layer] of any statistics, whose model is the sum of its layers."""
    totals = {"statistics": wire.array_to_bytes(table), "model": wire.array_to_bytes(table.sum(axis=1))}
    counts = {"statistic_count": len(table), "layer_count": table.shape[1]}
    given: dict[str, Any] = totals | counts | more
    return wire.Report(seq=seq, step=step, time=1_700_000_000.0 + step, **given)


@cache
def _totals(step, rank):
    """To merge the layers takes longest of a test of many reports."""
    return _totals_of(block(step, rank))


def _totals_of(values):
    return {
        "statistic_count": values.shape[0],
        "layer_count": values.shape[1],
        "statistics": wire.array_to_bytes(values),
        "model": wire.array_to_bytes(model_of(values)),
    }


def watch(strategy="plain", **more):
    return wire.WatchInfo(optimizer="AdamW", strategy=strategy, observed_strategy="plain", dtype="bfloat16", **more)


def stream_create(stream_id="s0", launch_id="launch-1", rank=0, world_size=1, replica=0, **more):
    given = {"layers": [layer(name, replica) for name in LAYERS], "statistics": STATISTICS, "watch": watch()}
    given |= {"process_id": 4000 + rank} | more
    return wire.StreamCreate(stream_id=stream_id, launch_id=launch_id, rank=rank, world_size=world_size, **given)
