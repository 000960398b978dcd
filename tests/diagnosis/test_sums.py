"""How a sum grows, such as Adagrad's, is judged as the decrements of averages are."""

import pytest
import torch
from collage_agent.handle import watch

from collage_monitor import wire
from collage_monitor.diagnosis import Evidence, judge
from tests.diagnosis.test_judgement import GOOD, STATE, judged

SUM = "state_increment_ratio/sum"


@pytest.mark.parametrize(
    ("value", "now", "health", "headline", "words"),
    [
        (1.0, None, "healthy", "Healthy", "sum grows as it should (1.000)"),
        (
            0.73,
            None,
            "states are stuck",
            "Sum is stuck",
            "(0.730): steps that divide by its root tend to 1.17 times",
        ),
        (
            0.95,
            0.64,
            "states are stuck",
            "Sum is stuck",
            "(0.950, 0.640 now): steps that divide by its root tend to 1.25",
        ),
        (
            0.73,
            0.99,
            "states are stuck",
            "Sum is stuck",
            "(0.730, 0.990 now): steps that divide by its root tend to 1.17",
        ),
        (0.0, None, "states are stuck", "Sum is stuck", "state sum does not grow as it should (0.000). "),
        (
            -0.5,
            None,
            "states are stuck",
            "Sum shrinks instead",
            "shrinks where it should grow, by 0.50 times as much",
        ),
        (1.4, None, "steps are off", "Sum grows too fast", "the state sum grows too fast (1.400)"),
    ],
)
def test_a_sum_is_judged_by_how_it_grows(value, now, health, headline, words):
    """Adagrad's in bfloat16 held 0.73 of the true one, steps were 1.17 times too long, and "unknown" was said."""
    info = wire.WatchInfo(optimizer="Adagrad", observed_strategy="plain", dtype="bfloat16")
    model = {**GOOD, STATE: None, SUM: value}
    found = judge(Evidence(model, {}, info, 1, 100, now={**model, SUM: value if now is None else now}))
    assert (found.health, found.headline[: len(headline)]) == (health, headline)
    assert words.lower() in found.text.lower()


def test_chance_is_no_fault_of_a_sum_that_is_rounded_at_random():
    model = {**GOOD, STATE: None, SUM: 0.8, "state_increment_noise_ratio/sum": 0.05}
    assert judged(model).health == "states are stuck"
    assert "sum is off by what chance may do (0.800)" in judged(model, strategy="stochastic").text
    # What chance could have moved here from 0 confirms nothing.
    model["state_increment_noise_ratio/sum"] = 0.35
    assert judged(model, strategy="stochastic").health == "unknown"


def test_a_sum_that_stands_still_wakes():
    """Adagrad's in bfloat16, from some hundred steps on: no alert spoke of it."""
    torch.manual_seed(0)
    weight = torch.nn.Linear(24, 24, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.Adagrad(weight.parameters(), lr=1e-2)
    handle = watch(weight, optimizer, every=20, budget=None)
    for _ in range(700):
        weight.weight.grad = torch.randn(24, 24).sign().to(torch.bfloat16)
        optimizer.step()
    finding = next(found for found in handle.judgement().findings if found.key == SUM)
    assert (finding.health, finding.alert, finding.value) == (
        "states are stuck",
        "CollageSecondMomentStuck",
        9 / 32,
    )
