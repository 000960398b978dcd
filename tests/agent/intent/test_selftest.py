"""Which optimizers may be stepped on samples, and which of their states only grow."""

from functools import partial
from typing import Any

import bitsandbytes
import pytest
import pytorch_optimizer
import torch
import torchao.optim
import transformers
from collage_agent.intent.intent_choice import choose_intent
from collage_agent.intent.selftest import run_selftest
from torch import nn

from tests.agent.intent.optimizers import ByParameter, GlobalScale


def parameters():
    return [nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4))]


ELEMENTWISE: dict[str, Any] = {
    "SparseAdam": torch.optim.SparseAdam,
    "AdamW rate 0": partial(torch.optim.AdamW, lr=0.0),
    "AdamW rate 1e-8": partial(torch.optim.AdamW, lr=1e-8),
    "AdamW capturable": partial(torch.optim.AdamW, capturable=True),
    "Rprop": torch.optim.Rprop,
}
"""Those that are as usual: tests/agent/intent/test_matrix.py."""


class Normalised(ByParameter):
    """u = −lr · g / ‖g‖: each element depends on all of its tensor."""

    def step_one(self, parameter, group):
        parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class Adapting(ByParameter):
    """Elementwise steps beside a distance estimate over all elements, which would change the rate later."""

    def step_one(self, parameter, group):
        group["distance"] = group.get("distance", 0.0) + float(parameter.grad.abs().sum())
        parameter.sub_(group["lr"] * parameter.grad)


class Noisy(ByParameter):
    """Adds random numbers to the gradient."""

    def step_one(self, parameter, group):
        parameter.sub_(group["lr"] * (parameter.grad + torch.randn_like(parameter)))


class CorrectsByNothing(ByParameter):
    """Divides by 1 − β, which is 0: NaN that repeats itself."""

    def step_one(self, parameter, group):
        parameter.sub_(group["lr"] * parameter.grad * 0.0 / torch.zeros_like(parameter))


NOT_ELEMENTWISE = {
    "Adafactor": (torch.optim.Adafactor, "not elementwise"),
    "Adafactor without a rate": (transformers.Adafactor, "not elementwise"),
    "normalised": (Normalised, "not elementwise"),
    "global scale": (GlobalScale, "not elementwise"),
    "adapting": (Adapting, "depends on all elements"),
    "noisy": (Noisy, "does not repeat"),
    "corrected by nothing": (CorrectsByNothing, "NaN or infinite though gradients are finite"),
    "LBFGS": (torch.optim.LBFGS, "cannot step"),
}
if hasattr(torch.optim, "Muon"):
    NOT_ELEMENTWISE["Muon"] = (lambda p: torch.optim.Muon(p[:1]), "not elementwise")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_pass(name):
    optimizer = ELEMENTWISE[name](parameters())
    assert run_selftest(optimizer, optimizer.param_groups[0]).kind == "shadow"


@pytest.mark.parametrize(
    ("make", "sums"),
    [
        (torch.optim.Adagrad, {"sum"}),
        (partial(torch.optim.Adagrad, weight_decay=0.1, lr_decay=0.1, initial_accumulator_value=1.0), {"sum"}),
        (pytorch_optimizer.MADGRAD, {"grad_sum_sq"}),
        (partial(torch.optim.Adam, amsgrad=True), set()),
        (torch.optim.Adamax, set()),
        (torch.optim.Rprop, set()),
        (torch.optim.ASGD, set()),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), set()),
    ],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_states_that_only_sum_up_are_found_without_their_names(make, sums, stepped):
    """Not averages, which shrink as gradients do, nor maxima, nor step sizes that grow and shrink."""
    own = parameters()
    optimizer = make(own)
    if stepped:
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert run_selftest(optimizer, optimizer.param_groups[0]).composition.growing == sums


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_others_are_refused_with_the_reason(name):
    make, reason = NOT_ELEMENTWISE[name]
    optimizer = make(parameters())
    assert reason in run_selftest(optimizer, optimizer.param_groups[0]).reason


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("rate", [1e-5, 1e-4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torchao.optim.AdamW8bit, "shadow"),
        (bitsandbytes.optim.AdamW, "rule"),
        (bitsandbytes.optim.AdamW8bit, "rule"),
    ],
)
def test_a_small_rate_is_no_reason_to_know_nothing(make, kind, dtype, rate):
    """The probes raise it as a tensor where it is one, and their weights do not drown what it moves."""
    parameters = [nn.Parameter(torch.randn(24, 30).to(dtype)), nn.Parameter(torch.randn(24).to(dtype))]
    with torch.compiler.set_stance("force_eager"):
        (intent,) = choose_intent(make(parameters, lr=rate, betas=(0.9, 0.95)))
    assert intent.kind == kind
