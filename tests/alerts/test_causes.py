"""Each cause that the runbook names: what speaks for it, what against it, and what decides nothing."""

import ast
import dataclasses
import inspect
from typing import Any

import msgspec
import pytest
from collage_dashboard.incident_evidence import COMPARED_METRICS, _rises

from collage_monitor import wire
from collage_monitor.alerts import ALERTS, Alert, changes, operation, training
from collage_monitor.diagnosis import causes, residuals, states, updates, weights
from collage_monitor.diagnosis.causes import IncidentEvidence, Span, restarted

READERS = {"both", "now", "number", "rose", "_growth"}
"""What reads a value of an incident's evidence by its key."""
WATCH = wire.WatchInfo(optimizer="AdamW", every=10)
BEGUN = wire.Attempt(run_id="r1", attempt=1, launch_id="a", first_step=1, measured_from=1, created_at=0.0)
RUN = wire.Run(
    run_id="r1",
    project="p",
    name="a run",
    group=None,
    tags=[],
    notes="",
    seed=None,
    config={},
    state="running",
    created_at=0.0,
    updated_at=1000.0,
    first_step=1,
    last_step=1000,
    attempts=[BEGUN],
    watch=WATCH,
    latest={"edq_ratio": 1.0},
    scalars={},
)


def resumed_at(step, attempt=2):
    return msgspec.structs.replace(
        BEGUN, attempt=attempt, launch_id="b", first_step=step, measured_from=step, created_at=9e9
    )


def evidence(before=None, after=None, *, labels=None, run=RUN, series=None, **more):
    """What was reported: values by key before and after."""
    told: dict[str, Any] = {"incident_id": "1", "severity": "warning", "source": "server", "state": "firing"}
    told |= {"alert": "", "text": "", "started_at": 900.0, "run_id": "r1", "labels": labels or {}, "step": 900}
    if series is not None:
        steps = list(range(len(series)))
        axes: dict[str, Any] = {"axis": "step", "first_steps": steps, "steps": steps}
        axes["positions"] = [float(step) for step in steps]
        numbers: dict[str, Any] = dict.fromkeys(("values", "minimum", "maximum"), series)
        more["series"] = wire.Series(run_id="r1", metric="loss", layer=None, **axes, **numbers)
    spans = [Span(first, first + 200, values or {}) for first, values in ((400, before), (600, after))]
    return IncidentEvidence(wire.Incident(**told), run, 900, before=spans[0], after=spans[1], **more)


def since(values, **more):
    """Values that were not reported before."""
    return evidence({}, values, **more)


def run_with(**more):
    return msgspec.structs.replace(RUN, **more)


def running(**more):
    return evidence(run=run_with(**more))


def watched(**more):
    return run_with(watch=msgspec.structs.replace(WATCH, **more))


def fingerprint(**more):
    return watched(fingerprint=wire.Fingerprint(**{"states": {}, "implementation": "foreach", **more}))


def converted(*, after):
    return watched(conversion=wire.Conversion(source="plain", target="light", step=after))


def tokens(before, after):
    """Spans of 200 steps with so many tokens a step."""
    spans = [
        Span(first, first + 200, {}, {"tokens": 0.0}, {"tokens": 200.0 * size})
        for first, size in ((400, before), (600, after))
    ]
    return IncidentEvidence(evidence().incident, RUN, 900, before=spans[0], after=spans[1])


def scaled(then, newest):
    scalars = {"skipped_steps": wire.LoggedScalar(step=1000, value=newest)}
    return since({"skipped_steps": then}, run=run_with(scalars=scalars))


def mismatch(step, **more):
    return evidence(events=[wire.Event(event=1, time=0.0, kind="replica_mismatch", text="", step=step)], **more)


def warming_up(rises):
    return evidence({"learning_rate": 0.5}, RATE, rising={"learning_rate": rises})


def gap(margin, norm=1.0):
    return {"half_ulp_margin": margin, "intended_norm": norm}


def edq_up_to(high):
    return since({"edq_ratio_high": high})


