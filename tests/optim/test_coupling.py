"""Coupled rounding: the point x = w − c m that a weight is going to is kept, whatever its parts are rounded to."""

import math

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, CollageLion, CollageSGD
from collage_optim.update_rules import AdamRule

from tests.optim.models import walk
from tests.reference.adamw import ReferenceAdamW
from tests.reference.stored import reference_value

COUPLED = [name for name, strategy in STRATEGIES.items() if strategy.coupled]
BITS = {"split-24bit-8bit": 15, "coupled-8": 15, "coupled-7": 15}
LEVELS = {"coupled-7": 31}
BETAS = (0.9, 0.999)


def ahead_of(beta, step):
    """Σ_k β^k / (1 − β^(t + k)), term by term."""
    return math.fsum(beta**k / (1 - beta ** (step + k)) for k in range(1, 4000))


@pytest.mark.parametrize(("beta", "step"), [(0.9, 1), (0.9, 1000), (0.5, 3), (0.99, 1), (0.99, 20)])
def test_how_far_a_moment_still_moves_its_weight(beta, step):
    group = {"lr": 0.25, "betas": (beta, 0.999)}
    numbers = AdamRule(decoupled=True).scalars_ahead(group, step)
    assert numbers["lr_ahead"] == pytest.approx(0.25 * ahead_of(beta, step), rel=1e-12)
    # One step of it is lr / (1 − β^t).
    assert -numbers["step_of_ahead"] * numbers["lr_ahead"] == pytest.approx(0.25 / (1 - beta**step), rel=1e-12)


def values(optimizer, weight, name):
    return reference_value(optimizer.state[weight], name, weight if name == "parameter" else None)


def gaps(weight, strategy):
    return torch.ldexp(torch.ones(len(weight)), torch.frexp(weight).exponent - 1 - BITS.get(strategy, 23)).double()


