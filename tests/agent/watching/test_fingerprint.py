"""The fingerprint says how weights and states are really kept, and what does not agree with the declared label."""

from __future__ import annotations

import bitsandbytes
import msgspec
import optimi
import pytest
import schedulefree
import torch
import torchao.optim
from collage_agent.handle import watch
from torch import nn

from collage_monitor import wire
from tests.agent.intent import optimizers
from tests.agent.training import mlp, train


def fingerprint_of(make, dtype=torch.bfloat16, steps=1, **options):
    model = mlp(dtype=dtype)
    optimizer = make(model.parameters())
    handle = watch(model, optimizer, every=1, **options)
    train(model, optimizer, steps)
    return handle


def schedule_free(parameters):
    optimizer = schedulefree.AdamWScheduleFree(parameters, lr=1e-3)
    optimizer.train()
    return optimizer


OBSERVED = {
    "schedule-free AdamW": (schedule_free, "plain"),
    "subtracted residual": (optimizers.Subtracting, "kahan"),
    "fp32 master": (optimizers.Master, "master-weights"),
    "stochastic": (optimizers.Stochastic, "stochastic"),
    "bitsandbytes AdamW": (lambda p: bitsandbytes.optim.AdamW(p, lr=1e-3), "fp32-states"),
}
"""Published ones: tests/agent/intent/test_matrix.py."""


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OBSERVED)
def test_the_strategy_is_observed_before_the_first_step_and_after_it(name, steps):
    make, expected = OBSERVED[name]
    if expected == "fp32-states" and not steps:
        expected = "plain"
    assert fingerprint_of(make, steps=steps).info.observed_strategy == expected


def test_dtypes_states_and_residuals_are_named():
    seen = fingerprint_of(optimizers.Subtracting).info.fingerprint
    elements = sum(p.numel() for p in mlp().parameters())
    assert seen.parameters == seen.gradients == {"bfloat16": elements}
    assert seen.states == {"a": "bfloat16", "b": "bfloat16"}
    assert (seen.residual, seen.residual_sign, seen.master) == ("b", -1, None)
    assert (seen.stochastic_rounding, seen.implementation, seen.findings) == (False, "unknown", [])
    assert fingerprint_of(optimizers.Master).info.fingerprint.master == "b"


@pytest.mark.parametrize(
    ("switches", "implementation"),
    [
        ({}, "for-loop"),
        ({"foreach": True}, "foreach"),
        ({"foreach": False}, "for-loop"),
        ({"fused": True}, "fused"),
    ],
)
def test_the_implementation_is_read_from_the_switches(switches, implementation):
    handle = fingerprint_of(lambda p: torch.optim.AdamW(p, **switches))
    assert handle.info.fingerprint.implementation == implementation


def test_a_label_that_is_not_what_is_seen_is_a_finding():
    handle = fingerprint_of(lambda p: torch.optim.AdamW(p), strategy="kahan")
    assert handle.info.observed_strategy == "plain"
    (found,) = handle.info.fingerprint.findings
    assert "declared kahan" in found
    assert "plain is what is seen" in found
    assert f"finding: {found}" in str(handle)
    right = fingerprint_of(lambda p: optimi.AdamW(p, lr=1e-3), strategy="kahan")
    assert right.info.fingerprint.findings == []
    assert "finding" not in str(right)


def test_quantised_states_are_named_and_read_as_numbers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).bfloat16()
    optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1)
    with torch.compiler.set_stance("force_eager"):
        for step in range(3):
            optimizer.zero_grad()
            model(
                torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            ).square().mean().backward()
            optimizer.step()
    seen = handle.info.fingerprint
    assert seen is not None
    assert seen.states["exp_avg"] == "OptimState8bit, quantised and bfloat16"
    assert any("exp_avg is kept in several ways" in found for found in seen.findings)
    assert handle.info.observed_strategy == "plain"
    assert handle.summary()["model"]["edq_ratio"] is not None


def test_an_older_message_without_a_fingerprint_is_understood_and_the_other_way_round():
    info = fingerprint_of(lambda p: torch.optim.AdamW(p)).info
    sent = msgspec.json.decode(msgspec.json.encode(info))
    assert msgspec.convert(sent, wire.WatchInfo) == info
    del sent["fingerprint"]["unexplained"]
    older = msgspec.convert(sent, wire.WatchInfo).fingerprint
    assert older is not None
    assert older.unexplained is None
    del sent["fingerprint"]
    assert msgspec.convert(sent, wire.WatchInfo).fingerprint is None
