"""The model: causal and of the stated size; its 16-bit products on a CPU are computed in fp32, and rounded once."""

import copy
import math
import weakref

import pytest
import torch
from collage_demo.models import ByteBERT, ByteGPT, compute_products_in_fp32, loss_of
from collage_studies.held_weights import ReadInBfloat16
from collage_studies.low_rank_adapters import adapt
from torch import nn
from torch.nn import functional

from benchmarks._training import Training
from tests.narrow_products import NarrowProducts


def small(kind=ByteGPT):
    torch.manual_seed(0)
    return kind(layers=2, width=32, length=16).to(torch.bfloat16)


def drawn(rows):
    """So many passages of the length that the model reads."""
    return torch.randint(256, (rows, 16), generator=torch.Generator().manual_seed(1))


def test_a_later_byte_changes_no_earlier_prediction_and_a_fresh_model_is_about_as_good_as_guessing():
    model, inputs = small().float(), drawn(8)
    changed = inputs.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    with torch.no_grad():
        left, right = model(inputs), model(changed)
    assert torch.equal(left[:, :10], right[:, :10])
    assert not torch.equal(left[:, 10:], right[:, 10:])
    assert abs(loss_of(model, inputs, inputs).item() - math.log(256)) < 0.1


def test_the_default_has_nine_hundred_thousand_parameters_in_any_dtype():
    full = ByteGPT().to(torch.bfloat16)
    assert 0.8e6 < sum(parameter.numel() for parameter in full.parameters()) < 1e6
    assert full(torch.zeros(1, 3, dtype=torch.int64)).dtype == torch.bfloat16


def adapted():
    model = small()
    adapt(model, 3, 2.0, seed=1)
    return model


def trains(model):
    inputs = drawn(2)
    return lambda: loss_of(model, inputs, inputs).backward()


OWN = {
    "GPT": lambda: trains(small()),
    "BERT": lambda: trains(small(ByteBERT)),
    "adapters": lambda: trains(adapted()),
    "fp32 weights read in bfloat16": lambda: trains(ReadInBfloat16(small().float())),
    "benchmarks": lambda: Training(seed=1).step,
}


@pytest.mark.parametrize("own", OWN)
def test_our_own_models_multiply_no_16_bit_operands(own):
    step = OWN[own]()
    with NarrowProducts() as seen:
        step()
    assert seen.found == []


def test_products_of_a_model_left_as_it_is_are_counted():
    """Otherwise the test above could not fail."""
    layer, recurrent = nn.Linear(4, 3).bfloat16(), nn.GRU(4, 3).bfloat16()
    with NarrowProducts() as seen:
        (layer(torch.ones(2, 4).bfloat16()).sum() + recurrent(torch.ones(2, 4).bfloat16())[0].sum()).backward()
    assert len(seen.found) >= 4


class Products(nn.Module):
    """Each kind of product once."""

    def __init__(self):
        super().__init__()
        self.linear, self.recurrent = nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True)

    def forward(self, inputs):
        hidden, _ = self.recurrent(self.linear(inputs))
        mixed = functional.scaled_dot_product_attention(hidden, inputs, hidden + inputs, is_causal=True)
        added = torch.addmm(mixed[0, 0], mixed[0], self.linear.weight)
        return added @ self.linear.weight.T[:, 1:5] + torch.matmul(mixed[1], self.linear.weight[2:6].T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_fp32_rounded(dtype):
    torch.manual_seed(0)
    model = compute_products_in_fp32(Products().to(dtype))
    twin = copy.deepcopy(model).float()
    inputs = torch.randn(2, 6, 8).to(dtype).requires_grad_()
    wide = inputs.detach().float().requires_grad_()
    with NarrowProducts() as seen:
        found = model(inputs)
        found.square().sum().backward()
    expected = twin(wide)
    expected.square().sum().backward()
    assert seen.found == []
    assert found.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    weights = zip([inputs, *model.parameters()], [wide, *twin.parameters()], strict=True)
    for narrow, exact in [(found, expected), *((own.grad, other.grad) for own, other in weights)]:
        assert narrow.dtype == dtype
        assert (narrow.float() - exact).norm() <= tolerance * exact.norm()


def test_a_product_of_one_layer_is_rounded_once():
    torch.manual_seed(0)
    layer = compute_products_in_fp32(nn.Linear(64, 32).bfloat16())
    inputs, upstream = torch.randn(16, 64).bfloat16(), torch.randn(16, 32).bfloat16()
    layer(inputs).backward(upstream)
    wide = functional.linear(inputs.float(), layer.weight.detach().float(), layer.bias.detach().float())
    assert torch.equal(layer(inputs), wide.bfloat16())
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, (upstream.float().T @ inputs.float()).bfloat16())


def test_an_exception_in_the_model_leaves_torch_as_it_was():
    layer, other = compute_products_in_fp32(nn.Linear(4, 4).bfloat16()), nn.Linear(4, 4).bfloat16()
    with pytest.raises(RuntimeError):
        layer(torch.ones(2, 5).bfloat16())
    with NarrowProducts() as seen:
        other(torch.ones(2, 4).bfloat16())
    assert seen.found


def test_a_graph_that_nobody_walks_back_is_freed():
    """Attention and recurrence save their own outputs: saved as they are, they would hold the graph, which ends in
    a leak or, freed while it is walked, in a crash."""

    class Mark:
        def __call__(self, gradient):
            return gradient

    model, mark = compute_products_in_fp32(Products().bfloat16()), Mark()
    inputs = torch.randn(2, 6, 8).bfloat16().requires_grad_() * 1
    inputs.register_hook(mark)
    outputs, alive = model(inputs), weakref.ref(mark)
    del inputs, mark, outputs
    assert alive() is None


@pytest.mark.slow
def test_no_fp32_copy_of_a_weight_waits_for_the_backward_pass():
    layer = compute_products_in_fp32(nn.Linear(4096, 4096, bias=False).bfloat16())
    inputs = torch.ones(1, 4096).bfloat16().requires_grad_()
    layer(inputs).sum().backward()
    before = resident_mib()
    outputs = layer(inputs)
    assert resident_mib() - before < 32, "64 MiB are a copy of the weight"
    outputs.sum().backward()


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) / 256
