"""Three bytes a weight: worst relative error, bytes, survival of small updates, and the error of an Adam run."""

import copy

import pytest
import torch
from collage_agent.optim.experimental import EXPERIMENTAL_STORAGES, ThreeByteAdamW

from tests.optim.models import assert_same_bits
from tests.optim.test_resume import small_model, train
from tests.reference.adamw import ReferenceAdamW
from tests.reference.streams import noisy_gradients

INT8, E4M3 = "experimental-bf16-int8", "experimental-e4m3-triple"


def weights(count=20_000):
    return torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.02


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_three_bytes(name):
    parts = [part for part in EXPERIMENTAL_STORAGES[name].store(weights()) if part.dim()]
    assert sum(part.untyped_storage().nbytes() for part in parts) == 3 * 20_000


@pytest.mark.parametrize(("name", "bound"), [(INT8, 2.0**-15), (E4M3, 2.0**-13.9)])
def test_worst_relative_error(name, bound):
    x = weights()
    # Below a tenth of the tensor's largest weight the third e4m3 part meets its smallest subnormal.
    x = x[x.abs() > 0.1 * x.abs().max()]
    error = (EXPERIMENTAL_STORAGES[name].store(x).load().double() - x.double()).abs() / x.double().abs()
    assert error.max() <= bound
    assert error.max() > bound / 8


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_storing_again_keeps_the_value(name):
    """Up to one step of the int8, where half an ulp upwards does not fit."""
    kept = EXPERIMENTAL_STORAGES[name].store(weights()).load()
    again = EXPERIMENTAL_STORAGES[name].store(kept).load()
    step = 2.0**-15 if name == INT8 else 0.0
    assert ((again - kept).abs() <= step * kept.abs()).all()
    assert (again == kept).double().mean() > 0.99


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_empty_and_zero(name):
    assert EXPERIMENTAL_STORAGES[name].store(torch.zeros(0, 3)).load().shape == (0, 3)
    assert torch.equal(EXPERIMENTAL_STORAGES[name].store(torch.zeros(4)).load(), torch.zeros(4))


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_small_updates_survive(name):
    """200 updates of 1e-3 of each weight: plain bfloat16 keeps none, three bytes keep them all."""
    x = weights(2000).abs() + 0.01
    kept = EXPERIMENTAL_STORAGES[name].store(x)
    for _ in range(200):
        kept = EXPERIMENTAL_STORAGES[name].store(kept.load() + 1e-3 * x)
    share = (kept.load() - x) / (200 * 1e-3 * x)
    assert share.mean() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("name", "bound"), [(INT8, 2e-3), (E4M3, 1e-2)])
def test_error_of_three_byte_adamw(name, bound):
    """300 steps against fp64, the weight alone in three bytes: between plain bfloat16 (0.5) and a bfloat16 pair."""
    start = weights(2048).to(torch.bfloat16)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = ThreeByteAdamW([parameter], lr=1e-4, storage=name)
    exact = ReferenceAdamW(start, lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-2)
    for gradient in noisy_gradients(2048, 300):
        parameter.grad = gradient
        optimizer.step()
        exact.step(gradient)
    wanted = exact.parameter - start.double()
    kept = optimizer.stored_parameter(parameter)
    assert float((kept - start.double() - wanted).norm() / wanted.norm()) <= bound
    assert ((parameter.double() - kept).abs() <= 2.0**-8 * kept.abs()).all()


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_three_byte_training_resumes(name):
    model, other = small_model(torch.bfloat16), small_model(torch.bfloat16)
    optimizer = ThreeByteAdamW(model.parameters(), lr=3e-3, storage=name)
    losses = train(model, optimizer, 50, first=0)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    other.load_state_dict(model.state_dict())
    resumed = ThreeByteAdamW(other.parameters(), lr=1.0, storage=name)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 5, first=50) == train(other, resumed, 5, first=50)
    assert_same_bits(optimizer, resumed)


@pytest.mark.parametrize(("name", "expected"), [(INT8, 3), (E4M3, 5)])
def test_bytes_of_three_byte_weights(name, expected):
    """Three bytes, and where none of them can be seen by the model two for what it sees."""
    parameter = torch.nn.Parameter(weights(4096).to(torch.bfloat16))
    optimizer = ThreeByteAdamW([parameter], storage=name)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    parts = [parameter.detach(), *(state[key] for key in state if key.startswith("weight_") and state[key].dim())]
    assert sum(part.untyped_storage().nbytes() for part in parts) == expected * 4096


def test_what_three_bytes_cannot_keep_is_refused():
    with pytest.raises(ValueError, match="three bytes are for bfloat16 parameters, not torch"):
        ThreeByteAdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="Invalid storage: 'int4'; use one of experimental-bf16-int8"):
        ThreeByteAdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))], storage="int4")
