"""Measured steps against brute force: whole tensors re-run in fp64, added up in exact fractions."""

from __future__ import annotations

import pytest
import torch
from collage_agent.watch import watch

from collage_monitor.statistics import histogram_counts
from tests.agent.training import mlp, mlp_loss
from tests.reference import diagnostics
from tests.reference.intended import full_precision_update

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "AdamW lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def step_with_reference(model, optimizer, step):
    """One training step; θ, g, u, e of every tensor as flat fp64 tensors, by name."""
    optimizer.zero_grad()
    mlp_loss(model, step).backward()
    named = {name: p for name, p in model.named_parameters() if p.grad is not None}
    before = {name: p.detach().double().flatten().clone() for name, p in named.items()}
    gradients = {name: p.grad.detach().double().flatten().clone() for name, p in named.items()}
    updates = full_precision_update(optimizer)
    optimizer.step()
    return {
        name: (
            before[name],
            gradients[name],
            updates[id(p)].flatten(),
            p.detach().double().flatten() - before[name],
        )
        for name, p in named.items()
    }


def totals_of(handle):
    measurement = handle._last
    rows = measurement.to_numpy()
    return {
        layer.name: {key: rows[index, column] for index, key in enumerate(measurement.layout.statistics)}
        for column, layer in enumerate(measurement.layout.layers)
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sums_of_whole_tensors_equal_a_full_fp64_run(name):
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    handle = watch(model, optimizer, every=1, sample="all")
    for step in range(4):
        expected = step_with_reference(model, optimizer, step)
    assert handle.step == 4
    assert handle.info.intent == "shadow"
    for layer, totals in totals_of(handle).items():
        theta, gradient, u, e = expected[layer]
        assert totals["intended_squared_sum"] == pytest.approx(float(u @ u), rel=1e-9)
        assert totals["intended_effective_sum"] == pytest.approx(float(u @ e), rel=1e-9)
        assert totals["effective_squared_sum"] == pytest.approx(float(e @ e), rel=1e-12)
        assert totals["gradient_squared_sum"] == pytest.approx(float(gradient @ gradient), rel=1e-12)
        assert totals["parameter_squared_sum"] == pytest.approx(float(theta @ theta), rel=1e-12)
        assert totals["sampled"] == totals["elements"] == theta.numel()


def test_classes_and_histogram_of_whole_tensors_equal_the_exact_counts():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    handle = watch(model, optimizer, every=1, sample="all")
    for step in range(3):
        expected = step_with_reference(model, optimizer, step)
    for layer, totals in totals_of(handle).items():
        theta, gradient, u, e = expected[layer]
        exact = [diagnostics.exact(x) for x in (theta, gradient, u, e, e)]
        counts = diagnostics.classes(*exact)
        assert {key: totals[key] for key in counts} == counts
        octaves = diagnostics.octave_counts(exact[2], theta.tolist(), torch.bfloat16)
        assert histogram_counts(totals).tolist() == octaves
        five = sum(totals[key] for key in ("nonfinite", "idle", "lost", "distorted", "faithful"))
        assert five == totals["elements"]