LAYERS = {f"blocks.{place}.mlp.weight": {"edq_ratio": 1.0, "update_to_weight_ratio": 1e-3} for place in range(4)}
STILL_NORM = evidence(layers=LAYERS | {"blocks.0.norm.weight": {"edq_ratio": 0.0, "update_to_weight_ratio": 1e-9}})
STILL_MLP = evidence(layers=LAYERS | {"blocks.9.mlp.weight": {"edq_ratio": 0.0, "update_to_weight_ratio": 1e-3}})
RATE = {"learning_rate": 1.0}
WINDOW = {"labels": {"window": "64"}}
RESTARTED_TWICE = {"oracle_restarts": 2.0}
NAN, WRITES, RESTARTS = {"nonfinite_params": 3.0}, {"external_writes": 3.0}, {"oracle_restarts": 1.0}
AGAIN = run_with(attempts=[BEGUN, resumed_at(500)])
BREACH = wire.Breach(expectation="weights", text="expected weights in float32", step=1)
LOSS = wire.ResumeLoss(kind="masters", text="masters are gone", step=501)
NOTHING = evidence()
OPEN, OF_THE_SERVER = (None, None, NOTHING), (None, None, evidence(run=None))
RATE_FELL = (since({"learning_rate": 0.01}, highest=RATE), since(RATE, highest=RATE), NOTHING)
CASES = {
    ("CollageEdqDrop", 0): (evidence(RATE, {"learning_rate": 0.1}), evidence(RATE, RATE), NOTHING),
    ("CollageEdqDrop", 1): (since({"residual_dropped_ratio": 0.9}, run=AGAIN), NOTHING, evidence(run=AGAIN)),
    ("CollageEdqDrop", 2): (evidence(gap(2.0), gap(1.0)), evidence(gap(2.0), gap(1.0, 0.5)), evidence(gap(2.0))),
    ("CollageEdqLow", 0): (warming_up(True), warming_up(False), evidence(RATE)),
    ("CollageEdqLow", 1): (edq_up_to(0.95), edq_up_to(0.85), since({"edq_ratio": 0.8})),
    ("CollageUpdatesLost", 0): (
        evidence(run=fingerprint(stochastic_rounding=True)),
        evidence(run=fingerprint(stochastic_rounding=False)),
        NOTHING,
    ),
    ("CollageUpdatesLost", 1): RATE_FELL,
    ("CollageWindowUpdatesLost", 0): (since(gap(-9.0), **WINDOW), since(gap(-1.0), **WINDOW), since(gap(-1.0))),
    ("CollageWindowUpdatesLost", 1): RATE_FELL,
    ("CollageLayersStandStill", 0): (STILL_NORM, STILL_MLP, NOTHING),
    ("CollageLayersStandStill", 1): (STILL_NORM, STILL_MLP, NOTHING),
    ("CollageOracleDrift", 0): (since({"oracle_steps": 100.0}), since({"oracle_steps": 800.0}), NOTHING),
    ("CollageOracleDrift", 1): (evidence(RESTARTS, RESTARTED_TWICE), evidence(RESTARTS, RESTARTS), NOTHING),
    ("CollageExpectationBroken", 0): (None, None, evidence(run=watched(broken=[BREACH]))),
    ("CollageExpectationBroken", 1): (
        evidence(run=watched(observed_strategy="unknown")),
        evidence(run=watched(observed_strategy="plain")),
        running(watch=None),
    ),
    ("CollageResumeLoss", 0): (None, None, evidence(run=watched(resume_losses=[LOSS]))),
    ("CollageResumeLoss", 1): (since({}, run=converted(after=500)), since({}, run=converted(after=5)), NOTHING),
    ("CollageSecondMomentStuck", 0): (
        evidence({"grad_norm": 1.0}, {"grad_norm": 2.0}),
        evidence({"grad_norm": 1.0}, {"grad_norm": 1.2}),
        NOTHING,
    ),
    ("CollageResidualsOff", 0): (None, NOTHING, evidence(run=AGAIN)),
    ("CollageResidualsOff", 1): (evidence({"external_writes": 0.0}, WRITES), evidence(WRITES, WRITES), NOTHING),
    ("CollageResidualsOff", 2): (
        evidence(run=converted(after=500)),
        evidence({"residual_zero_ratio": 0.0}, {"residual_zero_ratio": 1.0}),
        NOTHING,
    ),
    ("CollageDecayLost", 0): RATE_FELL,
    ("CollageNotFinite", 0): (
        evidence(NAN, NAN, metric="nonfinite_params"),
        evidence({"nonfinite_params": 0.0}, NAN, metric="nonfinite_params"),
        NOTHING,
    ),
    ("CollageReplicaMismatch", 0): (mismatch(10), mismatch(500), NOTHING),
    ("CollageGradientExploding", 0): (tokens(10, 20), None, tokens(10, 10)),
    ("CollageGradientExploding", 1): (tokens(10, 20), tokens(10, 10), NOTHING),
    ("CollageGradientVanishing", 0): (since({"loss": 1e-4}), since({"loss": 2.0}), NOTHING),
    ("CollageLossUnstable", 0): (tokens(10, 20), None, NOTHING),
    ("CollageLossNotFinite", 0): (
        evidence(series=[2.0, "NaN", 2.0]),
        evidence(series=[2.0, "NaN", "NaN"]),
        evidence(series=[2.0, 2.0]),
    ),
    ("CollageStepsSkipped", 0): (scaled(30.0, 31.0), scaled(30.0, 90.0), NOTHING),
    ("CollageRunStalled", 0): (NOTHING, evidence(run=AGAIN), running(last_step=900)),
    ("CollageRunStalled", 1): (running(updated_at=1e6), NOTHING, running(last_step=None)),
    ("CollageRunWithoutData", 0): (None, NOTHING, running(watch=None)),
    ("CollageRunWithoutData", 1): (NOTHING, None, running(latest={})),
    ("CollageAgentOverBudget", 0): (evidence(run=watched(sample="all")), None, NOTHING),
    ("CollageAverageOff", 0): OPEN,
    ("CollageReplicaMismatch", 1): OPEN,
    ("CollageExternalWrites", 0): OPEN,
    ("CollageExternalWrites", 1): OPEN,
    ("CollageGradientVanishing", 1): OPEN,
    ("CollageLossUnstable", 1): OPEN,
    ("CollageReportsDropped", 0): OPEN,
    ("CollageAlertsNotEvaluated", 0): OPEN,
    ("CollageIngestFailing", 0): OF_THE_SERVER,
    ("CollageDiskNearlyFull", 0): OF_THE_SERVER,
    ("CollageArchiveAway", 0): OF_THE_SERVER,
    ("CollageArchiveDamaged", 0): OF_THE_SERVER,
    ("CollageDatabaseDamaged", 0): OF_THE_SERVER,
    ("CollageBackupOld", 0): OF_THE_SERVER,
}
"""(alert, place of the cause) → evidence for it, against it, and some that decides nothing; None: there is none."""


