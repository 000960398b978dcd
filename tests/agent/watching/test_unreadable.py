"""Printing a watch, its summary and the end of the run never raise: what holds no numbers is said to hold none."""

from __future__ import annotations

import logging

import collage_agent as collage
import pytest
import torch
from collage_agent import error_guard
from collage_agent.handle import watch
from collage_optim import CollageAdamW
from torch import nn

META = "on the meta device, which holds no numbers"


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def stacked(*devices, dtype=None):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, device=device, dtype=dtype) for device in devices))


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def all_said(handle):
    """Everything that a user may print."""
    assert handle._repr_html_()
    assert repr(handle)
    assert handle.judgement().text
    return str(handle), handle.summary()


@pytest.mark.parametrize(
    "options", [{}, {"oracle": True}, {"windows": (2,)}, {"expect": {"min_edq": 0.9}}], ids=str
)
@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW, lambda p: CollageAdamW(p, lr=1e-3, strategy="plain")])
def test_a_model_on_the_meta_device_is_watched_and_printed(make, options):
    model = stacked("meta", "meta", dtype=torch.bfloat16)
    optimizer = make(model.parameters())
    handle = watch(model, optimizer, every=1, budget=None, **options)
    assert f"4 tensors {META}" in str(handle)
    for _ in range(3):
        step(model, optimizer)
    said, summary = all_said(handle)
    assert "The optimizer steps no watched layer that can be measured." in said
    assert f"left out: 4 tensors {META}" in said
    assert not any(summary["model"][key] for key in ("elements", "edq_ratio"))


@pytest.mark.parametrize("devices", [("meta", "cpu"), ("cpu", "meta")])
@pytest.mark.parametrize("oracle", [False, True])
def test_beside_tensors_on_the_meta_device_the_others_are_measured(devices, oracle):
    model = stacked(*devices)
    optimizer = sgd(model.parameters())
    handle = watch(model, optimizer, every=1, budget=None, oracle=oracle)
    for _ in range(3):
        step(model, optimizer)
    said, summary = all_said(handle)
    assert f"left out: 2 tensors {META}" in said
    assert summary["model"]["edq_ratio"] == pytest.approx(1, abs=1e-3)
    assert summary["model"]["elements"] == 72
    assert summary["layers"][f"{devices.index('cpu')}.weight"]["edq_ratio"] is not None
    assert summary["layers"][f"{devices.index('meta')}.weight"]["edq_ratio"] is None


def test_tensors_that_come_from_the_meta_device_in_place_are_measured_from_then_on():
    """As DTensors do in `to_empty`."""
    model = stacked("meta")
    optimizer = sgd(model.parameters())
    handle = watch(model, optimizer, every=1, budget=None)
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros_like(parameter, device="cpu")))
    step(model, optimizer)
    said, summary = all_said(handle)
    assert META not in said
    assert summary["model"]["elements"] == 72


def replaced(model, optimizer):
    model[0].weight = nn.Parameter(torch.ones(8, 8))


def deleted(model, optimizer):
    del model[0].weight


def loosened(model, optimizer):
    optimizer.param_groups.clear()


def without_states(model, optimizer):
    optimizer.state.clear()


def freed(model, optimizer):
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [replaced, deleted, loosened, without_states, freed])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_happens_to_the_model_takes_nothing_from_what_was_measured(change, steps):
    model = stacked("cpu")
    optimizer = sgd(model.parameters())
    handle = watch(model, optimizer, every=1, budget=None)
    for _ in range(steps):
        step(model, optimizer)
    change(model, optimizer)
    for _ in range(2):
        said, summary = all_said(handle)
        assert "nothing measured yet" in said if not steps else "Measured: steps 1 to 2" in said
        assert summary["step"] == (steps or None)
        handle.remove()


def test_a_run_ends_with_its_address_whatever_it_watched(tmp_path, capsys):
    collage.init(mode="offline", dir=tmp_path)
    model = stacked("meta", "cpu")
    optimizer = sgd(model.parameters())
    handle = collage.watch(model, optimizer, every=1, budget=None)
    step(model, optimizer)
    collage.finish()
    printed = capsys.readouterr().out
    assert f"left out: 2 tensors {META}" in printed
    assert "1 report waits in" in printed
    assert all_said(handle)[0] in printed


def test_what_cannot_be_read_is_said_once_and_measuring_goes_on(monkeypatch, caplog):
    error_guard.raise_in_tests(False)
    model = stacked("cpu")
    optimizer = sgd(model.parameters())
    handle = watch(model, optimizer, every=1, budget=None)
    step(model, optimizer)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "collage_agent"):
        patch.setattr(torch.Tensor, "numpy", lambda tensor: tensor.no_such_thing)
        for _ in range(5):
            assert str(handle) == "step 1: what was measured cannot be read; the log of collage_agent says why"
            assert handle.summary() == {"step": 1, "model": {}, "layers": {}}
    assert len([record for record in caplog.records if "no_such_thing" in record.message]) == 1
    step(model, optimizer)
    assert handle.summary()["step"] == 2
    assert "Measured: steps 1 to 2" in str(handle)


def test_nor_does_an_average_raise_whose_numbers_cannot_be_read(monkeypatch):
    error_guard.raise_in_tests(False)
    model = stacked("cpu")
    average = torch.optim.swa_utils.AveragedModel(model)
    handle = collage.watch_average(average, model, every=1)
    for _ in range(3):
        average.update_parameters(model)
    assert handle.summary()["layers"]
    monkeypatch.setattr(torch.Tensor, "numpy", lambda tensor: tensor.no_such_thing)
    assert handle.summary()["layers"] == {}
    assert str(handle).startswith("average of the weights (AveragedModel")
