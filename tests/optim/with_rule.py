"""What a process finds in which `examples/extension_rule` is installed."""

import copy
import pickle
from typing import Any

import pytest
import torch
from collage_agent.handle import watch
from collage_optim import RuleOptimizer

from tests.agent.training import gpt_loss, small_gpt, train
from tests.optim.models import assert_same_bits, copies_of, give_gradients, parameters, train_each, walk
from tests.reference.streams import noisy_gradients

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-12, "weight_decay": 0.1}


def run():
    """All but compiled steps; raises AssertionError where something is not as it should be."""
    for options in ({}, {"decoupled_weight_decay": False}, {"maximize": True}):
        the_rule_follows_fp64(**options)
    for strategy in ("plus", "full", "light", "kahan", "light-stochastic", "fp32-states", "master-weights"):
        follows_fp64(strategy)
    follows_fp64("plus", arithmetic="storage", within=0.05)
    resumes()
    is_watched()
    refuses_what_it_has_not()


def steps_in_fp64(weight, gradients, maximize=False, decoupled_weight_decay=True):
    """AdaBelief from its paper, with bias-corrected averages spelt out: the weights after each step."""
    lr, (beta1, beta2), eps, decay = (OPTIONS[name] for name in ("lr", "betas", "eps", "weight_decay"))
    weight = weight.detach().double()
    first = second = torch.zeros_like(weight)
    weights = []
    for step, gradient in enumerate(gradients, start=1):
        gradient = -gradient.double() if maximize else gradient.double()
        if not decoupled_weight_decay:
            gradient = gradient + decay * weight
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * (gradient - first) ** 2 + eps
        corrected = first / (1 - beta1**step), second / (1 - beta2**step)
        direction = corrected[0] / (corrected[1].sqrt() + eps)
        weight = weight - lr * (direction + (decay * weight if decoupled_weight_decay else 0))
        weights.append(weight)
    return weights


def the_rule_follows_fp64(**options):
    """The exact displacement, from which the agent's intended update comes."""
    (member,) = parameters(shapes=((64,),))
    optimizer = RuleOptimizer([member], "adabelief", **OPTIONS, **options)
    gradients = list(noisy_gradients(64, 40))
    weight = member.detach().double()
    averages: dict[str, torch.Tensor] = {}
    for step, expected in enumerate(steps_in_fp64(member, gradients, **options), start=1):
        gradient = gradients[step - 1]
        displacement, averages = optimizer.exact_rule()(optimizer.param_groups[0], averages, weight, gradient, step)
        weight = weight + displacement
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-15)


def follows_fp64(strategy, arithmetic="fp32", within=0.02):
    (member,) = parameters(shapes=((512,),))
    start = member.detach().double()
    optimizer = RuleOptimizer([member], "adabelief", strategy=strategy, arithmetic=arithmetic, **OPTIONS)
    gradients = list(noisy_gradients(512, 60))
    expected = steps_in_fp64(member, gradients)[-1]
    error = (walk(optimizer, *gradients) - expected).norm() / (expected - start).norm()
    assert error < within, (strategy, arithmetic, error)


def compile_it():
    """By our compiled step, and inside one of the user."""
    plain, compiled, wrapped = (
        RuleOptimizer(parameters(), "adabelief", strategy="plus", compiled=form, **OPTIONS)
        for form in (None, True, None)
    )
    train_each((plain, compiled), 5)
    assert_same_bits(plain, compiled)
    step = torch.compile(wrapped.step, backend="eager")
    for number in range(1, 6):
        give_gradients(wrapped.param_groups[0]["params"], step=number)
        step()
    assert_same_bits(plain, wrapped)


def resumes():
    optimizer = RuleOptimizer(members := parameters(), "adabelief", strategy="plus", **OPTIONS)
    train_each((optimizer,), 3)
    resumed = RuleOptimizer(copies_of(members), "adabelief", strategy="plus")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    whole = pickle.loads(pickle.dumps(optimizer))
    train_each((optimizer, resumed, whole), 3, first=4)
    assert_same_bits(optimizer, resumed)
    assert_same_bits(optimizer, whole)


def is_watched():
    model = small_gpt()
    optimizer = RuleOptimizer(model.parameters(), "adabelief", strategy="plus", lr=2e-4, weight_decay=0.1)
    handle = watch(model, optimizer, every=10, oracle=True, budget=None)
    train(model, optimizer, 30, gpt_loss)
    values, info = handle.summary()["model"], handle.info
    assert (info.intent, info.observed_strategy) == ("rule", "plus")
    assert abs(values["edq_ratio"] - 1) < 0.02
    assert abs(values["state_decrement_ratio/exp_avg_var"] - 1) < 0.02
    assert values["edq_oracle_ratio"] is not None
    assert values["decay_ratio"] is not None


def refuses_what_it_has_not():
    refused: list[tuple[str, Any, str]] = [
        ("momentum", 0.9, "rule 'adabelief' has no option momentum; it has lr, betas, eps"),
        ("lr", -1.0, "Invalid learning rate: -1.0"),
        ("rule", "adan", "Invalid rule: 'adan'; use one of adabelief"),
        ("strategy", "pluss", "Invalid strategy: 'pluss'; use one of plain"),
    ]
    for name, value, words in refused:
        with pytest.raises((TypeError, ValueError), match=words):
            RuleOptimizer(parameters(), **{"rule": "adabelief", name: value})
