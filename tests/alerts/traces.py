"""For each alert of the catalogue runs that must wake it and runs that must not, minute by minute.

`python -m tests.alerts.traces` writes them to the end of the unit tests of the Prometheus rules; the same runs are
put before the server's own evaluation. When an alert must fire is reckoned here from the catalogue's waits, by
neither of the two.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collage_monitor.alerts import ALERTS

UNIT_TESTS = Path(__file__).parents[2] / "server/prometheus/collage.rules.test.yml"


@dataclass
class Case:
    """Values of the alert's series before and after the onset; None: it is not there.

    holds_minutes: for how long the condition holds once it does, if not until what is wrong ends. delay_minutes:
    how long after the onset it begins to hold. clock: the value is the time, until the onset. poor: values before
    and after the onset, of a run that falls as far and was not well before. undefined: two values of the sick run's
    window are NaN.
    """

    series: str
    well: float | None
    sick: float
    labels: dict[str, str] = field(default_factory=dict)
    holds_minutes: int | None = None
    delay_minutes: int = 0
    clock: bool = False
    poor: tuple[float, float] | None = None
    undefined: bool = False


def _finding(alert, key, value, **labels):
    """A finding that is the alert, and then stands or not."""
    return Case("collage_finding", None, value, {"alert": alert, "key": key, **labels})


CASES = {
    "CollageEdqDrop": Case("collage_edq_ratio", 1.0, 0.85, poor=(0.5, 0.2)),
    "CollageWindowUpdatesLost": Case(
        "collage_lost_window_ratio", 0.1, 0.6, {"window": "64", "strategy": "stochastic"}
    ),
    "CollageExpectationBroken": Case("collage_expectations_broken", 0.0, 1.0),
    "CollageReplicaMismatch": Case("collage_replica_mismatches", None, 1.0),
    "CollageExternalWrites": Case("collage_external_writes", None, 1.0, holds_minutes=30),
    "CollageNotFinite": _finding("CollageNotFinite", "nonfinite_params", 3.0),
    "CollageResumeLoss": _finding("CollageResumeLoss", "resume_losses", 1.0),
    "CollageEdqLow": _finding("CollageEdqLow", "edq_ratio", 0.89),
    "CollageUpdatesLost": _finding("CollageUpdatesLost", "lost_update_ratio", 0.3),
    "CollageLayersStandStill": _finding("CollageLayersStandStill", "lost_update_ratio", 1.0, layer="norm.weight"),
    "CollageSecondMomentStuck": _finding("CollageSecondMomentStuck", "state_decrement_ratio/exp_avg_sq", 0.1),
    "CollageDecayLost": _finding("CollageDecayLost", "decay_ratio", 0.1),
    "CollageOracleDrift": _finding("CollageOracleDrift", "edq_oracle_ratio", 0.7),
    "CollageResidualsOff": _finding("CollageResidualsOff", "residual_dropped_ratio", 0.08),
    "CollageAverageOff": _finding("CollageAverageOff", "average_lost_ratio", 0.9),
    "CollageGradientExploding": Case("collage_grad_norm", 1.0, 30.0, undefined=True),
    "CollageGradientVanishing": Case("collage_grad_norm", 1.0, 0.001, undefined=True),
    "CollageLossUnstable": Case("collage_loss", 3.0, 9.0, undefined=True),
    "CollageLossNotFinite": Case("collage_loss", 3.0, float("nan")),
    "CollageStepsSkipped": Case("collage_skipped_steps", 2.0, 30.0, holds_minutes=30),
    "CollageRunStalled": Case("collage_last_report_timestamp_seconds", 0.0, 0.0, delay_minutes=5, clock=True),
    "CollageRunWithoutData": Case("collage_unmeasured_seconds", 600.0, 1000.0),
    "CollageAgentOverBudget": Case("collage_agent_overhead_ratio", 0.01, 0.05),
    "CollageReportsDropped": Case("collage_reports_dropped", 0.0, 2.0, holds_minutes=15),
    "CollageIngestFailing": Case(
        "collage_server_reports_total", 0.0, 5.0, {"outcome": "rejected"}, holds_minutes=10
    ),
    "CollageAlertsNotEvaluated": Case(
        "collage_server_alerts_evaluated_timestamp_seconds", 0.0, 0.0, delay_minutes=5, clock=True
    ),
    "CollageDiskNearlyFull": Case("collage_server_disk_left_ratio", 0.5, 0.05),
    "CollageArchiveAway": Case("collage_server_archive_away_seconds", 0.0, 3600.0),
    "CollageArchiveDamaged": Case("collage_server_archive_damaged_files", 0.0, 2.0),
    "CollageDatabaseDamaged": Case("collage_server_database_damaged_rows", 0.0, 1.0),
    "CollageBackupOld": Case("collage_server_backup_age_seconds", 3600.0, 9 * 86_400.0),
}


@dataclass
class Trace:
    """One run's series: name and labels, and a value a minute."""

    name: str
    labels: dict[str, str]
    values: Sequence[float | None]


