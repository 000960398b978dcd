"""The texts about a watch: the last step's numbers, and in words how much was lost, where, and advice.

The words are those of `collage_monitor.diagnosis`, about the recent past.

`Watch.__str__`, `summary()` and the farewell print them. Sentences are free, judgements are not made here
(`tests/agent/watching/test_watch_texts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from collage_agent.measurement import Layout, Measurement
from collage_agent.watching.step_history import MODEL, PastTotals
from collage_monitor import diagnosis, wire
from collage_monitor.diagnosis import (
    EDQ_TOLERANCE,
    LOST_TOLERANCE,
    Case,
    Evidence,
    History,
    Track,
    Values,
    average_findings,
    finite,
    judge,
    labelled,
    last_change,
    longest_window,
    oracle_reach,
    percent,
    state_in_words,
    state_ratios,
    tracked_metrics,
)
from collage_monitor.metrics import STATE_RATIOS, split_key
from collage_monitor.number_text import number
from collage_monitor.onset import find_onsets
from collage_monitor.statistics import finish, finish_all, reduce_shards
from collage_monitor.strategies import STRATEGIES
from collage_monitor.wire import Judgement

__all__ = [
    "average_in_words",
    "average_word",
    "evidence_of_past",
    "judgement_text",
    "summarise",
]


_WORST: Final = 3
_ZERO_TOLERANCE: Final = 0.01
_WORTH_A_DELTA: Final = 0.5
"""Share of a copy's bytes below which sending what changed is worth saying."""
_DRIFT_TOLERANCE: Final = 0.25
_STEPS_KEPT: Final = ("edq_oracle_ratio", *STATE_RATIOS)
"""What may be off although each step arrives."""
_NO_MEASUREMENTS: Final[Mapping[tuple[str, ...], Measurement]] = {}


