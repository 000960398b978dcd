"""The model: causal, of the stated size, and a fresh one knows nothing."""

import math

import torch
from collage_demo.models import ByteGPT, loss_of


def model():
    torch.manual_seed(0)
    return ByteGPT(layers=2, width=32, length=16)


def test_a_later_byte_changes_no_earlier_prediction():
    inputs = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    changed = inputs.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    with torch.no_grad():
        left, right = model()(inputs), model()(changed)
    assert torch.equal(left[:, :10], right[:, :10])
    assert not torch.equal(left[:, 10:], right[:, 10:])


def test_a_fresh_model_is_about_as_good_as_guessing():
    inputs = torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(1))
    assert abs(loss_of(model(), inputs, inputs).item() - math.log(256)) < 0.1


def test_the_default_has_nine_hundred_thousand_parameters_in_any_dtype():
    full = ByteGPT().to(torch.bfloat16)
    assert 0.8e6 < sum(parameter.numel() for parameter in full.parameters()) < 1e6
    assert full(torch.zeros(1, 3, dtype=torch.int64)).dtype == torch.bfloat16
