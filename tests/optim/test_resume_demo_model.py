"""The demo's model resumes bit for bit under every rule and strategy in bfloat16: test_resume's long lane."""

import copy

import pytest
import torch
from collage_demo.corpus import batch, standard_library
from collage_demo.training import ByteGPT, loss_of
from collage_optim import STRATEGIES

from tests.optim.models import assert_same_bits
from tests.optim.test_resume import RULES, refusal

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def text():
    return standard_library().training


def new_model():
    torch.manual_seed(0)
    return ByteGPT(length=32).to(torch.bfloat16)


def train(model, optimizer, text, steps, first):
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(text, 4, 32, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", RULES)
def test_training_resumes(rule, strategy, arithmetic, text):
    if refusal(rule, strategy, torch.bfloat16, arithmetic):
        return
    optimizer_class, options = RULES[rule]
    options = {**options, "lr": 1e-4 if rule == "Lion" else options["lr"] / 3}
    options.update(strategy=strategy, arithmetic=arithmetic)
    model, other = new_model(), new_model()
    optimizer = optimizer_class(model.parameters(), **options)
    losses = train(model, optimizer, text, 50, first=0)
    assert sum(losses[-10:]) < sum(losses[:10])
    other.load_state_dict(model.state_dict())
    resumed = optimizer_class(other.parameters(), **{**options, "lr": 1.0})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, text, 5, first=50) == train(other, resumed, text, 5, first=50)
    assert_same_bits(optimizer, resumed)
