"""Plain AdamW beside torch's own: the same bits in storage arithmetic, a stated tolerance in fp32 arithmetic."""

import pytest
import torch
from collage_optim import CollageAdamW

from tests.optim.models import assert_same_bits, give_gradients, parameters, tensors_of

OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "lr": 3e-3},
    {"amsgrad": True},
    {"maximize": True},
    {"betas": (0.8, 0.95), "eps": 1e-6},
    {"lr": torch.tensor(2e-3)},
]


def both(dtype, options, arithmetic, steps=30):
    """torch's for-loop AdamW and ours after the same steps."""
    theirs, ours = parameters(dtype), parameters(dtype)
    reference = torch.optim.AdamW(theirs, foreach=False, **options)
    optimizer = CollageAdamW(ours, strategy="plain", arithmetic=arithmetic, **options)
    for step in range(steps):
        give_gradients(theirs, ours, step=step)
        reference.step()
        optimizer.step()
    return reference, optimizer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_plain_in_storage_arithmetic_is_torch_bit_for_bit(dtype, options):
    assert_same_bits(*both(dtype, options, "storage"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plain_fp32_agrees_with_torch(options):
    """30 steps of at most lr: fp32 rounds weights of 0.02 to 2**-30, and an update to 2**-24 of itself."""
    reference, optimizer = both(torch.float32, options, "fp32")
    found = tensors_of(optimizer)
    for key, tensor in tensors_of(reference).items():
        torch.testing.assert_close(found[key], tensor, rtol=5e-6, atol=30 * 3e-3 * 2.0**-20)


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_plain_fp64_agrees_with_torch(options):
    reference, optimizer = both(torch.float64, options, "fp32")
    found = tensors_of(optimizer)
    for key, tensor in tensors_of(reference).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-12, atol=1e-14)


def test_parameters_without_gradient_stay():
    members = parameters()
    before = members[0].detach().clone()
    optimizer = CollageAdamW(members)
    give_gradients(members[1:], step=1)
    optimizer.step()
    assert torch.equal(members[0], before)
    assert members[0] not in optimizer.state


def test_options_by_group():
    theirs, ours = parameters(), parameters()

    def groups(members):
        return [{"params": members[:2], "lr": 1e-2, "weight_decay": 0.5}, {"params": members[2:], "eps": 1e-4}]

    reference = torch.optim.AdamW(groups(theirs), foreach=False)
    optimizer = CollageAdamW(groups(ours), strategy="plain", arithmetic="storage")
    for step in range(10):
        give_gradients(theirs, ours, step=step)
        reference.step()
        optimizer.step()
    assert_same_bits(reference, optimizer)