def test_every_cause_of_the_catalogue_has_a_check_and_a_case():
    assert set(CASES) == {
        (name, place) for name, entry in ALERTS.items() for place in range(len(entry.other_causes))
    }
    for entry in ALERTS.values():
        assert len(entry.checks) == len(entry.other_causes), entry.name


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_cause_is_supported_ruled_out_or_left_open(name, place):
    for given, expected in zip(CASES[name, place], (True, False, None), strict=True):
        if given is not None:
            cause, verdict = ALERTS[name].cause_verdicts(given)[place]
            assert cause == ALERTS[name].other_causes[place]
            assert verdict.holds is expected, verdict
            assert verdict.because
            assert not verdict.because.endswith(".")


@pytest.mark.parametrize("name", ALERTS)
def test_nothing_reported_decides_no_cause(name):
    found = ALERTS[name].cause_verdicts(IncidentEvidence(evidence().incident))
    assert [verdict.holds for _, verdict in found] == [None] * len(found)


def test_every_metric_that_a_check_compares_is_read():
    read = {bound for name in COMPARED_METRICS for bound in (name, f"{name}_low", f"{name}_high")}
    asked = set()
    for module in (causes, changes, operation, training, residuals, states, updates, weights):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func).startswith("case."):
                continue
            if ast.unparse(node.func).split(".")[-1] in READERS:
                asked |= {value.value for value in node.args if isinstance(value, ast.Constant) and value.value}
    assert {"learning_rate", "tokens", "external_writes", "edq_ratio_high"} <= asked <= read


def test_an_alert_of_another_package_needs_no_checks():
    entry = ALERTS["CollageEdqDrop"]
    bare = Alert(**{**{name: getattr(entry, name) for name in entry.__dataclass_fields__}, "checks": ()})
    assert [verdict.holds for _, verdict in bare.cause_verdicts(evidence())] == [None] * 3


def test_the_metric_that_an_alert_judges():
    assert ALERTS["CollageEdqDrop"].metric({"state": "exp_avg_sq"}) == "edq_ratio"
    stuck = ALERTS["CollageSecondMomentStuck"]
    assert stuck.metric({"key": "state_decrement_ratio/exp_avg_sq"}) == "state_decrement_ratio/exp_avg_sq"
    assert ALERTS["CollageNotFinite"].metric({"key": "residual_nonfinite"}) == "residual_nonfinite"
    assert ALERTS["CollageLossUnstable"].metric({}) == "loss"
    assert ALERTS["CollageRunStalled"].metric({}) is None


@pytest.mark.parametrize(("seconds", "holds"), [(270.0, False), (330.0, True)])
def test_long_steps_are_a_cause_of_a_stalled_run_only_from_the_alerts_own_wait_on(seconds, holds):
    """Steps 270 s apart were said to be more than five minutes away."""
    alert = ALERTS["CollageRunStalled"]
    run = run_with(first_step=0, updated_at=seconds * 1000 / WATCH.every)
    _, (cause, verdict) = alert.cause_verdicts(evidence(run=run))
    assert "more than five minutes" in cause
    assert (verdict.holds, verdict.because) == (holds, f"measured steps are about {seconds:.3g} s apart")


