"""A small run made of numbers whose metrics are known in closed form, and helpers to send it."""

from __future__ import annotations

from functools import cache

import numpy as np

from collage_monitor import wire
from collage_monitor.statistics import merge_shards

STATISTICS = [
    "measured_steps",
    "elements",
    "sampled",
    "active_blocks",
    "nonfinite",
    "idle",
    "lost",
    "lost_visible",
    "unchanged",
    "intended_squared_sum",
    "intended_effective_sum",
    "effective_squared_sum",
    "intended_visible_sum",
    "gradient_squared_sum",
    "parameter_squared_sum",
    "update_ulp_histogram/-3",
    "update_ulp_histogram/0",
    "state_decrement_observed_sum/exp_avg_sq",
    "state_decrement_intended_sum/exp_avg_sq",
    "variance_numerator/edq_ratio",
    "variance_denominator/edq_ratio",
    "covariance/edq_ratio",
]
LAYERS = ["embedding.weight", "blocks.0.weight", "blocks.1.weight"]


def layer(name, replica=0):
    kind = "Embedding" if name.startswith("embedding") else "Linear"
    return wire.Layer(name=name, shape=[8, 16], dtype="bfloat16", elements=128, module_type=kind, replica=replica)


def block(step, rank=0, layers=3):
    """[statistic][layer] of one step: every number differs by layer, step and rank, all positive."""
    at = {name: i for i, name in enumerate(STATISTICS)}
    values = np.zeros((len(STATISTICS), layers))
    scale = np.arange(1, layers + 1) * (1.0 + rank)
    values[at["measured_steps"]] = 1
    values[at["elements"]] = 128
    values[at["sampled"]] = 64
    values[at["active_blocks"]] = 30
    values[at["idle"]] = 8
    values[at["lost"]] = 10 * scale
    values[at["lost_visible"]] = 11 * scale
    values[at["unchanged"]] = 20 * scale
    values[at["intended_squared_sum"]] = scale * (1 + step % 7)
    values[at["intended_effective_sum"]] = scale * (1 + step % 7) * (0.9 - 0.1 * np.arange(layers))
    values[at["effective_squared_sum"]] = scale * (1 + step % 7)
    values[at["intended_visible_sum"]] = 0.5 * scale
    values[at["gradient_squared_sum"]] = 2.0 * scale
    values[at["parameter_squared_sum"]] = 100.0 + step
    values[at["update_ulp_histogram/-3"]] = 10.0
    values[at["update_ulp_histogram/0"]] = 110.0
    values[at["state_decrement_observed_sum/exp_avg_sq"]] = -0.25 * scale
    values[at["state_decrement_intended_sum/exp_avg_sq"]] = -1.0 * scale
    values[at["variance_numerator/edq_ratio"]] = 0.01 * scale
    values[at["variance_denominator/edq_ratio"]] = 0.02 * scale
    values[at["covariance/edq_ratio"]] = 0.001 * scale
    return values


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
    given = {
        "layers": [layer(name, replica) for name in LAYERS],
        "statistics": STATISTICS,
        "process_id": 4000 + rank,
        "watch": watch(),
    } | more
    return wire.StreamCreate(stream_id=stream_id, launch_id=launch_id, rank=rank, world_size=world_size, **given)
