"""Three bytes a weight: worst relative error, bytes, survival of small updates, and the error of an Adam run."""

import pytest
import torch
from collage_agent.optim import CollageAdamW
from collage_agent.optim.experimental import EXPERIMENTAL_STORAGES

from tests.reference.streams import noisy_gradients

INT8, E4M3 = "experimental-bf16-int8", "experimental-e4m3-triple"


def weights(count=20_000):
    return torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.02


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_three_bytes(name):
    parts = [part for part in EXPERIMENTAL_STORAGES[name](weights()) if part.dim()]
    assert sum(part.untyped_storage().nbytes() for part in parts) == 3 * 20_000


@pytest.mark.parametrize(("name", "bound"), [(INT8, 2.0**-15), (E4M3, 2.0**-13.9)])
def test_worst_relative_error(name, bound):
    x = weights()
    # Below a tenth of the tensor's largest weight the third e4m3 part meets its smallest subnormal.
    x = x[x.abs() > 0.1 * x.abs().max()]
    error = (EXPERIMENTAL_STORAGES[name](x).load().double() - x.double()).abs() / x.double().abs()
    assert error.max() <= bound
    assert error.max() > bound / 8


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_storing_again_keeps_the_value(name):
    """Up to one step of the int8, where half an ulp upwards does not fit."""
    kept = EXPERIMENTAL_STORAGES[name](weights()).load()
    again = EXPERIMENTAL_STORAGES[name](kept).load()
    step = 2.0**-15 if name == INT8 else 0.0
    assert ((again - kept).abs() <= step * kept.abs()).all()
    assert (again == kept).double().mean() > 0.99


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_empty_and_zero(name):
    assert EXPERIMENTAL_STORAGES[name](torch.zeros(0, 3)).load().shape == (0, 3)
    assert torch.equal(EXPERIMENTAL_STORAGES[name](torch.zeros(4)).load(), torch.zeros(4))


@pytest.mark.parametrize("name", EXPERIMENTAL_STORAGES)
def test_small_updates_survive(name):
    """200 updates of 1e-3 of each weight: plain bfloat16 keeps none, three bytes keep them all."""
    x = weights(2000).abs() + 0.01
    kept = EXPERIMENTAL_STORAGES[name](x)
    for _ in range(200):
        kept = EXPERIMENTAL_STORAGES[name](kept.load() + 1e-3 * x)
    share = (kept.load() - x) / (200 * 1e-3 * x)
    assert share.mean() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("name", "bound"), [(INT8, 2e-3), (E4M3, 1e-2)])
def test_error_of_adam_with_fp32_states(name, bound):
    """300 steps against fp64, the weight alone in three bytes: between plain bfloat16 (0.5) and a bfloat16 pair."""
    x = weights(2048)
    group = CollageAdamW([torch.nn.Parameter(x)], strategy="plain", lr=1e-4).param_groups[0]
    exact, kept = x.double(), EXPERIMENTAL_STORAGES[name](x)
    origin = kept.load().double()
    averages: dict[str, torch.Tensor] = {}
    for step, gradient in enumerate(noisy_gradients(2048, 300), start=1):
        moved, averages = CollageAdamW.exact_displacement(group, averages, exact, gradient, step)
        exact = exact + moved
        kept = EXPERIMENTAL_STORAGES[name]((kept.load().double() + moved).float())
    displacement, wanted = kept.load().double() - origin, exact - x.double()
    assert float((displacement - wanted).norm() / wanted.norm()) <= bound
