"""Any tensor: what was intended of it and what arrived, by an fp64 reference and by what people do with tensors."""

import collage_agent as collage
import pytest
import torch
from collage_agent.error_guard import raise_in_tests
from torch import nn

BF16 = torch.bfloat16


def test_a_buffer_that_is_moved_by_less_than_it_can_hold_is_told():
    """A router's balancing bias: said was nothing, and its step function had "no gradients"."""
    bias = torch.full((8,), 0.6).to(BF16)
    handle = collage.watch_tensor("expert_bias", bias)
    for step in range(100):
        intended = torch.where(torch.arange(8) % 3 == step % 3, 1e-3, -1e-3)
        handle.before()
        bias += intended.to(BF16)
        handle.after(intended)
    found = handle.summary()
    assert (found["updates"], found["edq_ratio"], found["lost_ratio"], found["moved_ratio"]) == (100, 0.0, 1.0, 0.0)
    head, _, numbers, advice = str(handle).splitlines()
    assert head == "expert_bias (bfloat16, 8 elements), 100 updates: updates are lost"
    assert numbers == "  EDQ 0.0000; 0.0000 of an fp64 twin's way"
    assert "keep expert_bias in float32" in advice


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_merge_is_measured_as_by_an_fp64_twin(dtype):
    torch.manual_seed(0)
    weight = nn.Parameter((torch.randn(96, 97) * 0.1).to(dtype), requires_grad=False)
    start, exact = weight.detach().double().clone(), weight.detach().double().clone()
    handle = collage.watch_tensor("merged", weight)
    dot = square = lost = active = 0.0
    ever = torch.zeros(weight.shape, dtype=torch.bool)
    for _ in range(4):
        update = torch.randn(96, 4) @ torch.randn(4, 97) * 1e-4
        before = weight.detach().double().clone()
        handle.before()
        weight.data.add_(update.to(dtype))
        handle.after(update)
        effective, intended = weight.detach().double() - before, update.double()
        exact += intended
        ever |= effective != 0
        dot += float((intended * effective).sum())
        square += float(intended.square().sum())
        lost += int(((effective == 0) & (intended != 0)).sum())
        active += int((intended != 0).sum())
    found, moved, way = handle.summary(), weight.detach().double() - start, exact - start
    assert found["edq_ratio"] == pytest.approx(dot / square, rel=1e-12)
    assert found["lost_ratio"] == pytest.approx(lost / active, rel=1e-12)
    assert found["displacement_ratio"] == pytest.approx(float((way * moved).sum() / way.square().sum()), rel=1e-9)
    assert found["drift_ratio"] == pytest.approx(float((moved - way).norm() / way.norm()), rel=1e-9)
    assert found["moved_ratio"] == pytest.approx(float(ever.double().mean()), rel=1e-12)
    assert (": healthy" in str(handle)) == (dtype is torch.float32)
    assert {key: float(value) for key, value in handle.scalars().items()} == {
        "merged/edq_ratio": found["edq_ratio"],
        "merged/lost_ratio": found["lost_ratio"],
    }


def test_stochastic_rounding_is_no_loss():
    torch.manual_seed(0)
    weight = torch.full((64, 64), 0.6).to(BF16)
    handle = collage.watch_tensor("average", weight)
    for _ in range(50):
        handle.before()
        wide = (weight.float() + 1e-4).view(torch.int32) + torch.randint(0, 2**16, weight.shape, dtype=torch.int32)
        weight.copy_((wide & -(2**16)).view(torch.float32))
        handle.after(1e-4)
    found = handle.summary()
    assert found["lost_ratio"] > 0.9
    assert abs(found["edq_ratio"] - 1) < 0.1
    assert ": healthy" in str(handle)


@pytest.mark.parametrize("shape", [(64, 1024), (2**17,), ()])
def test_of_a_large_tensor_a_sample_is_looked_at_in_every_column(shape):
    tensor = torch.zeros(shape)
    handle = collage.watch_tensor("large", tensor, sample=4096)
    handle.before()
    tensor += torch.arange(tensor.numel(), dtype=torch.float32).reshape(shape) % 1024 + 1
    handle.after(1.0)
    seen = handle._start.numel()
    assert seen <= 4096
    if len(shape) == 2:
        assert len(handle._sampled(tensor).unique()) == 1024
    assert handle.summary()["moved_ratio"] == 1.0


@pytest.mark.parametrize(
    ("name", "tensor", "sample", "words"),
    [
        ("", torch.zeros(2), 8, "name=''; pass a text"),
        ("a", [1.0], 8, "tensor=list; pass a floating-point tensor"),
        ("a", torch.zeros(2, dtype=torch.int8), 8, "tensor=int8; pass a floating-point tensor"),
        ("a", torch.zeros(2, device="meta"), 8, "pass a floating-point tensor that holds numbers"),
        ("a", torch.zeros(2), 0, "sample=0; pass a number of elements"),
    ],
)
def test_what_cannot_be_watched_is_refused(name, tensor, sample, words):
    with pytest.raises((TypeError, ValueError), match=words):
        collage.watch_tensor(name, tensor, sample=sample)


def test_a_call_that_cannot_be_used_never_raises_into_training(caplog):
    tensor = torch.zeros(4)
    handle = collage.watch_tensor("bias", tensor)
    assert "no update was measured yet" in str(handle)
    assert handle.scalars() == {}
    raise_in_tests(False)
    handle.after(1.0)
    assert "after() without before()" in caplog.text
    handle.before()
    handle.after(torch.zeros(3))
    assert "intended has shape (3,), the tensor (4,)" in caplog.text
    handle.before()
    handle.after([1.0])  # type: ignore[arg-type]
    assert "note: measuring fails, last measuring bias: TypeError" in str(handle)
    raise_in_tests(True)
    handle.before()
    handle.remove()
    handle.after(1.0)
    assert handle.summary()["updates"] == 0
