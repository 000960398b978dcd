"""Adapters: they begin as the frozen model, only they learn, and every dtype starts from the same numbers."""

import torch
from collage_demo.models import ByteGPT, loss_of
from collage_studies.low_rank_adapters import ADAPTED, adapt

LAYERS, RANK = 2, 3


def adapted(dtype=torch.float32, seed=1):
    torch.manual_seed(0)
    model = ByteGPT(layers=LAYERS, width=32, length=16).to(torch.bfloat16).to(dtype)
    adapt(model, RANK, 2.0, seed)
    return model


def learning(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def inputs():
    return torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def test_an_adapted_model_begins_as_the_frozen_one():
    torch.manual_seed(0)
    plain = ByteGPT(layers=LAYERS, width=32, length=16).to(torch.bfloat16).float()
    with torch.no_grad():
        assert torch.equal(adapted()(inputs()), plain(inputs()))


def test_only_adapters_learn_and_each_linear_layer_of_a_block_has_one():
    model = adapted()
    found = learning(model)
    assert len(found) == 2 * len(ADAPTED) * LAYERS
    assert all(".adapter_in." in name or ".adapter_out." in name for name in found)
    frozen = {name: weight.clone() for name, weight in model.named_parameters() if name not in found}
    optimizer = torch.optim.SGD(found.values(), lr=1.0)
    for _ in range(2):
        loss_of(model, inputs(), inputs()).backward()
        optimizer.step()
    assert all(torch.equal(frozen[name], model.get_parameter(name)) for name in frozen)
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in found.values())


def test_what_is_added_is_the_product_times_the_scale():
    layer = adapted().blocks[0].perceptron
    with torch.no_grad():
        layer.adapter_out.weight.normal_(generator=torch.Generator().manual_seed(2))
        given = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
        weight = layer.base.weight + 2.0 * layer.adapter_out.weight @ layer.adapter_in.weight
        torch.testing.assert_close(layer(given), given @ weight.T + layer.base.bias)


def test_the_seed_decides_the_adapters_in_any_dtype():
    low, high, other = adapted(torch.bfloat16), adapted(), adapted(seed=2)
    for name, weight in learning(high).items():
        assert low.get_parameter(name).dtype == torch.bfloat16
        assert torch.equal(low.get_parameter(name).float(), weight)
    assert not torch.equal(high.blocks[0].attention.adapter_in.weight, other.blocks[0].attention.adapter_in.weight)
