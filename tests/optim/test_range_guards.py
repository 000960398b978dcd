"""Guards: each names the value and what to use instead, once, and nothing is said of what holds."""

import logging
import math
import re
from typing import Any

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, CollageLion, CollageSGD, StateStorage, integer_codes
from collage_optim.integer_codes import stored_value
from collage_optim.range_guards import DeferredReads, UpdateGuard, log_once, more_exact
from collage_optim.update_rules import Moment

from collage_monitor import strategies as catalogue
from tests.agent.test_no_synchronisation import Listening
from tests.optim.models import give_gradients, parameters, train, walk


@pytest.fixture(autouse=True)
def _nothing_said_before():
    log_once.cache_clear()
    yield
    log_once.cache_clear()


def findings(caplog, make, steps=0):
    """What is logged while an optimizer is made, and takes steps."""
    with caplog.at_level(logging.WARNING, logger="collage_optim"):
        optimizer = make()
        if steps:
            train(optimizer, optimizer.param_groups[0]["params"], steps)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("strategy", "beta2", "words"),
    [
        ("plain", 0.999, "use strategy 'split-master' (12 bytes a parameter) or 'coupled-8' (8 bytes"),
        ("light", 0.999, "use strategy 'split-master' (12 bytes a parameter) or 'coupled-9' (9 bytes"),
        ("kahan", 0.9985, "exp_avg_sq with decay 0.9985 is more than 'kahan' can hold in torch.bfloat16"),
        ("plus", 0.99998, "not at all below 1 - decay = 2**-15; use strategy 'split-master' (12 bytes"),
    ],
)
def test_decay_beyond_the_strategy_is_told_once(caplog, strategy, beta2, words):
    """Of three optimizers alike."""
    for _ in range(3):
        (said,) = findings(caplog, lambda: CollageAdamW(parameters(), betas=(0.9, beta2), strategy=strategy))
        assert words in said


FIRST, SECOND = Moment("exp_avg", decay=0.9), Moment("exp_avg_sq", second=True, decay=0.999)
KEPT = {
    "SGD": (),
    "momentum": (Moment("momentum_buffer", decay=0.9),),
    "AdamW, fast": (FIRST, Moment("exp_avg_sq", second=True, decay=0.95)),
    "AdamW, slow": (FIRST, SECOND),
    "amsgrad": (FIRST, SECOND, Moment("max_exp_avg_sq", second=True)),
    "without a decay": (Moment("mean"), Moment("square", second=True)),
}
"""The averages of a rule: how many and how they decay is all that advice depends on."""


@pytest.mark.parametrize("moments", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lacking", ["weights", "states"])
def test_the_optimizers_advise_what_the_catalogue_advises(moments, dtype, lacking):
    """They are installed without it; two answers to one question would be one too many."""
    second = sum(moment.second for moment in moments)
    counts = len(moments) - second, second
    for name, strategy in STRATEGIES.items():
        told = catalogue.more_exact(
            name,
            lacking,
            betas=[moment.decay for moment in moments if moment.decay is not None],
            float16=dtype == torch.float16,
            first_moments=counts[0],
            second_moments=counts[1],
        )
        found = more_exact(strategy, lacking, moments, dtype)
        names, others = ([(entry.name, entry.bytes_of(*counts)) for entry in own] for own in (found, told))
        assert names == others, name


def test_the_optimizers_count_the_bytes_that_the_catalogue_counts():
    assert set(catalogue.STRATEGIES) - set(STRATEGIES) == {"integer-remainder", "unknown"}, "known by name alone"
    for name, strategy in STRATEGIES.items():
        for counts in ((0, 0), (1, 0), (1, 1), (1, 2)):
            assert strategy.bytes_of(*counts) == catalogue.strategy(name).bytes_of(*counts), (name, counts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CollageAdamW(parameters(), lr=3e-3, betas=(0.9, 0.95), strategy="plain"),
        lambda: CollageSGD(parameters(), lr=1e-3, strategy="light"),
        lambda: CollageAdamW(parameters(torch.float32), lr=1e-12, strategy="plain"),
        lambda: CollageLion(parameters(), lr=1e-7, strategy="light-stochastic"),
        lambda: CollageAdamW(parameters(), lr=0.0, strategy="plus"),
        lambda: CollageAdamW(parameters(), betas=(0.9, 0.99), strategy="plain"),
        lambda: CollageAdamW(parameters(), betas=(0.9, 0.996), strategy="light"),
        lambda: CollageAdamW(parameters(), betas=(0.9, 0.999), strategy="light-stochastic"),
        lambda: CollageAdamW(parameters(), betas=(0.9, 0.99999), strategy="master-weights"),
        *(
            lambda name=name: CollageAdamW(parameters(), betas=(0.9, 0.9999), strategy=name)
            for name in ("plus", "full", "stochastic", "fp32-states")
        ),
    ],
)
def test_nothing_is_said_of_what_holds(caplog, make):
    """Rates, rules and decays."""
    assert findings(caplog, make, steps=6) == []


