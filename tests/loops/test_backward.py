"""Steps that are taken in the backward pass, a parameter at a time, are one step a pass, measured as any others."""

import functools

import collage_agent as collage
import optimi
import pytest
import torch
from collage_agent.handle import watch
from torch import nn

BF16 = torch.bfloat16


class Releasing(torch.optim.Optimizer):
    """Steps one parameter by `step_param`, as the fused backward pass of image trainers does, or all by `step`."""

    def __init__(self, params, lr=1e-5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step_param(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg_sq=torch.zeros_like(parameter, dtype=torch.float32))
        state["step"] += 1
        gradient = parameter.grad.float()
        state["exp_avg_sq"].mul_(0.9).addcmul_(gradient, gradient, value=0.1)
        parameter.sub_((group["lr"] * gradient / (state["exp_avg_sq"].sqrt() + 1e-12)).to(parameter.dtype))

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_param(parameter, group)


def built(make=Releasing):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)).to(BF16)
    return model, make(model.parameters())


def release(model, optimizer, steps=lambda: True):
    """Step each parameter as its gradient is there, and free the gradient."""

    def hook(parameter):
        if steps():
            optimizer.step_param(parameter, optimizer.param_groups[0])
            parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def backward(model, seed):
    inputs = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed)).to(BF16)
    (model(inputs).float() - inputs.float()).square().mean().backward()


def train(model, optimizer, steps):
    for seed in range(steps):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()


def hooks_on(model):
    return [len(own._post_accumulate_grad_hooks or ()) for own in model.parameters()]


KEYS = ("edq_ratio", "lost_update_ratio", "intended_norm", "state_decrement_ratio/exp_avg_sq", "elements")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["hooks", "watch"])
def test_a_pass_is_a_step_with_the_numbers_of_a_step_outside(first, tmp_path):
    """Told was nothing at all, or that no layer had a gradient."""
    model, optimizer = built()
    handle = watch(model, optimizer, every=1, sample="all")
    train(model, optimizer, 12)
    expected, weights = handle.summary()["model"], [own.detach().clone() for own in model.parameters()]
    handle.remove()
    model, optimizer = built()
    if first == "hooks":
        release(model, optimizer)
    collage.init("backward", mode="offline", dir=tmp_path)
    handle = collage.watch(model, optimizer, every=1, sample="all")
    if first == "watch":
        release(model, optimizer)
    for seed in range(12):
        backward(model, seed)
        collage.log({"loss": 0.0})  # By it hooks are noticed that came after the watch.
    found = handle.summary()["model"]
    assert all(torch.equal(own, before) for own, before in zip(model.parameters(), weights, strict=True))
    assert (handle.step, handle.summary()["step"]) == (12, 12)
    assert [found[key] for key in KEYS] == pytest.approx([expected[key] for key in KEYS], rel=1e-12)
    assert set(handle.summary()["layers"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "stepped one by one in the backward pass" in str(handle)
    assert handle.info.resume_losses == []
    assert handle.judgement().first_step == (1 if first == "hooks" else 2)
    collage.finish()
    assert hooks_on(model) == [1, 1, 1, 1], "the training's own stay"


def test_passes_that_only_gather_gradients_are_no_steps():
    model, optimizer = built()
    passes = [0]
    release(model, optimizer, lambda: passes[0] % 2 == 1)
    handle = watch(model, optimizer, every=1)
    for seed in range(12):
        backward(model, seed)
        passes[0] += 1
    assert handle.step == 6
    assert handle.judgement().measured == 1.0


def test_hooks_that_only_look_leave_the_steps_to_the_optimizer():
    model, optimizer = built(lambda params: torch.optim.AdamW(params, lr=1e-3))
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: seen.append(float(own.grad.norm())))
    handle = watch(model, optimizer, every=1)
    train(model, optimizer, 6)
    assert len(seen) == 24
    assert (handle.step, handle.judgement().measured) == (6, 1.0)
    assert "backward pass" not in str(handle)


def released_adamw(**options):
    return functools.partial(optimi.AdamW, lr=1e-5, weight_decay=0.0, gradient_release=True, **options)


@pytest.mark.parametrize("first", ["hooks", "watch"])
@pytest.mark.parametrize("kahan", [False, True])
def test_gradient_release_of_a_library_is_one_step_a_pass(first, kahan):
    """Told was "step 500" for 100, "3 layers had no gradient", and a KeyError. It refuses parameters with hooks."""

    model, optimizer = built(released_adamw(kahan_sum=kahan, betas=(0.9, 0.95)))
    if first == "hooks":
        optimi.prepare_for_gradient_release(model, optimizer)
    handle = watch(model, optimizer, every=1, budget=None, first_step=1)
    if first == "watch":
        optimi.prepare_for_gradient_release(model, optimizer)
    train(model, optimizer, 40)
    found = handle.judgement()
    assert found.health == ("healthy" if kahan else "losing updates")
    assert found.measured == 1.0
    if first == "hooks":
        assert handle.step == 40
        assert "stepped one by one in the backward pass" in str(handle)


@pytest.mark.slow
def test_the_advice_takes_the_place_of_what_the_hooks_step():
    """Followed as it stood, it stepped nothing: hooks went on with the old optimizer, and took each gradient."""
    model, optimizer = built(released_adamw(kahan_sum=False))
    optimi.prepare_for_gradient_release(model, optimizer)
    handle = watch(model, optimizer, every=1, budget=None, first_step=1)
    for seed in range(12):
        backward(model, seed)
    (advice,) = handle.judgement().advice
    assert "remove the hooks that step the old one in backward()" in advice.text
    handle.remove()
    names = {"optimizer": optimizer}
    exec(advice.choices[0].code, names)
    optimi.remove_gradient_release(model)
    cured = names["optimizer"]
    handle = watch(model, cured, every=1, budget=None)
    train(model, cured, 12)
    assert handle.judgement().health == "healthy"
    assert handle.summary()["model"]["edq_ratio"] == pytest.approx(1.0, abs=1e-3)
