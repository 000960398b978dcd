"""Trainings by sampled rewards, and the loss of stored weights."""

import pytest
import torch
from collage_demo.corpus import batch, standard_library
from collage_demo.models import ByteGPT, loss_of
from collage_demo.recipe import Recipe
from collage_optim import CollageAdamW
from collage_studies.training_trial import SampledRewards, stored_loss
from torch import nn


class Logits(nn.Module):
    def __init__(self, chances):
        super().__init__()
        self.own = nn.Parameter(torch.tensor(chances).log())

    def forward(self, inputs):
        return self.own.expand(*inputs.shape, -1)


def test_the_mean_gradient_is_that_of_the_expected_reward():
    logits = Logits([0.5, 0.3, 0.2])
    model = SampledRewards(logits, seed=1)
    targets = torch.ones(8, 50_000, dtype=torch.long)
    loss_of(model, targets, targets).backward()
    expected = [0.3 * 0.5, -0.3 * (1 - 0.3), 0.3 * 0.2]
    assert logits.own.grad is not None
    assert logits.own.grad.tolist() == pytest.approx(expected, abs=3e-3)


def test_the_stored_loss_reads_bits_that_the_weight_lacks():
    torch.manual_seed(0)
    model = ByteGPT(layers=1, width=32, length=32).to(torch.bfloat16)
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, strategy="split-master", seed=1)
    recipe, corpus = Recipe(layers=1, width=32, length=32, batch_size=2), standard_library()
    loss_of(model, *batch(corpus.training, 2, 32, 1)).backward()
    optimizer.step()
    whole = ByteGPT(layers=1, width=32, length=32)
    whole.load_state_dict({name: optimizer.stored_parameter(p) for name, p in model.named_parameters()})
    with torch.no_grad():
        losses = [loss_of(whole, *batch(corpus.validation, 2, 32, 10**9 + number)).item() for number in range(64)]
    assert stored_loss(model, optimizer, recipe, corpus) == pytest.approx(sum(losses) / 64, rel=1e-6)
    rounded = CollageAdamW(model.parameters(), strategy="plain")
    assert stored_loss(model, rounded, recipe, corpus) != pytest.approx(sum(losses) / 64, rel=1e-6)
    assert 0.9 < stored_loss(model, optimizer, recipe, corpus, rewards=True) < 1
