"""What a thousand steps of rounding leave, against fp64 AdamW on the same gradients."""

from typing import Any

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW

from benchmarks.accumulation import measure
from collage_monitor.strategies import STRATEGIES as CATALOGUE
from collage_monitor.strategies import recommend
from tests.reference.adamw import ReferenceAdamW
from tests.reference.stored import reference_value
from tests.reference.streams import Course, Courses, falling_gradients, noisy_gradients, start_of

pytestmark = pytest.mark.slow

ELEMENTS = 512


GRADIENTS = {"noisy": noisy_gradients, "falling": falling_gradients}


def errors(stream, strategy, arithmetic, beta2=0.999, steps=1000):
    """(displacement error, second moment's error), relative, in the 2-norm."""
    parameter = torch.nn.Parameter(start_of(ELEMENTS))
    origin = parameter.detach().double()
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01, "betas": (0.9, beta2)}
    optimizer = CollageAdamW([parameter], strategy=strategy, arithmetic=arithmetic, **options)
    reference = ReferenceAdamW(parameter, **options)
    for gradient in GRADIENTS[stream](ELEMENTS, steps):
        parameter.grad = gradient
        optimizer.step()
        reference.step(gradient)
    found = (optimizer.stored_parameter(parameter), reference_value(optimizer.state[parameter], "exp_avg_sq"))
    exact = (reference.parameter, reference.second)
    parts = zip(found, exact, (origin, 0.0), strict=True)
    return [float((own - wanted).norm() / (wanted - start).norm()) for own, wanted, start in parts]


@pytest.mark.drawn
@pytest.mark.parametrize("stream", ["noisy", "falling"])
@pytest.mark.parametrize(
    ("strategy", "arithmetic", "displacement", "second"),
    [
        ("plus", "fp32", 3e-3, 1e-4),
        ("plus", "storage", 3e-3, 2e-3),
        # In 12 bytes; what remains is of the moments' 24 bits.
        ("split-master", "fp32", 2e-4, 4e-4),
        ("master-weights", "fp32", 2e-5, 2e-5),
    ],
)
def test_a_faithful_keeping_accumulates_faithfully(strategy, arithmetic, displacement, second, stream):
    moved, average = errors(stream, strategy, arithmetic)
    assert moved <= displacement
    assert average <= second


def test_light_keeps_what_plain_loses():
    assert errors("noisy", "light", "fp32", beta2=0.95)[0] < 5e-3


@pytest.mark.parametrize(("strategy", "decays"), [("plain", False), ("light", False), ("plus", True)])
@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
def test_decay_of_the_second_moment_alone(strategy, decays, arithmetic):
    """One gradient, then none: 200 steps at 0.999 leave 0.819 of v, or all of it where it can only grow."""
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = CollageAdamW([parameter], strategy=strategy, arithmetic=arithmetic, lr=0.0)
    parameter.grad = torch.logspace(-3, 0, 64).bfloat16()
    optimizer.step()
    state = optimizer.state[parameter]
    before = state["exp_avg_sq"].double()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(200):
        optimizer.step()
    left = state["exp_avg_sq"].double() / before
    expected = 0.999**200 if decays else 1.0
    torch.testing.assert_close(left, torch.full_like(left, expected), rtol=1e-2, atol=0)


def test_decay_of_weights_is_not_rounded_away():
    """1 - lr * weight_decay is 1 in bf16; as part of the displacement the decay reaches the low component."""
    parameter = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = CollageAdamW([parameter], lr=1e-3, weight_decay=0.1, strategy="light")
    for _ in range(100):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    expected = torch.full((16,), (1 - 1e-4) ** 100, dtype=torch.float64)
    torch.testing.assert_close(optimizer.stored_parameter(parameter), expected, rtol=3e-5, atol=0)


CHOSEN = (
    Course("noisy", "1", 1e-5),
    Course("zero-mean", "0.5"),
    Course("falling", "1", cosine=True),
    Course("heavy-tailed", "0.02"),
    Course("sparse", "four decades"),
    Course("constant", "0.02", 1e-4),
)
WITHIN = {
    "split-master": (2e-3, 5e-4, 5e-4, 5e-4, 5e-4, 5e-4),
    "split-master-16bit": (6e-3, 1e-2, 8e-3, 8e-3, 8e-3, 4e-3),
    "split-master-8bit": (4e-2, 6e-2, 5e-2, 8e-2, 8e-2, 4e-2),
    "split-24bit-8bit": (6e-2, 8e-2, 5e-2, 8e-2, 8e-2, 4e-2),
    "coupled-9": (3e-3, 4e-3, 3e-3, 3e-3, 3e-3, 1e-3),
    "coupled-8": (5e-2, 4e-2, 3e-2, 8e-3, 8e-3, 4e-3),
    "coupled-7": (5e-2, 4e-2, 3e-2, 2e-2, 3e-2, 4e-3),
}
"""After 300 steps; `benchmarks.accumulation` runs 10,000 of more courses."""


@pytest.fixture(scope="module")
def measured():
    """(rows, bytes a parameter by strategy)."""
    return measure(Courses(CHOSEN, 128, 300), 0.999, list(STRATEGIES))


def test_split_strategies_accumulate_faithfully_in_short_courses(measured):
    """Fine-tuning, a cosine to zero, heavy tails and sparse gradients among them."""
    errors = {(row.strategy, row.course): row.error for row in measured[0]}
    for strategy, limits in WITHIN.items():
        for course, limit in zip(CHOSEN, limits, strict=True):
            assert errors[strategy, course.name] <= limit, (strategy, course.name)
    for course in CHOSEN:
        assert errors["split-master", course.name] < errors["plus", course.name] / 2
        assert errors["split-master-16bit", course.name] < errors["light-stochastic", course.name]


def test_recommended_by_bytes_are_the_most_exact_that_fit(measured):
    """Among all of ours of as many bytes or fewer; what is better without a clear cause would be a surprise."""
    results, sizes = measured
    worst = {strategy: max(row.error for row in results if row.strategy == strategy) for strategy in STRATEGIES}
    for allowed in (16, 12, 10, 8, 7):
        chosen = recommend(allowed)
        assert chosen is not None
        fitting = [name for name in STRATEGIES if round(sizes[name]) <= allowed]
        best = min(worst[name] for name in fitting)
        assert worst[chosen.name] <= 1.5 * best, (allowed, worst)
    assert recommend(7.1) is not None
    assert recommend(6) is None
    assert [recommend(size, sharded=True) for size in (11, 8)] == [CATALOGUE["split-master-16bit"], None]