def cosine(share):
    return (1 + math.cos(math.pi * share)) / 2


STREAMS = {
    "plus, cosine to zero": ("plus", 1.0, 1.2e-5, 0.5, cosine),
    "plus, linear to a tenth": ("plus", 1.0, 1.6e-5, 0.3, lambda share: 1 - 0.9 * share),
    "light, a tenth from a tenth of the way": ("light", 0.5, 1e-5, 1.0, lambda share: 1 if share < 0.1 else 0.1),
    "kahan, inverse square root": ("kahan", 0.02, 1e-6, 0.3, lambda share: (1 + 100 * share) ** -0.5),
    "plain, exponential": ("plain", 0.02, 1e-3, 0.3, lambda share: 50**-share),
}
"""Fine-tuning: strategy, size of the weights, first rate, drift over noise, and how the rate falls."""
ELEMENTS, STEPS = 512, 800


def losses(caplog, chosen, steps=STEPS):
    """After each step: the share of the exact displacement that is lost, and whether a warning was logged."""
    strategy, scale, rate, drift, falls = chosen
    generator = torch.Generator().manual_seed(5)
    start = (torch.randn(ELEMENTS, generator=generator) * scale).bfloat16()
    kept, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizers = CollageAdamW([kept], strategy=strategy, **options), torch.optim.AdamW([exact], **options)
    direction = torch.randn(ELEMENTS, generator=generator)
    for step in range(steps):
        gradient = (direction * drift + torch.randn(ELEMENTS, generator=generator)).mul_(1e-3).bfloat16()
        kept.grad, exact.grad = gradient, gradient.double()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate * falls(step / steps)
            optimizer.step()
        way, gone = (stored - start.double() for stored in (exact.detach(), optimizers[0].stored_parameter(kept)))
        warned = any("of what the updates move" in line for line in caplog.messages)
        yield 1 - float(gone @ way / (way @ way)), warned


@pytest.mark.slow
@pytest.mark.drawn(by=lambda name: (name.startswith("plus"),))
@pytest.mark.parametrize("name", STREAMS)
def test_a_falling_rate_warns_before_a_tenth_of_the_displacement_is_lost(caplog, name):
    shares, warned = zip(*losses(caplog, STREAMS[name]), strict=True)
    assert shares[-1] > 0.1
    assert warned[-1]
    first = warned.index(True)
    assert max(shares[: first + 1]) < 0.1


@pytest.mark.slow
@pytest.mark.drawn(by=lambda healthy: (healthy[0] == "light-stochastic", healthy[-1] is cosine))
@pytest.mark.parametrize(
    "healthy",
    [
        ("plus", 0.02, 3e-4, 0.3, cosine),
        ("plus", 1.0, 3e-4, 1.0, cosine),
        ("light", 0.02, 1e-4, 0.3, cosine),
        ("light-stochastic", 1.0, 1e-5, 0.3, cosine),
        ("master-weights", 1.0, 1e-6, 0.3, cosine),
        ("plus", 0.02, 1e-3, 0.3, lambda share: min(1.0, 1e-4 + 3 * share)),
    ],
)
def test_nothing_is_said_where_updates_arrive(caplog, healthy):
    """A cosine ends at updates that nothing can hold, and a warm-up begins there: that loses next to nothing."""
    shares, warned = zip(*losses(caplog, healthy, steps=400), strict=True)
    assert shares[-1] < 0.03
    assert not warned[-1]


def test_losses_are_told_by_what_any_rule_moves(caplog):
    """8e-6 is above half an ulp of the low component of a weight of size 1, and pairs lose a third there.

    A tiny rate of SGD says nothing by itself; its updates do.
    """
    findings(caplog, lambda: CollageAdamW(parameters(scale=1.0), lr=8e-6, strategy="plus"), steps=24)
    pairs, sgd = findings(caplog, lambda: CollageSGD(parameters(), lr=1e-6, strategy="plain"), steps=3)
    assert "% of what the updates move is below half a gap of what strategy 'plus' keeps in torch.bfloat16" in pairs
    assert pairs.endswith("use strategy 'split-master' (12 bytes a parameter)")
    assert "100 % of what the updates move" in sgd


