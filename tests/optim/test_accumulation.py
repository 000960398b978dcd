"""What a thousand steps of rounding leave, against fp64 AdamW on the same gradients."""

import math
from typing import Any

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW

from benchmarks.accumulation import measure
from collage_monitor.strategies import STRATEGIES as CATALOGUE
from collage_monitor.strategies import recommend
from tests.optim.models import walk
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
    second = reference_value(optimizer.state[parameter], "exp_avg_sq")
    moved, exact = optimizer.stored_parameter(parameter) - origin, reference.parameter - origin
    pairs = (moved, exact), (second, reference.second)
    return [float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs]


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


@pytest.mark.parametrize(
    ("strategy", "arithmetic", "decay", "steps", "lowest", "highest", "each"),
    [
        *((name, form, 0.999, 200, 0.0, 0.0, True) for name in ("plain", "light") for form in ("fp32", "storage")),
        *(("plus", form, 0.999, 200, 0.95, 1.05, True) for form in ("fp32", "storage")),
        *((name, "fp32", 0.999, 300, 0.966, 1.034, False) for name in ("split-master", "split-master-16bit")),
        *(
            (name, form, 0.999, 300, 0.966, 1.034, False)
            for name in ("stochastic", "light-stochastic")
            for form in ("fp32", "storage")
        ),
        # On both sides of the limits that `range_guards` tells.
        ("light", "fp32", 1 - 2.0**-7.9, 239, 0.7, 1.5, False),
        ("light", "fp32", 1 - 2.0**-8.6, 388, 0.0, 0.3, False),
        pytest.param("plus", "fp32", 1 - 2.0**-14, 2000, 0.95, 1.05, False, marks=pytest.mark.nightly),
        pytest.param("plus", "fp32", 1 - 2.0**-20, 2000, 0.0, 0.3, False, marks=pytest.mark.nightly),
    ],
)
def test_decay_of_the_second_moment_alone(strategy, arithmetic, decay, steps, lowest, highest, each):
    """One gradient, then none: the decay as a share of the exact one, of each element or of their mean.

    It is none where an average can only grow.
    """
    at_random = STRATEGIES[strategy].stochastic
    parameter = torch.nn.Parameter(torch.ones(20_000 if at_random else 128, dtype=torch.bfloat16))
    optimizer = CollageAdamW([parameter], strategy=strategy, arithmetic=arithmetic, betas=(0.9, decay), lr=0.0)
    walk(optimizer, torch.linspace(1, 2, len(parameter)))
    before = reference_value(optimizer.state[parameter], "exp_avg_sq")
    walk(optimizer, *[0.0] * steps)
    left = reference_value(optimizer.state[parameter], "exp_avg_sq") / before
    shares = (left if each else left.mean()).log() / (steps * math.log(decay))
    assert lowest <= shares.min()
    assert shares.max() <= highest


def test_decay_of_weights_is_not_rounded_away():
    """1 - lr * weight_decay is 1 in bf16; as part of the displacement the decay reaches the low component."""
    parameter = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = CollageAdamW([parameter], lr=1e-3, weight_decay=0.1, strategy="light")
    expected = torch.full((16,), (1 - 1e-4) ** 100, dtype=torch.float64)
    torch.testing.assert_close(walk(optimizer, *[0.0] * 100), expected, rtol=3e-5, atol=0)


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
