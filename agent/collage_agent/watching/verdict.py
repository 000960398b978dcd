"""What people are told of a measured step: its numbers, and in words what was lost, where, and what to try.

EDQ alone never makes a run healthy: an error that already sits in the optimizer's state is invisible to it, so
the states' decrements or the oracle must agree. Otherwise the verdict is "unknown".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from collage_agent.measurement import Measurement
from collage_monitor import wire
from collage_monitor.judgement import STATE_TOLERANCE, judge, longest_window, state_decrements
from collage_monitor.statistics import finish_all, reduce_shards
from collage_monitor.strategies import STRATEGIES

__all__ = ["summarise", "verdict"]

Values = Mapping[str, float | None]

_WORST: Final = 3
NONE: Final[Mapping[tuple[str, ...], Measurement]] = {}


def summarise(
    measurement: Measurement | None, occasional: Mapping[tuple[str, ...], Measurement] = NONE
) -> dict[str, Any]:
    """{"step", "model": {key: value}, "layers": {name: {key: value}}}; empty before the first measured step.

    `occasional`: keys of statistics that not every step reports, with the last measurement that has them.
    Layers merge into the model as shards do. Undefined values are None. Synchronises the device.
    """
    if measurement is None:
        return {"step": None, "model": {}, "layers": {}}
    totals = _totals(measurement)
    for keys, earlier in occasional.items():
        found = _totals(earlier)
        for key in keys:
            totals[key] = np.full_like(totals["elements"], np.nan)
            totals[key][: len(found[key])] = found[key]
    finished = finish_all(totals)
    model = finish_all(reduce_shards(totals, axis=0))
    return {
        "step": measurement.step,
        "model": {key: _value(value) for key, value in model.items()},
        "layers": {
            layer.name: {key: _value(values[index]) for key, values in finished.items()}
            for index, layer in enumerate(measurement.layout.layers)
        },
    }


def verdict(summary: Mapping[str, Any], info: wire.WatchInfo) -> str:
    """Several lines for people; `summary` is that of a watch."""
    believed = f", believed to be {info.strategy}" if info.strategy not in (None, info.observed_strategy) else ""
    head = f"{info.optimizer}, {info.dtype}, strategy {info.observed_strategy}{believed}"
    if summary["step"] is None:
        return f"{head}: nothing measured yet; the first measured step is the next one divisible by {info.every}"
    model = summary["model"]
    lines = [f"{head}, step {summary['step']}: {judge(model).health}"]
    if info.fingerprint is not None:
        lines += [f"  finding: {found}" for found in info.fingerprint.findings]
    if info.intent_reason:
        lines.append(f"  note: {info.intent_reason}")
    if info.intent == "before-after":
        lines.append("  only what changed is known, not what was intended: what was lost is unknown")
        return "\n".join(lines)
    lines += [f"  {line}" for line in _body(summary, info)]
    return "\n".join(lines)


def _body(summary: Mapping[str, Any], info: wire.WatchInfo) -> Iterator[str]:
    model = summary["model"]
    edq = model.get("edq_ratio")
    if edq is None and info.intent == "whole-tensor":
        yield "EDQ is not known yet: whole tensors take turns, and the round is not complete"
        return
    if edq is None:
        yield "EDQ is undefined: no update was intended in this step"
        return
    yield f"EDQ {edq:.4f}{_interval(model, 'edq_ratio')}: the share of the intended descent that arrived"
    yield from _lost(model, info)
    yield from _worst_layers(summary["layers"])
    yield from _states(model)
    yield from _oracle(model)
    if info.observed_strategy in ("plain", "unknown"):
        yield from _grid(model)
    yield from _advice(model, info)


def _lost(model: Values, info: wire.WatchInfo) -> Iterator[str]:
    window, seen = longest_window(model, "lost_window_ratio"), longest_window(model, "lost_visible_window_ratio")
    if window is not None:
        visible = "" if seen is None or seen == window else f", of those that the forward pass sees {seen[1]:.1%}"
        yield f"updates rounded away over {window[0]} steps: {window[1]:.1%}{visible}"
    lost = model.get("lost_update_ratio")
    if lost is None:
        return
    strategy = STRATEGIES.get(info.strategy or info.observed_strategy)
    caution = ""
    if strategy is not None and strategy.stochastic:
        advice = "the window above judges it" if window is not None else "watch with windows=(64,) to judge it"
        caution = f"; one step misjudges stochastic rounding, {advice}"
    yield f"updates rounded away in this step: {lost:.1%}{_interval(model, 'lost_update_ratio', '.1%')}{caution}"


def _worst_layers(layers: Mapping[str, Values]) -> Iterator[str]:
    known = [(name, ratio) for name, values in layers.items() if (ratio := values.get("edq_ratio")) is not None]
    known.sort(key=lambda entry: -abs(1 - entry[1]))
    if known:
        worst = ", ".join(f"{name} {ratio:.3f}" for name, ratio in known[:_WORST])
        yield f"furthest from 1: {worst}"


def _states(model: Values) -> Iterator[str]:
    found = state_decrements(model)
    for name, value in found.items():
        if value < 1 - STATE_TOLERANCE:
            told = "it hardly decays, grows too large and makes later steps wrong; EDQ cannot see that"
        else:
            told = "it decays as it should"
        yield f"state {name}: decrements {value:.3f} of the intended ones: {told}"
    if not found:
        yield "states: unknown, no moving average should have shrunk in this step"


def _oracle(model: Values) -> Iterator[str]:
    step, way = model.get("edq_oracle_ratio"), model.get("oracle_displacement_ratio")
    if step is None or way is None:
        return
    steps = model.get("oracle_steps") or 0
    yield (
        f"against the fp64 oracle: this step {step:.4f}{_interval(model, 'edq_oracle_ratio')}, "
        f"displacement over {steps:.0f} steps {way:.4f}"
    )


def _grid(model: Values) -> Iterator[str]:
    margin, factor = model.get("half_ulp_margin"), model.get("half_ulp_lr_factor")
    if margin is None or factor is None:
        return
    side = "above" if margin >= 0 else "below"
    yield (
        f"the median update stands {abs(margin):.1f} octaves {side} half a gap; at {factor:.3g} times the learning "
        "rate 10 % would stand below it (this describes the grid, it is no advice to raise the rate)"
    )


def _advice(model: Values, info: wire.WatchInfo) -> Iterator[str]:
    state = judge(model).health
    if state == "unknown":
        yield "EDQ alone proves nothing: watch with oracle=True to know"
    elif state == "steps are off":
        yield "each step keeps what it intends, but not what fp64 would do: look at states and learning rate"
    elif state != "healthy":
        plus, master = STRATEGIES["plus"], STRATEGIES["master-weights"]
        if info.observed_strategy == plus.name:
            yield f'try strategy="{master.name}" ({master.bytes_per_parameter} bytes a parameter)'
        else:
            yield (
                f'try collage_agent.optim.CollageAdamW(strategy="{plus.name}") ({plus.bytes_per_parameter} bytes a '
                f'parameter) or "{master.name}" ({master.bytes_per_parameter})'
            )


def _interval(model: Values, name: str, form: str = ".4f") -> str:
    low, high = model.get(f"{name}_low"), model.get(f"{name}_high")
    return "" if low is None or high is None else f" ({low:{form}} to {high:{form}})"


def _totals(measurement: Measurement) -> dict[str, NDArray[np.float64]]:
    return dict(measurement.table())


def _value(value: NDArray[np.float64] | np.float64) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number
