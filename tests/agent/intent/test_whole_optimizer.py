"""u from a copy of the whole optimizer: as an fp64 re-run has it, without a trace, or refused with a reason."""

import copy
import functools

import numpy as np
import pytest
import pytorch_optimizer
import torch
from collage_agent import error_guard
from collage_agent.handle import watch
from collage_agent.intent.optimizer_clone import isolated
from collage_agent.step import rotation
from torch import nn

from tests.agent.intent.optimizers import GlobalScale
from tests.agent.intent.references import edq, rerun
from tests.agent.training import backward, mlp, train, watched
from tests.optim.models import tensors_of

BF16, FP32 = torch.bfloat16, torch.float32


class Unscaling(GlobalScale):
    """Divides by the loss scaler's number itself, and steps as far as the gradients are long."""

    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None = None

    def rate(self, group, parameter):
        return self.norm * group["lr"]

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        for p in every:
            p.grad.div_(1.0 if self.grad_scale is None else self.grad_scale)
        self.norm = float(torch.stack([p.grad.norm() for p in every]).norm())
        super().step()


class OfGenerator(GlobalScale):
    """Draws its noise from a generator of its own."""

    def __init__(self, params):
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def rate(self, group, parameter):
        return group["lr"] * torch.rand(1, generator=self.generator, dtype=FP32).to(parameter.dtype)


def groups(model):
    """Two of one optimizer, so that what hangs together crosses them."""
    return [{"params": [p for p in model.parameters() if p.dim() == n]} for n in (1, 2)]


def in_groups(make, model, **options):
    return watched(lambda _: make(groups(model)), model, **options)


MAKES = {
    "global scale": GlobalScale,
    "Prodigy": functools.partial(pytorch_optimizer.Prodigy, weight_decay=0.01),
    "DAdaptAdam": pytorch_optimizer.DAdaptAdam,
    "DAdaptSGD": functools.partial(pytorch_optimizer.DAdaptSGD, momentum=0.9),
    "AvaGrad": pytorch_optimizer.AvaGrad,
}


def outside(optimizer):
    """u by a deep copy in fp64, with the numbers of the groups, and those that a step makes, in fp64, too."""
    wide = copy.copy(optimizer)

    def widened(value):
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    own = [{key: widened(value) for key, value in group.items()} for group in optimizer.param_groups]
    vars(wide).update({**vars(optimizer), "param_groups": own})
    torch.set_default_dtype(torch.float64)
    try:
        return rerun(wide)
    finally:
        torch.set_default_dtype(FP32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", MAKES)
def test_u_is_that_of_a_rerun_outside_and_edq_is_the_truth(name, dtype):
    model, optimizer, handle = in_groups(MAKES[name], mlp(dtype=dtype), sample="all")
    assert handle.info.intent == "whole-optimizer"
    places = [p for group in optimizer.param_groups for p in group["params"]]
    copied = handle._hooks[0].measurer._copied
    train(model, optimizer, 3)
    for step in range(3, 6):
        backward(model, step)
        expected, before = outside(optimizer), [p.detach().double() for p in places]
        with isolated(torch.device("cpu")):
            copied.begin(optimizer, [intent.composition for intent in handle._hooks[0]._intents])
            copied._narrow = None
            copied.step(None)
            for p, u in zip(places, expected, strict=True):
                assert torch.allclose(copied.stepped(p)[0], u, rtol=1e-12, atol=1e-12 * float(u.abs().max()))
        optimizer.step()
        values = handle.summary()["model"]
        assert values["edq_ratio"] == pytest.approx(edq(expected, before, places), rel=1e-9)
        still = [p.detach().double() == start for p, start in zip(places, before, strict=True)]
        lost = sum(int(((u != 0) & e).sum()) for u, e in zip(expected, still, strict=True))
        active = sum(int((u != 0).sum()) for u in expected)
        assert values["lost_update_ratio"] == pytest.approx(lost / active, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "health"), [(BF16, "losing updates"), (FP32, "healthy")])
def test_the_verdict_of_prodigy_is_known(dtype, health):
    _, _, handle = watched(pytorch_optimizer.Prodigy, mlp(dtype=dtype), steps=12)
    assert str(handle).splitlines()[0].endswith(health)
    assert "a copy of the whole optimizer is stepped for group 0" in str(handle)
    assert "100 % of the elements" in str(handle)