def test_a_constant_rate_whose_means_are_rounded_differently_does_not_rise():
    rate = 0.0002
    means = [sum([rate] * count) / count for count in range(1, 40)]
    assert max(means) > rate, "they differ"
    assert not _rises(rate, max(means))
    assert _rises(rate * 399, rate * 400)


SMALL_STANDING = {name: {"edq_ratio": 0.0, "update_to_weight_ratio": 1e-9} for name in ("a", "b", "c")}


STANDING = {name: {"edq_ratio": 0.0} for name in ("norm.weight", "fc.weight")}
HALF_AT_RANDOM = {"layer_rounds_at_random": {"a": True, "b": False}}


@pytest.mark.parametrize(
    ("name", "place", "found", "holds"),
    [
        # What holds of some of the layers does not hold of all, and leaves open what nothing else tells.
        ("CollageLayersStandStill", 0, evidence(layers=STANDING), False),
        ("CollageUpdatesLost", 0, evidence(run=fingerprint(**HALF_AT_RANDOM)), None),
        ("CollageUpdatesLost", 0, evidence(run=fingerprint(stochastic_rounding=True, **HALF_AT_RANDOM)), True),
        # Older events that are left out might tell.
        ("CollageReplicaMismatch", 0, mismatch(10, older_events=7), True),
        ("CollageReplicaMismatch", 0, mismatch(500, older_events=7), None),
        ("CollageOracleDrift", 0, since({"oracle_steps": 799.0}), False),
        ("CollageOracleDrift", 0, since({"oracle_steps": 798.0}), True),
        ("CollageLayersStandStill", 1, evidence(layers=SMALL_STANDING | LAYERS), True),
        ("CollageLayersStandStill", 1, evidence(layers=SMALL_STANDING), None),
        ("CollageResidualsOff", 2, evidence(run=converted(after=399)), True),
        ("CollageResidualsOff", 2, evidence(run=converted(after=398)), False),
        ("CollageResidualsOff", 2, evidence(run=converted(after=799)), True),
        ("CollageResidualsOff", 2, evidence(run=converted(after=800)), False),
        ("CollageNotFinite", 0, evidence({"loss": 3.0}, {"loss": 0.0}, metric="loss"), False),
        ("CollageWindowUpdatesLost", 0, evidence({}, {"half_ulp_margin": -5.0}, labels={"window": "64"}), False),
        ("CollageGradientExploding", 0, tokens(20, 10), True),
        ("CollageGradientExploding", 0, tokens(20, 18), None),
    ],
)
def test_what_stands_at_an_edge(name, place, found, holds):
    """The first and last step of the spans, the rest of the layers alone, nothing left, fewer as well as more."""
    assert ALERTS[name].checks[place](found).holds is holds


def test_what_is_below_zero_rises_by_a_share_of_its_size():
    holds = [causes.rose(evidence({"loss": -1.0}, {"loss": now}), "loss", by=0.5).holds for now in (-0.6, -0.4)]
    assert holds == [False, True]


@pytest.mark.parametrize(
    ("begun", "attempt"), [([], None), ([400], None), ([401], 2), ([900], 2), ([901], None), ([500, 700], 3)]
)
def test_the_newest_restart_after_the_first_step_before_and_up_to_the_alert_counts(begun, attempt):
    later = [resumed_at(step, attempt) for attempt, step in enumerate(begun, start=2)]
    found = restarted(running(attempts=[BEGUN, *later]))
    assert (found and found.attempt) == attempt


def test_what_only_logs_and_a_run_that_began_late_were_not_restarted():
    logs = msgspec.structs.replace(resumed_at(500), measured_from=None)
    for attempts in ([BEGUN, logs], [msgspec.structs.replace(BEGUN, measured_from=500)]):
        assert restarted(running(attempts=attempts)) is None
    assert causes.tokens_a_step(tokens(512, 1024)) == (512, 1024)


def test_the_newest_gap_and_the_worst_layers_metric_are_told():
    gaps = [wire.Event(event=n, time=n, kind="gap", text=f"gap {n}") for n in (1, 2)]
    assert ALERTS["CollageReportsDropped"].checks[0](evidence({}, {}, events=gaps)).because == "gap 2"
    entry = ALERTS["CollageEdqDrop"]
    named = dataclasses.replace(
        entry, conditions=(dataclasses.replace(entry.conditions[0], series="collage_worst_layer_edq_ratio"),)
    )
    assert named.metric({}) == "edq_ratio"
