"""Whole tensors in rotation: u of optimizers that are not elementwise, compared with whole fp64 re-runs."""

from functools import partial
from typing import Any

import pytest
import torch
from collage_agent.step import rotation
from torch import nn

from tests.agent.training import backward, mlp, train, watched

adafactor = partial(torch.optim.Adafactor, lr=1e-3)


def turns(handle, bound):
    """At most so many elements have their turn in a step."""
    handle._hooks[0].measurer._rotation = rotation.Rotation(bound)


@pytest.mark.slow
def test_muon_is_followed_in_fp64_though_it_computes_in_bf16():
    _, _, handle = watched(
        lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-3),
        mlp(dtype=torch.float32),
        steps=3,
    )
    values = handle.summary()["model"]
    assert handle.info.intent == "whole-tensor"
    assert 0.8 < values["edq_ratio"] < 1.2
    assert values["edq_ratio"] != pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_tensors_take_turns_and_are_handed_over_together():
    model, optimizer, handle = watched(adafactor)
    turns(handle, 5000)
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
def test_gradients_are_unscaled_where_the_optimizer_does_it():
    class Unscaling(ScaledAdafactor):
        grad_scale: torch.Tensor | None = None

        def step(self, closure=None):
            scale, self.grad_scale = self.grad_scale, None
            for own in self.param_groups[0]["params"]:
                own.grad.div_(1.0 if scale is None else scale)
            super().step(closure)
            self.grad_scale = scale

    found = []
    for scale in (1.0, 1024.0):
        model, optimizer, handle = watched(partial(Unscaling, lr=1e-3), mlp(dtype=torch.float32))
        optimizer.grad_scale = torch.tensor(scale)
        for step in range(2):
            backward(model, step, scale=scale)
            optimizer.step()
        found.append(handle.summary()["model"])
    assert found[0]["edq_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert found[1]["edq_ratio"] == pytest.approx(found[0]["edq_ratio"], rel=1e-6)
    assert found[1]["intended_norm"] == pytest.approx(found[0]["intended_norm"], rel=1e-6)


@pytest.mark.slow
def test_a_skipped_step_costs_its_own_tensors_and_not_those_of_earlier_turns():
    def measured(skips):
        model, optimizer, handle = watched(partial(ScaledAdafactor, lr=1e-3))
        turns(handle, 5000)
        found: dict[str, Any] = {}
        taken = 0
        while not any(value is not None for value in found.values()):
            optimizer.found_inf = torch.tensor(float(taken in skips))
            train(model, optimizer, 1, start=taken)
            found = {name: values["edq_ratio"] for name, values in handle.summary()["layers"].items()}
            taken += 1
            assert taken < 8
        return taken, found

    taken, whole = measured(())
    assert taken > 1
    assert all(value is not None for value in whole.values())
    again, left = measured((taken - 1,))
    assert again == taken
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
    model, optimizer, handle = watched(adafactor)
    turns(handle, bound)
    train(model, optimizer, 6 if bound == 5000 else 3)
    assert len(made) == buckets


def test_a_tensor_that_is_too_large_has_no_turn_and_the_run_says_so():
    _, _, handle = watched(adafactor, nn.Linear(50, 40, bias=False))
    layer = handle._hooks[0].measurer._planner.watched[0]
    assert [rotation.too_large(layer, bound) for bound in (1999, 2000, None)] == [True, False, False]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(1100, 1000), nn.Linear(1000, 4)).bfloat16()
    model, optimizer, handle = watched(adafactor, layers)
    assert "1 tensors of more than" in handle.info.intent_reason
    model(torch.randn(4, 1100).bfloat16()).square().mean().backward()
    optimizer.step()
    layers = handle.summary()["layers"]
    assert layers["0.weight"]["edq_ratio"] is None
    assert layers["1.weight"]["edq_ratio"] is not None
