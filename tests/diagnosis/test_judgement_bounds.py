"""Numbers at the bounds of the judgement's rules, and just beyond them."""

import numpy as np
import pytest

from collage_monitor import wire
from collage_monitor.diagnosis import EDQ_TOLERANCE, STATE_TOLERANCE, case, residuals, states, updates
from tests.diagnosis.test_judgement import GOOD, STATE, judged, layer

LOSING = {**GOOD, "update_error_ratio": 1.0}
FOREACH = {"fingerprint": wire.Fingerprint(implementation="foreach", stochastic_rounding=False)}


@pytest.mark.parametrize(
    ("key", "bound", "beyond", "health", "others", "watch"),
    [
        ("edq_ratio", 1 - EDQ_TOLERANCE, -1, "losing updates", GOOD, {}),
        ("edq_ratio", 1 + EDQ_TOLERANCE, 1, "steps are off", GOOD, {}),
        (STATE, 1 - STATE_TOLERANCE, -1, "states are stuck", GOOD, {}),
        (STATE, 1 + STATE_TOLERANCE, 1, "steps are off", GOOD, {}),
        ("edq_oracle_ratio", 1 - states.ORACLE_TOLERANCE, -1, "steps are off", GOOD, {}),
        ("edq_oracle_ratio", 1 + states.ORACLE_TOLERANCE, 1, "steps are off", GOOD, {}),
        ("lost_update_ratio", updates.LOST.threshold, 1, "losing updates", LOSING, {}),
        ("decay_ratio", states.DECAY.threshold, -1, "decay is lost", GOOD, FOREACH),
        ("residual_fill_ratio", residuals.FILL.threshold, 1, "residuals are off", GOOD, {}),
        ("residual_dropped_ratio", residuals.DROPPED.threshold, 1, "residuals are off", GOOD, {}),
        ("nonfinite_params", 0.0, 1, "not finite", GOOD, {}),
    ],
)
def test_a_number_at_its_bound_is_not_beyond_it(key, bound, beyond, health, others, watch):
    def found(value):
        said = judged({**others, key: value}, **watch).findings
        return [
            (finding.health, finding.value) for finding in said if finding.key == key and finding.health == health
        ]

    further = float(np.nextafter(bound, beyond * np.inf))
    assert found(bound) == []
    assert found(further) == [(health, further)]


def test_a_layer_counts_from_its_share_and_its_residuals_from_their_number():
    """Its share of Σ u² must be beyond the tolerance; of few residuals all may have come to 0 by chance."""
    share = case.LAYER_TOLERANCE
    lost = {"lost_update_ratio": 1.0, "update_error_ratio": 1.0}

    def losing(norm, edq=0.0):
        others = layer(norm=float(np.sqrt(1 - norm**2)))
        return judged(GOOD, {"a": layer(norm=norm, edq_ratio=edq, **lost), "b": others}).health

    assert losing(float(np.sqrt(0.9 * share))) == "healthy"
    assert losing(float(np.sqrt(1.1 * share))) == "losing updates"
    # An overshoot by more than a half is an error of a half by itself: its layer "loses most", at an EDQ of 12.9.
    assert losing(0.5, 1.5) == "losing updates"
    assert losing(0.5, 1.6) == "healthy"

    def emptied(elements, dropped=1.0):
        layers = {"a": layer(elements=elements, residual_dropped_ratio=dropped), "b": layer(norm=1.0)}
        return judged(GOOD, layers).health

    assert emptied(residuals.FEWEST_RESIDUALS) == "residuals are off"
    assert emptied(residuals.FEWEST_RESIDUALS - 1) == "healthy"
    assert emptied(residuals.FEWEST_RESIDUALS, residuals.DROPPED.threshold) == "healthy"
    assert emptied(None) == "healthy"
