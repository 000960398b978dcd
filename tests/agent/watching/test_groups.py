"""Parameter groups that change while they are watched: frozen, replaced, moved to another place, taken out."""

import pytest
import torch
from collage_agent.handle import watch
from torch import nn

from tests.agent.step.test_measurer import step_with_reference, totals_of
from tests.agent.test_watch import Recorder
from tests.agent.training import mlp, train

pytestmark = pytest.mark.slow


def begun(steps, every=1):
    """Three groups with rates of their own and momentum, watched with all that is kept from step to step."""
    model, recorder = mlp(dtype=torch.float32), Recorder()
    groups = [{"params": list(model[i].parameters()), "lr": 10.0**-i} for i in (0, 2, 4)]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    handle = watch(model, optimizer, every=every, sample="all", oracle=True, windows=(2,), reporter=recorder)
    train(model, optimizer, steps)
    return model, optimizer, handle, recorder


def goes_on(model, optimizer, handle, first, last, names=None):
    """u and e of the last step are those of whole tensors in fp64, and no layer is reported but these."""
    for step in range(first, last):
        expected = step_with_reference(model, optimizer, step)
    names = expected if names is None else names
    totals = totals_of(handle)
    for layer in names:
        _, _, u, e = expected[layer]
        assert totals[layer]["intended_squared_sum"] == pytest.approx(float(u @ u), rel=1e-9)
        assert totals[layer]["intended_effective_sum"] == pytest.approx(float(u @ e), rel=1e-9)
    others = totals.keys() - set(names)
    assert all(handle.summary()["layers"][layer]["edq_ratio"] is None for layer in others)


FROZEN = {
    "a group": lambda groups: groups.pop(1),
    "the last group": lambda groups: groups.pop(),
    "a group's tensors": lambda groups: groups[1].update(params=[]),
    "a tensor": lambda groups: groups[1]["params"].pop(1),
}
MOVED = {
    "a group": lambda groups: groups.append(groups.pop(0)),
    "a tensor": lambda groups: groups[2]["params"].append(groups[0]["params"].pop()),
}


@pytest.mark.drawn
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("freeze", FROZEN)
def test_what_is_taken_out_of_the_optimizer_is_no_longer_reported(freeze, every):
    """backward still fills the gradients of what is frozen."""
    model, optimizer, handle, recorder = begun(5, every)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    FROZEN[freeze](optimizer.param_groups)
    assert str(handle)
    stepped = [named[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    goes_on(model, optimizer, handle, 5, 12, stepped)
    assert str(handle)
    assert list(handle.summary()["layers"]) == list(named.values())
    assert handle.info.parameters == sum(model.get_parameter(name).numel() for name in stepped)
    assert handle.judgement().health == "healthy"
    layers, totals = handle.summary()["layers"], totals_of(handle)
    assert {name for name in layers if layers[name]["edq_oracle_ratio"] is not None} == set(stepped)
    assert all(totals[name]["oracle_steps"] == 12 for name in stepped)
    assert "oracle_restarts" not in recorder.measurements[-1].scalars


def test_what_comes_back_is_reported_again():
    model, optimizer, handle, _ = begun(3)
    frozen = optimizer.param_groups.pop(1)
    train(model, optimizer, 3, start=3)
    optimizer.param_groups.append(frozen)
    goes_on(model, optimizer, handle, 6, 9)
    assert len(handle.summary()["layers"]) == 6


@pytest.mark.parametrize(("move", "every"), [("a group", 1), ("a group", 4), ("a tensor", 1)])
def test_a_group_that_changes_places_keeps_its_rate_and_a_tensor_takes_its_new_group_s(move, every):
    model, optimizer, handle, recorder = begun(5, every)
    MOVED[move](optimizer.param_groups)
    goes_on(model, optimizer, handle, 5, 12)
    for values in handle.summary()["layers"].values():
        assert values["edq_oracle_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert "oracle_restarts" not in recorder.measurements[-1].scalars


def replace_parameters(model, optimizer, rows):
    """The last layer's parameters make way for new ones, as in pruning or with a new head; states go along."""
    for place, (name, old) in enumerate(list(model[4].named_parameters())):
        new = nn.Parameter(old.detach()[:rows].clone())
        state = optimizer.state.pop(old, {})
        optimizer.state[new] = {key: value[:rows].clone() for key, value in state.items()}
        setattr(model[4], name, new)
        optimizer.param_groups[2]["params"][place] = new


@pytest.mark.parametrize("rows", [5, 3])
def test_parameters_that_replace_others_are_watched_in_their_places(rows):
    """The old ones keep the gradient that they had."""
    model, optimizer, handle, recorder = begun(5)
    replace_parameters(model, optimizer, rows)
    goes_on(model, optimizer, handle, 5, 12)
    assert list(handle.summary()["layers"]) == [name for name, _ in model.named_parameters()]
    assert handle.judgement().health == "healthy"
    layers = {layer.name: layer.shape for layer in recorder.measurements[-1].layout.layers}
    assert layers["4.weight"] == [rows, 70]
    assert "oracle_restarts" not in recorder.measurements[-1].scalars


def test_an_optimizer_that_has_lost_all_groups_raises_nothing():
    model, optimizer, handle, _ = begun(3)
    optimizer.param_groups.clear()
    assert str(handle)
    train(model, optimizer, 3, start=3)
    assert str(handle)
    assert repr(handle)
    assert handle.judgement().health
    assert handle.info.parameters == 0
    assert handle.step == 6
