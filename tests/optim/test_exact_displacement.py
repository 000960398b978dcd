"""The exact rule that the agent's shadow step calls, against textbook AdamW in fp64."""

import pytest
import torch
from collage_optim import CollageAdamW

from tests.optim.models import parameters
from tests.reference.adamw import ReferenceAdamW
from tests.reference.streams import noisy_gradients

OPTIONS = [
    {},
    {"amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.2, "betas": (0.8, 0.95)},
    {"weight_decay": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_follows_the_textbook(options):
    (member,) = parameters(shapes=((64,),))
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, **options}
    optimizer = CollageAdamW([member], **settings)
    reference = ReferenceAdamW(member, **settings)
    exact = optimizer.exact_rule()
    weight = member.detach().double()
    averages: dict[str, torch.Tensor] = {}
    for step, gradient in enumerate(noisy_gradients(64, 50), start=1):
        expected = reference.step(gradient)
        displacement, averages = exact(optimizer.param_groups[0], averages, weight, gradient, step)
        weight = weight + displacement
        torch.testing.assert_close(displacement, expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(averages["exp_avg_sq"], reference.second, rtol=1e-13, atol=0)


def test_changes_nothing_that_it_is_given():
    group = CollageAdamW(parameters()).param_groups[0]
    state = {"exp_avg": torch.ones(5, dtype=torch.float64), "exp_avg_sq": torch.ones(5, dtype=torch.float64)}
    weight, gradient = torch.ones(5, dtype=torch.float64), torch.full((5,), 0.5, dtype=torch.float64)
    given = [tensor.clone() for tensor in (*state.values(), weight, gradient)]
    displacement, after = CollageAdamW.exact_displacement(group, state, weight, gradient, 3)
    for tensor, before in zip((*state.values(), weight, gradient), given, strict=True):
        assert torch.equal(tensor, before)
    assert displacement.dtype == after["exp_avg"].dtype == torch.float64
    assert after["exp_avg"].data_ptr() != state["exp_avg"].data_ptr()


def test_further_state_is_left_out():
    group = CollageAdamW(parameters()).param_groups[0]
    state = {"step": torch.tensor(2.0), "parameter_low": torch.ones(5), "exp_avg": torch.ones(5)}
    _, after = CollageAdamW.exact_displacement(group, state, torch.ones(5), torch.ones(5), 3)
    assert set(after) == {"exp_avg", "exp_avg_sq"}


def test_a_sample_gives_a_sample():
    group = CollageAdamW(parameters()).param_groups[0]
    weight, gradient = torch.randn(40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    chosen = torch.tensor([3, 17, 31])
    whole, _ = CollageAdamW.exact_displacement(group, {}, weight, gradient, 1)
    part, _ = CollageAdamW.exact_displacement(group, {}, weight[chosen], gradient[chosen], 1)
    assert torch.equal(whole[chosen], part)


@pytest.mark.parametrize("shape", [(3, 4), (0,), ()])
def test_any_shape(shape):
    group = CollageAdamW(parameters()).param_groups[0]
    displacement, after = CollageAdamW.exact_displacement(group, {}, torch.ones(shape), torch.ones(shape), 1)
    assert displacement.shape == after["exp_avg"].shape == shape


def test_a_measured_step_of_plus_follows_the_exact_one():
    """Ratio of what was kept to what was intended: all but the rounding of the low component."""
    (member,) = parameters(shapes=((4096,),))
    optimizer = CollageAdamW([member], lr=1e-3, strategy="plus")
    for gradient in noisy_gradients(4096, 20):
        member.grad = gradient
        before = optimizer.stored_parameter(member)
        state = optimizer.state.get(member, {})
        joined = {
            name: state[name].double() + (state[f"{name}_low"].double() if f"{name}_low" in state else 0)
            for name in ("exp_avg", "exp_avg_sq")
            if state
        }
        step = int(state["step"]) + 1 if state else 1
        intended, _ = optimizer.exact_displacement(optimizer.param_groups[0], joined, before, gradient, step)
        optimizer.step()
        effective = optimizer.stored_parameter(member) - before
        assert float((intended * effective).sum() / (intended**2).sum()) == pytest.approx(1, abs=1e-4)
