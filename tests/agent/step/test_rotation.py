"""Whole tensors in rotation: u of optimizers that are not elementwise, compared with whole fp64 re-runs."""

from __future__ import annotations

import copy

import optimi
import pytest
import pytorch_optimizer
import torch
from collage_agent.handle import watch
from collage_agent.step import rotation
from torch import nn

from collage_monitor import wire
from tests.agent.intent.references import settled_eps
from tests.agent.training import mlp, mlp_loss, train


def muon(model):
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-3)


MAKERS = {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
    "optimi StableAdamW, with a residual": lambda model: optimi.StableAdamW(model.parameters(), lr=1e-3),
    "Lamb": lambda model: pytorch_optimizer.Lamb(model.parameters(), lr=1e-3),
    "LARS": lambda model: pytorch_optimizer.LARS(model.parameters(), lr=1e-3),
    "AdamP": lambda model: pytorch_optimizer.AdamP(model.parameters(), lr=1e-3),
    "CAME": lambda model: pytorch_optimizer.CAME(model.parameters(), lr=1e-3),
}


def rerun(optimizer):
    """u by name of what the optimizer is about to do: a copy of all of it, in fp64, takes the step."""
    copied = copy.deepcopy(optimizer)
    # Copies lose what an optimizer keeps on its instance.
    vars(copied).update({key: value for key, value in vars(optimizer).items() if key not in vars(copied)})
    intended = {}
    for group, live in zip(copied.param_groups, optimizer.param_groups, strict=True):
        if "eps" in live:
            group["eps"] = settled_eps(live)
        for p, original in zip(group["params"], live["params"], strict=True):
            state = copied.state[p]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                    state[key] = value.double()
            residual = state.get("kahan_comp")
            weight = original.detach().double()
            if residual is not None:
                weight = weight + residual
                state["kahan_comp"] = torch.zeros_like(weight)
            p.data = weight.clone()
            p.grad = original.grad.detach().double()
            intended[id(original)] = (p, weight)
    copied.step()
    return {name: p.detach() - weight for name, (p, weight) in intended.items()}


def stored(optimizer, parameter):
    residual = optimizer.state[parameter].get("kahan_comp")
    weight = parameter.detach().double()
    return weight if residual is None else weight + residual.double()


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_sums_equal_those_of_a_whole_rerun(name):
    model = mlp()
    optimizer = MAKERS[name](model)
    handle = watch(model, optimizer, every=1, sample=64, budget=None)
    assert handle.info.intent == "whole-tensor"
    assert "not elementwise" in handle.info.intent_reason
    train(model, optimizer, 3)
    optimizer.zero_grad()
    mlp_loss(model, 3).backward()
    intended = rerun(optimizer)
    before = {n: stored(optimizer, p) for n, p in model.named_parameters()}
    optimizer.step()
    layers = handle.summary()["layers"]
    for layer, p in model.named_parameters():
        u, e = intended[id(p)].flatten(), (stored(optimizer, p) - before[layer]).flatten()
        assert layers[layer]["edq_ratio"] == pytest.approx(float(u @ e / (u @ u)), rel=1e-9), layer
        assert layers[layer]["edq_ratio_low"] == layers[layer]["edq_ratio"] == layers[layer]["edq_ratio_high"]


def test_muon_is_followed_in_fp64_though_it_computes_in_bf16():
    model = mlp(dtype=torch.float32)
    optimizer = muon(model)
    handle = watch(model, optimizer, every=1)
    train(model, optimizer, 3)
    values = handle.summary()["model"]
    assert handle.info.intent == "whole-tensor"
    assert 0.8 < values["edq_ratio"] < 1.2
    assert values["edq_ratio"] != pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_tensors_take_turns_and_are_handed_over_together():
    model = mlp()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1)
    handle._hooks[0].measurer._rotation = rotation.Rotation(5000)
    known = []
    for step in range(4):
        train(model, optimizer, 1, start=step)
        layers = handle.summary()["layers"]
        known.append(sum(values["edq_ratio"] is not None for values in layers.values()))
        assert all(values["effective_norm"] is not None for values in layers.values())
        if not any(known):
            assert "the round is not complete" in str(handle)
    assert known == [0, 6, 0, 6]


class ScaledAdafactor(torch.optim.Adafactor):
    """Takes the loss scaler's verdict itself, as fused optimizers do."""

    _step_supports_amp_scaling = True
    found_inf: torch.Tensor | None = None

    def step(self, closure=None):
        verdict, self.found_inf = self.found_inf, None
        if verdict is None or not verdict.item():
            super().step(closure)
        self.found_inf = verdict


@pytest.mark.slow
def test_a_skipped_step_costs_its_own_tensors_and_not_those_of_earlier_turns():
    def measured(skips):
        model = mlp()
        optimizer = ScaledAdafactor(model.parameters(), lr=1e-3)
        handle = watch(model, optimizer, every=1, budget=None)
        handle._hooks[0].measurer._rotation = rotation.Rotation(5000)
        turns = 0
        while not any(values["edq_ratio"] is not None for values in handle.summary()["layers"].values()):
            optimizer.found_inf = torch.tensor(float(turns in skips))
            train(model, optimizer, 1, start=turns)
            turns += 1
            assert turns < 8
        return turns, {name: values["edq_ratio"] for name, values in handle.summary()["layers"].items()}

    turns, whole = measured(())
    assert turns > 1
    assert all(value is not None for value in whole.values())
    again, left = measured((turns - 1,))
    assert again == turns
    lacking = {name for name, value in left.items() if value is None}
    assert 0 < len(lacking) < len(whole)
    for name in left.keys() - lacking:
        assert left[name] == whole[name]


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "buckets"), [(2**20, 6), (5000, 18), (None, 18)])
def test_buffers_are_made_once_where_one_turn_is_a_round_and_has_a_bound(bound, buckets, monkeypatch):
    made: list[int] = []
    build = rotation._planned

    def counted(index, *rest):
        made.append(index)
        return build(index, *rest)

    monkeypatch.setattr(rotation, "_planned", counted)
    model = mlp()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1, budget=None)
    handle._hooks[0].measurer._rotation = rotation.Rotation(bound)
    train(model, optimizer, 6 if bound == 5000 else 3)
    assert len(made) == buckets


def test_a_tensor_that_is_too_large_has_no_turn_and_the_run_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1100, 1000), nn.Linear(1000, 4)).bfloat16()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1)
    assert "1 tensors of more than" in handle.info.intent_reason
    model(torch.randn(4, 1100).bfloat16()).square().mean().backward()
    optimizer.step()
    layers = handle.summary()["layers"]
    assert layers["0.weight"]["edq_ratio"] is None
    assert layers["1.weight"]["edq_ratio"] is not None


def test_a_coupling_of_all_tensors_is_refused():
    model = mlp()
    handle = watch(model, pytorch_optimizer.Prodigy(model.parameters()), every=1)
    info: wire.WatchInfo = handle.info
    assert info.intent == "before-after"
    assert "not separable" in info.intent_reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adafactor", "optimi StableAdamW, with a residual"])
def test_training_is_bit_identical(name):
    def weights(watched):
        model = mlp()
        optimizer = MAKERS[name](model)
        if watched:
            watch(model, optimizer, every=1, budget=None)
        losses = train(model, optimizer, 10)
        return losses, [p.detach().clone() for p in model.parameters()]

    with_agent, without = weights(True), weights(False)
    assert with_agent[0] == without[0]
    assert all(torch.equal(a, b) for a, b in zip(with_agent[1], without[1], strict=True))
