"""Evidence is the same from the same totals in whatever process; the recent past begins at the last change."""

import numpy as np
import pytest

from collage_monitor import wire
from collage_monitor.diagnosis import evidence_of, judge, last_change, recent_points
from tests.diagnosis.test_judgement import GOOD, judged, layer


def test_totals_give_the_same_evidence_whatever_process_holds_them():
    """Model and layers, merged over their points by the rules of the catalogue; cut into points differently."""
    layers = {
        "measured_steps": np.ones((3, 2)),
        "elements": np.full((3, 2), 10.0),
        "intended_squared_sum": np.array([[4.0, 1.0], [4.0, 1.0], [4.0, 1.0]]),
        "intended_effective_sum": np.array([[4.0, 0.0], [2.0, 0.0], [3.0, np.nan]]),
    }
    model = {
        "measured_steps": np.array([1.0, 2.0]),
        "elements": np.full(2, 20.0),
        "intended_squared_sum": np.array([5.0, 10.0]),
        "intended_effective_sum": np.array([4.0, 5.0]),
    }
    watch = wire.WatchInfo(optimizer="AdamW", observed_strategy="plain", dtype="bfloat16")
    found = evidence_of(model, layers, ["a", "b"], watch=watch, first_step=1, last_step=3)
    assert found.model["edq_ratio"] == 0.6
    assert (found.layers["a"]["edq_ratio"], found.layers["b"]["edq_ratio"]) == (0.75, 0.0)
    assert (found.watch, found.first_step, found.last_step) == (watch, 1, 3)
    assert "the model as a whole" not in judge(found).text
    assert "the model as a whole" in judge(evidence_of(model, watch=watch, first_step=1, last_step=3)).text
    assert judge(evidence_of({}, watch=watch)).text == "No step was measured yet."


@pytest.mark.parametrize(
    ("measured", "taken"), [([1.0] * 5, 0), ([1.0] * 6, 5), ([4.0, 4.0, 1.0], 2), ([9.0, 5.0], 1), ([9.0], 0)]
)
def test_now_is_the_newest_points_with_five_steps_unless_they_are_all(measured, taken):
    numbers = np.arange(float(len(measured)))
    model = {"measured_steps": np.array(measured), "elements": numbers + 10, "intended_squared_sum": numbers + 1}
    found = evidence_of(model).now
    assert found == (evidence_of({key: values[-taken:] for key, values in model.items()}).model if taken else {})
    assert evidence_of(model, watch=wire.WatchInfo(optimizer="Shampoo", intent="whole-tensor")).now == {}


def launches(*measured_from):
    return [
        wire.Attempt(run_id="r", attempt=n, launch_id=f"l{n}", first_step=1, created_at=0.0, measured_from=begin)
        for n, begin in enumerate(measured_from, start=1)
    ]


CONVERTED = wire.Conversion(source="plain", target="plus", step=100)


@pytest.mark.parametrize(
    ("attempts", "watch", "since"),
    [
        ([], {}, 0),
        (launches(1), {}, 1),
        (launches(1, 101), {}, 101),
        (launches(1, None, 101, None), {}, 101),
        (launches(1, 101, 51), {}, 51),
        (launches(1, 101, 120), {}, 120),
        (launches(1, 101, 121), {}, 101),
        (launches(1), {"conversion": CONVERTED}, 101),
        (launches(1, 110), {"conversion": CONVERTED}, 110),
        (launches(1), {"kept_since": 90, "conversion": CONVERTED}, 90),
        (launches(1, 51), {"kept_since": 120}, 120),
        (launches(1, 51), {"kept_since": 121}, 51),
    ],
)
def test_the_last_change_is_the_newest_that_a_measured_step_follows(attempts, watch, since):
    """A launch, a conversion, or what the agent says; a launch hides older ones that began beyond it."""
    assert last_change(attempts, wire.WatchInfo(optimizer="AdamW", **watch), 120) == since


def test_the_recent_past_begins_at_the_last_change():
    """Also a point that was merged across it counts; of Σ u², that of before is no measure of it."""
    steps, ones = list(range(10, 1001, 10)), [1.0] * 100
    assert recent_points(steps, ones, ones, 0) == 32
    assert recent_points(steps, ones, ones, 500) == 32
    assert recent_points(steps, ones, ones, 901) == 10
    assert recent_points(steps, ones, ones, 999) == 1
    faded = [1.0] * 60 + [1e-6] * 40
    assert recent_points(steps, ones, faded, 0) == 43
    assert recent_points(steps, ones, faded, 601) == 32
    assert recent_points([], [], [], 0) == 0


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("masters", "residuals are off"),
        ("residuals", "residuals are off"),
        ("averages", "steps are off"),
        ("count", "steps are off"),
        ("counter", "steps are off"),
    ],
)
def test_what_a_resume_lost_counts_while_the_recent_past_reaches_back_to_it(kind, word):
    def judged_at(step, *, lasting):
        loss = wire.ResumeLoss(kind=kind, text="it is gone", step=step, lasting=lasting)
        return judged(GOOD, {"a": layer()}, resume_losses=[loss])

    assert judged_at(50, lasting=False).health == word
    assert judged_at(50, lasting=False).text.startswith("It is gone.")
    # The evidence is that of steps 1 to 100.
    assert judged_at(1, lasting=False).health == word
    assert judged_at(0, lasting=False).health == "healthy"
    assert judged_at(0, lasting=True).health == word


def test_what_a_resume_may_have_lost_is_a_doubt_for_as_long():
    def judged_at(step, **watch):
        doubt = wire.ResumeLoss(kind="averages", text="it may be gone", short="may be gone", step=step)
        return judged(GOOD, {"a": layer()}, launch_doubts=[doubt], **watch)

    found = judged_at(1)
    assert (found.health, found.short, found.headline) == ("unknown", "may be gone", "It may be gone.")
    assert [finding.alert for finding in found.findings] == [""]
    assert judged_at(0).health == "healthy"
    loss = wire.ResumeLoss(kind="averages", text="it is gone", step=1)
    assert judged_at(1, resume_losses=[loss]).health == "steps are off"