@pytest.mark.parametrize("strategy", [name for name, kept in STRATEGIES.items() if not kept.stochastic_parameter])
def test_what_is_looked_at_is_what_the_step_moves(monkeypatch, strategy):
    """Whatever the storage: weights and averages enter as the values that they stand for."""
    seen = []
    monkeypatch.setattr(UpdateGuard, "look", lambda _, *arguments: seen.append(arguments[-2:]))
    members = parameters(shapes=((40, 30), (7,)))
    optimizer = CollageAdamW(members, lr=1e-3, strategy=strategy, weight_decay=0.1)
    train(optimizer, members, 2)
    give_gradients(members, step=3)
    exact, (group,) = optimizer.exact_rule(), optimizer.param_groups
    expected = []
    for member in members:
        state = optimizer.state[member]
        averages = {name: stored_value(state, name) for name in ("exp_avg", "exp_avg_sq")}
        moved, _ = exact(group, averages, optimizer.stored_parameter(member), member.grad, 3)
        apart = max(1, member.numel() // 256)
        expected.append((member.detach().clone().flatten()[::apart][:256], moved.flatten()[::apart][:256]))
    optimizer.step()
    if STRATEGIES[strategy].parameter is StateStorage.WIDE:
        assert seen == []
        return
    ((weight, displacement),) = seen
    assert torch.equal(weight, torch.cat([own for own, _ in expected]))
    assert torch.equal(displacement, torch.cat([moved for _, moved in expected]))


def test_a_look_reads_nothing_at_once(monkeypatch, caplog):
    """As on a device: the sums are read when they have come, the warning comes then."""
    coming = []
    monkeypatch.setattr(DeferredReads, "add", lambda _, value, then: coming.append((value, then)))
    members = parameters()
    optimizer = CollageAdamW(members, lr=1e-6, betas=(0.9, 0.95), strategy="plain")
    train(optimizer, members, 2)
    give_gradients(members, step=3)
    with Listening() as listening:
        optimizer.step()
    assert {tuple(tensor.shape) for tensor in listening.read} <= {()}
    assert {float(tensor) for tensor in listening.read} <= {2.0, 3.0}
    assert len(coming) == 1
    assert not optimizer._update_guard.told
    for value, then in coming * 2:
        then(value)
    assert len([line for line in caplog.messages if "of what the updates move" in line]) == 1
    assert optimizer._update_guard.told


@pytest.mark.parametrize(
    ("strategy", "sizes", "rates", "told"),
    [
        ("plain", [2.0**-9] * 24 + [2.0**-7] * 94, [1.0] * 3, True),
        ("plain", [2.0**-9] * 16 + [2.0**-7] * 96, [1.0] * 3, False),
        ("plain", [2.0**-9], [1.0] * 2, False),
        ("plain", [2.0**-20], range(1, 9), False),
        ("plain", [2.0**-20], [*range(1, 9), 8], True),
        ("light", [1.5 * 2.0**-17], [1.0] * 3, False),
        ("light", [0.75 * 2.0**-17], [1.0] * 3, True),
    ],
)
def test_a_twentieth_below_half_a_gap_is_told_from_the_third_step_on_unless_the_rate_rises(
    caplog, strategy, sizes, rates, told
):
    """Of weights of 1 that are moved by these sizes upwards, beside which the gaps of a pair are 2^-16.

    All steps so far count like the one that is looked at.
    """
    member = torch.nn.Parameter(torch.ones(len(sizes), dtype=torch.bfloat16))
    optimizer = CollageSGD([member], lr=1.0, strategy=strategy)
    with caplog.at_level(logging.WARNING, logger="collage_optim"):
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            walk(optimizer, -torch.tensor(sizes))
    assert bool(caplog.messages) is told


def test_float16_second_moments(caplog):
    said = findings(caplog, lambda: CollageAdamW(parameters(torch.float16), strategy="light"))
    assert any("is zero for gradients below 5.5e-03 (decay 0.999)" in line for line in said)


def test_what_is_advised_for_float16_exists_there(caplog):
    """Bits below a bfloat16 number cannot complete a float16 one."""
    options: dict[str, Any] = {"lr": 1e-7, "betas": (0.9, 0.9999), "strategy": "light"}
    said = findings(caplog, lambda: CollageAdamW(parameters(torch.float16, scale=1.0), **options), steps=24)
    advised = [set(re.findall(r"'([\w-]+)'", line.rpartition("use ")[2])) for line in said]
    assert advised == [{"master-weights"}] * 3, "fp32-states would keep less of the weights than light does"
    for name in set.union(*advised):
        CollageAdamW(parameters(torch.float16), strategy=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "plus"}, "float16's range makes no better than one number: use bfloat16"),
        ({"strategy": "light", "arithmetic": "storage"}, "eps=1e-08 rounds to zero in float16"),
    ],
)
def test_float16_is_refused_where_it_means_nothing(options, words):
    with pytest.raises(ValueError, match=words):
        CollageAdamW(parameters(torch.float16), **options)
    CollageAdamW(parameters(torch.float16), strategy="light", arithmetic="storage", eps=0.0)


def test_a_few_elements_of_a_large_tensor_are_decoded(monkeypatch):
    """Whole ones in fp64, then sliced, took fourteen times the parameters' memory."""
    sizes = []

    def seen(held, name, real=integer_codes.stored_value):
        sizes.append(held[name].numel())
        return real(held, name)

    monkeypatch.setattr(integer_codes, "stored_value", seen)
    parameter = torch.nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
    optimizer = CollageAdamW([parameter], lr=1e-3, strategy="plus")
    train(optimizer, [parameter], 4)
    assert sizes
    assert max(sizes) <= 256