def summarise(
    measurement: Measurement | None, occasional: Mapping[tuple[str, ...], Measurement] = _NO_MEASUREMENTS
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


def evidence_of_past(
    past: PastTotals | None, layout: Layout | None, info: wire.WatchInfo, skipped: float = 0.0
) -> Evidence:
    """The recent past as a judgement takes it, with its history. skipped: steps, by a loss scaler."""
    if past is None or layout is None:
        return Evidence({}, watch=info, skipped=skipped)
    recent = past.recent(last_change((), info, past.last_steps[-1]))
    names = [layer.name for layer in layout.layers]
    return diagnosis.evidence_of(
        {key: values[:, MODEL] for key, values in recent.totals.items()},
        {key: values[:, MODEL + 1 :] for key, values in recent.totals.items()},
        names,
        watch=info,
        first_step=recent.first_steps[0],
        last_step=recent.last_steps[-1],
        history=_history(past, names),
        skipped=skipped,
    )


def _history(past: PastTotals, names: Sequence[str]) -> History:
    """The metrics of the whole past that tell since when."""
    columns = {key: finish(key, past.totals).T for key in tracked_metrics(past.totals)}
    edq = columns["edq_ratio"]

    def track(key: str, column: int) -> Track:
        return Track(past.first_steps, past.last_steps, columns[key][column])

    changes = find_onsets(
        past.first_steps,
        edq[MODEL],
        dict(zip(names, edq[MODEL + 1 :], strict=True)),
        least=EDQ_TOLERANCE,
        last_steps=past.last_steps,
    )
    return History(
        {key: track(key, MODEL) for key in columns},
        of_layer=lambda key, layer: track(key, MODEL + 1 + names.index(layer)) if key in columns else None,
        changes=changes,
    )


def judgement_text(evidence: Evidence, summary: Mapping[str, Any]) -> str:
    """Several lines for people. `summary`: of the last measured step, for numbers that the evidence lacks."""
    info = evidence.watch
    assert info is not None
    believed = f", believed to be {info.strategy}" if info.strategy not in (None, info.observed_strategy) else ""
    head = f"{info.optimizer}, {info.dtype}, strategy {info.observed_strategy}{believed}"
    notes = [f"  finding: {found}" for found in (info.fingerprint.findings if info.fingerprint else ())]
    notes += [f"  expectation broken: {breach}" for breach in info.broken]
    notes += [f"  note: {info.intent_reason}"] if info.intent_reason else []
    found = judge(evidence)
    told = {finding.text for finding in found.findings}
    notes += [f"  note: {doubt.text}" for doubt in info.launch_doubts if doubt.text not in told]
    notes += [f"  note: {info.conversion}"] if info.conversion is not None else []
    notes += [f"  note: {info.continuation}"] if info.continuation is not None else []
    if Case(evidence).all_skipped:
        lines = [found.headline, *found.advice_lines]
        return "\n".join([f"{head}: {found.health}", *(f"  {line}" for line in lines), *notes])
    if not evidence.model:
        due = f"steps divisible by {info.every} (fewer where they cost too much), and the first one of this launch"
        return "\n".join([f"{head}: nothing measured yet; to be measured: {due}", *notes])
    lines = [f"{head}, step {evidence.last_step}: {found.health}"]
    lines += [f"  {found.headline}"] if found.against else []
    lines += [f"  {found.text}"]
    if info.fingerprint and info.fingerprint.unexplained:
        return "\n".join([*lines, *notes])
    lines += notes
    if info.intent == "whole-tensor" and evidence.model.get("edq_ratio") is None:
        lines.append("  EDQ is not known yet: whole tensors take turns, and the round is not complete")
    known = evidence.model.get("edq_ratio") is not None
    lines += [f"  {line}" for line in (_body(evidence, summary["model"], found) if known else found.advice_lines)]
    return "\n".join(lines)


def _body(evidence: Evidence, last: Values, found: Judgement) -> Iterator[str]:
    model, info, case = evidence.model, evidence.watch, Case(evidence)
    assert info is not None
    edq = f"{model['edq_ratio']:.4f}{_interval(case, 'edq_ratio')}"
    yield f"EDQ {edq}: the share of the intended descent that arrived"
    yield from _lost(case, info)
    yield from _worst_layers(evidence.layers)
    yield from _states(case)
    yield from _underflowed(model, info)
    yield from _oracle(case)
    yield from _copies(model)
    yield from average_in_words(model)
    if info.observed_strategy in ("plain", "unknown"):
        yield from _grid(last)
    yield from _advice(found)


def _lost(case: Case, info: wire.WatchInfo) -> Iterator[str]:
    model = case.model
    window, seen = longest_window(model, "lost_window_ratio"), longest_window(model, "lost_visible_window_ratio")
    if window is not None:
        visible = (
            "" if seen is None or seen == window else f", of those that the forward pass sees {percent(seen[1])}"
        )
        yield f"updates rounded away over {window[0]} steps: {percent(window[1])}{visible}"
    lost = finite(model.get("lost_update_ratio"))
    if lost is None:
        return
    strategy = STRATEGIES.get(info.shown_strategy)
    of_layers = info.fingerprint.layer_rounds_at_random if info.fingerprint else {}
    caution = ""
    if (strategy is not None and strategy.stochastic) or any(of_layers.values()):
        advice = "the window above judges it" if window is not None else "watch with windows=(64,) to judge it"
        caution = f"; one step misjudges stochastic rounding, {advice}"
    between = _interval(case, "lost_update_ratio", percent)
    yield f"updates rounded away in a step: {percent(lost)}{between}{caution}"


def _copies(model: Values) -> Iterator[str]:
    """The size of a sync of copies after each step, if that saves at least half."""
    for label, share in labelled(model, "cast_sync_ratio").items():
        sent = finite(model.get(f"cast_sync_bytes/{label}"))
        if sent is not None and 0 < share < _WORTH_A_DELTA:
            yield (
                f"sending only what a step changes of a {label} copy takes {sent:,.0f} bytes, {percent(share)} of "
                f"the whole copy ({sent / share:,.0f})"
            )


def _worst_layers(layers: Mapping[str, Values]) -> Iterator[str]:
    """The layers with the largest error, where overshoot does not hide losses."""
    known = [
        (name, error) for name, values in layers.items() if (error := finite(values.get("update_error_ratio")))
    ]
    known.sort(key=lambda entry: -entry[1])
    if known:
        told = [
            f"{name} (EDQ {_of(values, 'edq_ratio'):.3f}, lost {percent(_of(values, 'lost_update_ratio'))})"
            for name, values in ((name, layers[name]) for name, _ in known[:_WORST])
        ]
        yield f"worst layers: {', '.join(told)}"


def _of(values: Values, key: str) -> float:
    return finite(values.get(key)) or 0.0


def _states(case: Case) -> Iterator[str]:
    found = state_ratios(case.model)
    for key, value in found.items():
        (metric, name), told = split_key(key), state_in_words(case, key, value)[1]
        changes = metric.removeprefix("state_").removesuffix("_ratio")
        now = "" if (moved := case.moved(key)) is None else f", {moved:.3f} now"
        yield f"state {name}: {changes}s {value:.3f} of the intended ones{now}: it {told}"
    if not found:
        yield "states: unknown, no moving average should have shrunk"


def _underflowed(model: Values, info: wire.WatchInfo) -> Iterator[str]:
    for name, share in labelled(model, "state_zero_ratio").items():
        if share > _ZERO_TOLERANCE:
            kept = info.fingerprint.states.get(name) if info.fingerprint else None
            # In 32 bits hardly anything does: the optimizer does not use it, or not yet.
            why = "" if kept == "float32" else f": it underflows as {kept}" if kept else ": it underflows"
            yield f"state {name}: {percent(share)} of it is 0 where the gradient is not{why}"


def _oracle(case: Case) -> Iterator[str]:
    model = case.model
    step, way = finite(model.get("edq_oracle_ratio")), finite(model.get("oracle_displacement_ratio"))
    if step is None or way is None:
        return
    steps = finite(model.get("oracle_steps")) or 0
    yield (
        f"against the fp64 oracle: {step:.4f}{_interval(case, 'edq_oracle_ratio')}"
        f"{oracle_reach(case.followed_by_oracle)}, "
        f"displacement over {steps:.0f} steps {way:.4f}"
    )


def average_word(model: Values) -> str:
    """Whether an average of the weights is healthy, off, or unknown, by itself."""
    edq, lost = finite(model.get("average_edq_ratio")), finite(model.get("average_lost_ratio"))
    drift = finite(model.get("average_drift_ratio"))
    if any(average_findings(model)):
        return "average is off"
    if edq is None:
        return "unknown, its decay is not known: pass decay=…"
    if (lost or 0.0) > LOST_TOLERANCE and (drift is None or drift > _DRIFT_TOLERANCE):
        return (
            "unknown, updates arrive in the mean (or too few were measured), but it stands far from an fp64 average"
        )
    return "healthy"


def average_in_words(model: Values) -> Iterator[str]:
    """How the updates of an average of the weights arrived, if one is watched."""
    moved = finite(model.get("average_moved_ratio"))
    if moved is None:
        return
    edq, lost = finite(model.get("average_edq_ratio")), finite(model.get("average_lost_ratio"))
    way, drift = (finite(model.get(f"average_{name}_ratio")) for name in ("displacement", "drift"))
    told = [f"EDQ {edq:.4f}"] if edq is not None else []
    told += [f"{percent(lost)} of its updates rounded away"] if lost is not None else []
    told += [f"{percent(moved)} of its elements ever moved"]
    if way is not None and drift is not None:
        told += [f"{way:.4f} of an fp64 average's way, {drift:.4f} of it apart"]
    yield f"average of the weights: {', '.join(told)}"


def _grid(model: Values) -> Iterator[str]:
    margin, factor = finite(model.get("half_ulp_margin")), finite(model.get("half_ulp_lr_factor"))
    if margin is None or factor is None:
        return
    size = "too small to change" if margin < 0 else "what it takes to change"
    yield (
        f"the typical update is {number(2 ** abs(margin), 2)} times {size} a weight; nine of ten would at "
        f"{number(factor, 2)} times the learning rate (which is no advice to raise it)"
    )


def _advice(found: Judgement) -> Iterator[str]:
    deciding = found.deciding
    if found.health == "unknown" and deciding is not None and deciding.key == "edq_ratio":
        yield "EDQ alone proves nothing: watch with oracle=True to know"
    elif found.health == "steps are off" and deciding is not None and deciding.key.startswith(_STEPS_KEPT):
        yield "each step keeps what it intends, but not what fp64 would do: look at states and learning rate"
    yield from found.advice_lines


def _interval(case: Case, name: str, written: Callable[[float], str] = "{:.4f}".format) -> str:
    """What stands behind a number: its value now, or where it lies by 95 %, if that shows in the digits written."""
    ends, now = case.interval(name), case.moved(name)
    if now is not None:
        return f", {written(now)} now"
    low, high = (written(end) for end in ends or (0.0, 0.0))
    return "" if low == high else f" ({low} to {high})"


def _totals(measurement: Measurement) -> dict[str, NDArray[np.float64]]:
    return dict(measurement.table())


def _value(value: NDArray[np.float64] | np.float64) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number