def stepped(strategy, rate, scale, seed, steps=12):
    """(x, what it should be, the gaps of the weight and of c m, what fp32 may err) after the last of some steps."""
    generator = torch.Generator().manual_seed(3)
    start = (torch.randn(640, generator=generator) * scale).bfloat16()
    sizes = 10 ** (torch.rand(640, generator=generator) * 2 - 2)
    weight = torch.nn.Parameter(start)
    optimizer = CollageAdamW([weight], lr=rate, betas=BETAS, weight_decay=0.1, strategy=strategy, seed=7)
    for step in range(1, steps + 1):
        gradient = weight.grad = (sizes * (0.3 + torch.randn(640, generator=generator))).bfloat16()
        if step == steps:
            w, m, v = (values(optimizer, weight, name) for name in ("parameter", "exp_avg", "exp_avg_sq"))
            optimizer.param_groups[0]["seed"] = seed
        optimizer.step()
    g = gradient.double()
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    per_unit = rate / ((v / (1 - 0.999**steps)).sqrt() + 1e-8)
    ahead = per_unit * ahead_of(0.9, steps)
    intended = w - 0.1 * rate * w - per_unit * m / (1 - 0.9**steps) - ahead * m
    x = values(optimizer, weight, "parameter") - ahead * values(optimizer, weight, "exp_avg")
    scale_of = optimizer.state[weight]["exp_avg_scale"].double().repeat_interleave(128)
    return (
        x,
        intended,
        gaps(w.abs() + 4 * rate, strategy),
        ahead * scale_of / LEVELS.get(strategy, 127),
        2.0**-22 * (w.abs() + ahead * m.abs()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [16, pytest.param(64, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("rate", "scale"), [(1e-3, 0.02), (3e-4, 1.0), (1e-5, 1.0)])
@pytest.mark.parametrize("strategy", COUPLED)
def test_a_step_keeps_where_the_weight_is_going(strategy, rate, scale, seeds):
    """To the finer of the weight's gap, which may grow in a step, and twice the mean step of the codes of c m."""
    runs = [stepped(strategy, rate, scale, seed) for seed in range(seeds)]
    _, intended, gap, of_moment, arithmetic = runs[0]
    finer = torch.where(gap > of_moment, 2.2 * of_moment, gap)
    assert all(((x - intended).abs() <= finer + arithmetic).all() for x, *_ in runs)
    mean = torch.stack([x for x, *_ in runs]).mean(0)
    assert ((mean - intended).abs() <= finer * 5 / math.sqrt(seeds) + arithmetic).all(), "its mean is right"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", COUPLED)
@pytest.mark.parametrize(("rates", "most"), [((1e-3, 1e-7), 1), ((1e-8, 1e-5), 6), ((1e-6, 3e-4), 10)])
def test_a_rate_that_changes_by_decades_costs_some_steps(strategy, rates, most):
    """What a moment holds for its weight at one rate is delivered at another: so many updates, root mean square."""
    generator = torch.Generator().manual_seed(5)
    start = (1 + 0.02 * torch.randn(512, generator=generator)).bfloat16()
    weight = torch.nn.Parameter(start.clone())
    optimizer = CollageAdamW([weight], betas=BETAS, weight_decay=0, strategy=strategy, seed=1)
    exact = ReferenceAdamW(start, lr=1.0, betas=BETAS, weight_decay=0)
    for rate in [rates[0]] * 150 + [rates[1]] * 30:
        gradient = (0.25 + torch.randn(512, generator=generator)).bfloat16()
        optimizer.param_groups[0]["lr"] = exact.lr = rate
        walk(optimizer, gradient)
        exact.step(gradient)
    off = values(optimizer, weight, "parameter") - exact.parameter
    assert off.square().mean().sqrt() <= most * max(rates)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_coupled_too(nesterov):
    """x = w − lr μ / (1 − μ) m, times μ with Nesterov's look ahead."""
    generator = torch.Generator().manual_seed(9)
    weight = torch.nn.Parameter(torch.randn(256, generator=generator).bfloat16())
    optimizer = CollageSGD([weight], lr=1e-4, momentum=0.9, nesterov=nesterov, strategy="split-24bit-8bit", seed=2)
    ahead = 1e-4 * 0.9 / 0.1 * (0.9 if nesterov else 1.0)
    walk(optimizer, torch.randn(256, generator=generator))
    w, m = (values(optimizer, weight, name) for name in ("parameter", "momentum_buffer"))
    walk(optimizer, gradient := torch.randn(256, generator=generator).bfloat16())
    g = gradient.double()
    m = 0.9 * m + g
    intended = w - 1e-4 * (0.9 * m + g if nesterov else m) - ahead * m
    x = values(optimizer, weight, "parameter") - ahead * values(optimizer, weight, "momentum_buffer")
    of_moment = ahead * optimizer.state[weight]["momentum_buffer_scale"].double().repeat_interleave(128) / 127
    gap = gaps(w, "split-24bit-8bit")
    finer = torch.where(gap > of_moment, 2.2 * of_moment, 2 * gap) + 4e-7 * intended.abs()
    close = (gap <= 4 * ahead * g.abs()) | (gap <= of_moment)
    assert ((x - intended).abs() <= torch.where(close, finer, gap + of_moment)).all()


def test_what_moves_by_a_sign_is_not_coupled():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = CollageLion([weight], lr=1e-3, strategy="split-master-8bit")
    assert optimizer.rule_of(optimizer.param_groups[0]).scalars_ahead(optimizer.param_groups[0], 1) == {}
    for group in ({"lr": 1e-3, "betas": (0.0, 0.999)}, {"lr": 0.0, "betas": BETAS}):
        assert AdamRule(decoupled=True).scalars_ahead(group, 1) == {}


@pytest.mark.parametrize("strategy", COUPLED)
def test_nothing_comes_of_nothing_and_a_nan_stays_in_its_block(strategy):
    weight = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = CollageAdamW([weight], lr=1e-3, weight_decay=0, strategy=strategy, seed=1)
    assert walk(optimizer, 0.0).eq(1).all()
    assert values(optimizer, weight, "exp_avg").eq(0).all()
    walk(optimizer, torch.ones(300).index_fill_(0, torch.tensor(5), math.nan))
    broken = values(optimizer, weight, "parameter").isnan()
    assert broken.nonzero().flatten().tolist() == [5]
    assert values(optimizer, weight, "exp_avg").isnan().nonzero().flatten().tolist() == [*range(128)]
    assert values(optimizer, weight, "exp_avg")[128:].gt(0).all()


@pytest.mark.parametrize("strategy", COUPLED)
def test_whole_blocks_do_not_see_the_tail(strategy):
    """A tensor of two blocks and a tail steps its blocks as one without the tail does."""
    whole, longer = (torch.nn.Parameter(torch.linspace(0.5, 1, 300)[:n].bfloat16()) for n in (256, 300))
    for weight in (whole, longer):
        optimizer = CollageAdamW([weight], lr=1e-4, strategy=strategy, seed=4)
        torch.manual_seed(0)
        walk(optimizer, *torch.randn(5, 300)[:, : len(weight)])
    assert torch.equal(whole, longer[:256])