def onset_of(name):
    """The minute at which what is wrong begins: when the alert's window is full."""
    return 6 + round(ALERTS[name].window_seconds / 60)


def length_of(name):
    """Minutes that the trace lasts: a little longer than the alert."""
    return fires(name)[1] + 3


def end_of(name):
    """The minute at which what is wrong ends: when the alert has fired for some minutes, and a little more."""
    return onset_of(name) + CASES[name].delay_minutes + round(ALERTS[name].for_seconds / 60) + 8


def fires(name):
    """(first minute, first minute after it) at which the alert fires for the sick run."""
    entry, case = ALERTS[name], CASES[name]
    begins = onset_of(name) + case.delay_minutes
    holds_until = begins + case.holds_minutes if case.holds_minutes else end_of(name)
    return begins + round(entry.for_seconds / 60), holds_until + round(entry.keep_firing_seconds / 60)


def traces(name):
    """Every run of the alert's case."""
    entry, case = ALERTS[name], CASES[name]
    if entry.scope == "server":
        return [Trace(case.series, case.labels, _values(name, sick=True))]
    runs = {"sick": _values(name, sick=True), "well": _values(name, sick=False)}
    onset, length = onset_of(name), length_of(name)
    if case.undefined:
        runs["sick"][onset - 20], runs["sick"][onset - 10] = float("nan"), float("nan")
    gone = onset + case.delay_minutes + round(entry.for_seconds / 60) - 1
    runs["finished"] = [*_values(name, sick=True)[: gone + 1], *[None] * (length - gone - 1)]
    if entry.for_seconds:
        runs["dented"] = _values(name, sick=True, minutes=max(round(entry.for_seconds / 60) - 1, 1))
    # Neither wakes an alert that waits for their end, whatever is wrong, nor any other alert by itself.
    runs["young"] = _values(name, sick=bool(entry.warm_up_steps))
    runs["resumed"] = _values(name, sick=bool(entry.settle_steps))
    runs["skipping"] = _values(name, sick=False)
    if entry.least_intended_share:
        # A schedule has all but ended at the onset.
        runs["fading"] = _values(name, sick=True)
    if case.poor:
        before, after = case.poor
        runs["poor"] = [after if value == case.sick else before for value in runs["sick"]]
    found = []
    for run_id, values in runs.items():
        labels = {"project": "p", "run": "a", "run_id": run_id, "strategy": "plain"} | case.labels
        there = [minute for minute, value in enumerate(values) if value is not None]
        last = length if run_id != "finished" else max(there, default=onset) + 1
        first_step = 1 if run_id == "young" else 1000
        steps = [first_step + minute for minute in range(last)] + [None] * (length - last)
        own = {key: labels[key] for key in ("project", "run", "run_id", "strategy")}
        found += [Trace(case.series, labels, values), Trace("collage_step", own, steps)]
        if run_id == "resumed":
            # It resumes at the onset, and steps so slowly that it does not settle while something is wrong.
            since = [None] * onset + [1.0 + minute / 10 for minute in range(length - onset)]
            found.append(Trace("collage_steps_since_resume", own, since))
        if entry.least_intended_share:
            share = entry.least_intended_share * (0.9 if run_id == "fading" else 1.1)
            found.append(Trace("collage_intended_share", own, [share] * length))
        if run_id == "skipping":
            # The loss scaler grows too large now and then: a step in five minutes is skipped, and says nothing.
            skips = [2.0 + minute // 5 for minute in range(length)]
            if case.series == "collage_skipped_steps":
                found[-2] = Trace(case.series, labels, skips)
            else:
                found.append(Trace("collage_skipped_steps", own, skips))
    return found


def _values(name, *, sick, minutes=None):
    case, onset = CASES[name], onset_of(name)
    last = end_of(name) if minutes is None else onset + case.delay_minutes + minutes
    values: list[float | None] = []
    for minute in range(length_of(name)):
        wrong = sick and minute >= onset and (minute < last or case.holds_minutes is not None)
        if case.clock:
            values.append(60.0 * (onset - 1 if wrong else minute))
        else:
            values.append(case.sick if wrong else case.well)
    return values


def moments(name):
    """Minutes at which it is looked: before and after each change, and well past the end."""
    begins, ends = fires(name)
    return sorted({onset_of(name) - 1, begins - 1, begins, begins + 3, ends - 1, ends, ends + 2})


def unit_tests():
    """The cases as unit tests for promtool, a YAML list's entries."""
    lines = []
    for name in CASES:
        server = ALERTS[name].scope == "server"
        lines += [f'  - name: "{name} fires as reckoned, and for the sick run alone"', "    interval: 1m"]
        lines.append("    input_series:")
        for trace in traces(name):
            labels = ", ".join(f"{key}={json.dumps(value)}" for key, value in trace.labels.items())
            lines += [f"      - series: '{trace.name}{{{labels}}}'", f'        values: "{_notation(trace.values)}"']
        lines.append("    promql_expr_test:")
        begins, ends = fires(name)
        for minute in moments(name):
            lines.append(f'      - expr: \'count by (run_id) (ALERTS{{alertname="{name}", alertstate="firing"}})\'')
            lines.append(f"        eval_time: {minute}m")
            if begins <= minute < ends:
                labels = "{}" if server else '{run_id="sick"}'
                lines += ["        exp_samples:", f"          - labels: '{labels}'", "            value: 1"]
            else:
                lines.append("        exp_samples: []")
        lines.append("")
    return "\n".join(lines)


def _notation(values):
    """promtool's short form: values that stay or climb evenly as one, `stale` where a series ends."""
    parts, place, there = [], 0, False
    while place < len(values):
        value, end = values[place], place + 1
        step = 0.0 if value is None or end == len(values) or values[end] is None else values[end] - value
        while end < len(values) and (_same(values[end], value) or _climbs(values, end, step)):
            end += 1
        count = end - place
        if value is None:
            parts += ["stale"] * there + [f"_x{count - there}"] * (count > there)
        elif value != value:
            parts += ["NaN"] * count
        else:
            climb = "" if _same(values[end - 1], value) else f"+{step:g}"
            parts.append(f"{value:g}{climb}x{count - 1}")
        place, there = end, value is not None
    return " ".join(parts)


def _climbs(values, place, step):
    before, now = values[place - 1], values[place]
    return step > 0 and None not in (before, now) and abs(now - before - step) < 1e-9


def _same(one, other):
    return one == other or (one is not None and other is not None and one != one and other != other)


if __name__ == "__main__":
    head, marker, _ = UNIT_TESTS.read_text().partition("# From here on: python -m tests.alerts.traces\n")
    UNIT_TESTS.write_text(head + marker + unit_tests())