def test_a_sample_is_compared_with_its_own_part_of_the_copy():
    model, optimizer, handle = in_groups(GlobalScale, mlp(dtype=FP32, width=300), sample=64)
    train(model, optimizer, 4)
    layers = handle.summary()["layers"]
    assert layers["2.weight"]["sampled"] < layers["2.weight"]["elements"]
    for values in layers.values():
        assert values["edq_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert layers["2.weight"]["state_decrement_ratio/momentum"] == pytest.approx(1.0, abs=1e-5)


def test_gradients_are_unscaled_for_the_copy_where_the_optimizer_does_it():
    found = []
    for scale in (1.0, 1024.0):
        model, optimizer, handle = in_groups(Unscaling, mlp(dtype=FP32))
        assert handle.info.intent == "whole-optimizer"
        optimizer.grad_scale = torch.tensor(scale)
        for step in range(2):
            backward(model, step, scale=scale)
            optimizer.step()
        found.append(handle.summary()["model"]["edq_ratio"])
    assert found == pytest.approx([1.0, 1.0], abs=1e-3)


def training(make, *, watched):
    torch.manual_seed(5)
    model = mlp()
    optimizer = make(groups(model))
    handle = watch(model, optimizer, every=2, budget=None) if watched else None
    train(model, optimizer, 8)
    groups_now = [
        {key: str(value) for key, value in own.items() if key != "params"} for own in optimizer.param_groups
    ]
    own = getattr(optimizer, "generator", torch.default_generator)
    held = [value for value in tensors_of(optimizer).values() if isinstance(value, torch.Tensor)]
    return [*held, own.get_state(), torch.get_rng_state()], groups_now, handle


def assert_untouched(make):
    (mine, my_groups, handle), (theirs, their_groups, _) = (training(make, watched=own) for own in (True, False))
    assert my_groups == their_groups
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    return handle


class ByIdentity(GlobalScale):
    """Looks a rate up by the parameter's id, which a copy's parameters do not have."""

    def __init__(self, params):
        super().__init__(params)
        self.rates = {id(p): 3.0 for group in self.param_groups for p in group["params"]}

    def rate(self, group, parameter):
        return self.rates.get(id(parameter), 1.0) * group["lr"]


class Flat(GlobalScale):
    """Keeps all weights in one buffer, whose views the parameters are."""

    def __init__(self, params):
        super().__init__(params)
        every = [p for group in self.param_groups for p in group["params"]]
        self.buffer = torch.cat([p.detach().flatten() for p in every])
        for p, part in zip(every, self.buffer.split([p.numel() for p in every]), strict=True):
            p.data = part.view(p.shape)


class Coded(GlobalScale):
    """Counts, an integer an element, how often each gradient was positive."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in [p for group in self.param_groups for p in group["params"]]:
            self.state[p].setdefault("signs", torch.zeros_like(p, dtype=torch.int16)).add_(p.grad.gt(0))


class Bound(GlobalScale):
    """Steps through a method that is bound to itself."""

    def __init__(self, params):
        super().__init__(params)
        self.scaled = functools.partial(self.rate)


class Array(GlobalScale):
    """Keeps an array of NumPy's."""

    def __init__(self, params):
        super().__init__(params)
        self.counts = np.zeros(3)


class InSixtyFour(GlobalScale):
    """Cannot step many fp64 numbers."""

    def rate(self, group, parameter):
        if parameter.dtype == torch.float64 and parameter.numel() > 4096:
            raise RuntimeError("no room")
        return group["lr"]


REFUSED = {
    ByIdentity: "it does not move the weights as the optimizer does",
    Flat: "two tensors in the same memory",
    Coded: "codes (torch.int16)",
    Bound: "a method of its own (scaled)",
    Array: "a ndarray, which cannot be copied",
    InSixtyFour: "RuntimeError: no room",
    OfGenerator: "as its clone steps fp64 ones",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_copy_can_follow_is_unknown_with_the_reason_and_trains_on(kind, caplog):
    error_guard.raise_in_tests(False)
    handle = assert_untouched(kind)
    assert handle.info.intent == "before-after"
    assert handle._assembly.last.layout.watch == handle.info, "what is sent"
    assert REFUSED[kind] in handle.info.intent_reason
    values = handle.summary()["model"]
    assert values["edq_ratio"] is None
    assert values["effective_norm"] > 0
    told = [record for record in caplog.records if "a copy of all of" in record.getMessage()]
    assert len(told) == (kind in (ByIdentity, InSixtyFour))
    assert not handle._guard.failures


def test_more_elements_than_the_bound_are_not_copied_nor_on_several_ranks(monkeypatch):
    model = mlp()
    elements = sum(p.numel() for p in model.parameters())
    for most, intent in ((elements, "whole-optimizer"), (elements - 1, "before-after")):
        monkeypatch.setattr(rotation, "ELEMENTS_COPIED", most)
        handle = watch(model, GlobalScale(groups(model)), every=1)
        assert handle.info.intent == intent
    assert f"{elements} elements are more than the {elements - 1}" in handle.info.intent_reason
    monkeypatch.undo()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    handle = watch(model, GlobalScale(groups(model)), every=1)
    assert handle.info.intent == "before-after"
    assert "2 ranks train" in handle.info.intent_reason


def test_what_costs_more_than_the_budget_is_given_up():
    model, optimizer, handle = in_groups(GlobalScale, mlp(), sample=2048, budget=0.01)
    governor, measurer = handle._governor, handle._hooks[0].measurer
    train(model, optimizer, 1)
    assert measurer.copies_optimizer
    governor.doublings = 6
    assert governor._do_less()
    measurer.shrink_sample(int(governor.sample))
    assert handle.info.intent == "before-after"
    assert "more than the agent's budget" in handle.info.intent_reason


def test_a_sparse_gradient_has_no_copy():
    torch.manual_seed(0)
    model, optimizer, handle = watched(GlobalScale, nn.Embedding(16, 8, sparse=True))
    copied = handle._hooks[0].measurer._copied
    model(torch.tensor([1, 2])).square().sum().backward()
    copied.begin(optimizer, [intent.composition for intent in handle._hooks[0]._intents])
    assert copied.refused == "GlobalScale steps a sparse gradient, and its tensors hang together"
