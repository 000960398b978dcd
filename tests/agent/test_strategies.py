"""Our own optimizers under the agent: the stored weight is what counts, and the ratios tell strategies apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collage_agent.handle import watch
from collage_optim import CollageAdamW

from tests.agent.training import gpt_loss, mlp, mlp_loss, small_gpt, train

BYTES = {"plain": 8, "light": 10, "plus": 12, "master-weights": 16}


def watched(strategy, steps=30, **options):
    model = small_gpt(layers=1)
    optimizer = CollageAdamW(model.parameters(), lr=2e-4, weight_decay=0.1, strategy=strategy, **options)
    handle = watch(model, optimizer, every=10, oracle=True, budget=None)
    train(model, optimizer, steps, gpt_loss)
    return handle


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
@pytest.mark.parametrize("strategy", BYTES)
def test_edq_and_decrements_tell_the_strategies_apart(strategy, arithmetic):
    handle = watched(strategy, arithmetic=arithmetic)
    values, info = handle.summary()["model"], handle.info
    assert info.intent == "rule"
    assert info.observed_strategy == strategy
    keeps_weight = strategy != "plain"
    keeps_state = strategy in ("plus", "master-weights")
    if keeps_weight:
        assert values["edq_ratio"] == pytest.approx(1.0, abs=0.02)
    else:
        assert values["edq_ratio"] < 0.95
        assert values["lost_update_ratio"] > 0.2
    if keeps_state:
        assert values["state_decrement_ratio/exp_avg_sq"] == pytest.approx(1.0, abs=0.02)
    else:
        assert values["state_decrement_ratio/exp_avg_sq"] < 0.2
    assert values["edq_visible_ratio"] != values["edq_ratio"] or strategy == "plain"
    measurement: Any = handle._last
    assert measurement.scalars["bytes_per_parameter"] == pytest.approx(BYTES[strategy])


@pytest.mark.parametrize("strategy", [*BYTES, "kahan"])
def test_stored_sums_equal_a_look_at_the_whole_stored_weight(strategy):
    model = mlp()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, strategy=strategy)
    handle = watch(model, optimizer, every=1, sample="all")
    for step in range(4):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        before = {name: optimizer.stored_parameter(p) for name, p in model.named_parameters()}
        visible = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        intended = {}
        for name, p in model.named_parameters():
            state = optimizer.state.get(p, {})
            joined = {
                key: state[key].double() + (state[f"{key}_low"].double() if f"{key}_low" in state else 0.0)
                for key in ("exp_avg", "exp_avg_sq")
                if key in state
            }
            group = optimizer.param_groups[0]
            intended[name] = optimizer.exact_displacement(group, joined, before[name], p.grad.double(), step + 1)[0]
        optimizer.step()
    measurement: Any = handle._last
    rows = measurement.table()
    for column, layer in enumerate(measurement.layout.layers):
        p = dict(model.named_parameters())[layer.name]
        u = intended[layer.name].flatten()
        e = (optimizer.stored_parameter(p) - before[layer.name]).flatten()
        ev = (p.detach().double() - visible[layer.name]).flatten()
        expected = {
            "intended_squared_sum": u @ u,
            "intended_effective_sum": u @ e,
            "effective_squared_sum": e @ e,
            "intended_visible_sum": u @ ev,
            "visible_squared_sum": ev @ ev,
            "lost": ((u != 0) & (e == 0)).sum(),
            "lost_visible": ((u != 0) & (ev == 0)).sum(),
            "unchanged": (ev == 0).sum(),
        }
        for key, value in expected.items():
            assert rows[key][column] == pytest.approx(float(value), rel=1e-9, abs=1e-30), (key, layer.name)


def test_groups_with_different_strategies_are_measured_apart():
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "strategy": "plus"}, {"params": others, "strategy": "plain"}]
    optimizer = CollageAdamW(groups, lr=2e-4)
    handle = watch(model, optimizer, every=1, sample="all")
    train(model, optimizer, 5)
    layers = handle.summary()["layers"]
    assert layers["2.weight"]["edq_ratio"] == pytest.approx(1.0, abs=0.02)
    assert layers["2.weight"]["edq_visible_ratio"] != layers["2.weight"]["edq_ratio"]
    assert layers["2.bias"]["edq_visible_ratio"] == layers["2.bias"]["edq_ratio"] < 0.95
    assert handle.info.observed_strategy == "unknown"


def test_a_master_weight_beside_an_overflowing_state_stays_finite_in_the_report():
    model = mlp()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, strategy="plus")
    handle = watch(model, optimizer, every=1, sample="all")
    train(model, optimizer, 2)
    optimizer.state[model[0].weight]["exp_avg_sq"][0, 0] = torch.inf
    train(model, optimizer, 1, start=2)
    values = handle.summary()["layers"]["0.weight"]
    assert values["edq_ratio"] is not None
    assert values["state_decrement_ratio/exp_avg_sq"] is not None


def test_what_kahan_loses_is_the_same_however_it_is_measured():
    """The compensation holds far smaller numbers than fp32 tells apart beside the weight."""
    lost = []
    for sample in (1 << 20, "all"):
        model = mlp()
        optimizer = CollageAdamW(model.parameters(), lr=1e-7, strategy="kahan")
        handle = watch(model, optimizer, every=1, sample=sample, budget=None)
        train(model, optimizer, 5)
        lost.append(handle.summary()["model"]["lost_update_ratio"])
    assert lost[0] == lost[1] < 0.01
