"""Every rule × strategy × dtype × arithmetic trains a small model and resumes bit for bit, or is refused."""

import copy

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdam, CollageAdamW, CollageLion, CollageSGD

from tests.optim.models import assert_same_bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.drawn(by=lambda rule, strategy, dtype, arithmetic: (rule, (strategy, arithmetic), dtype)),
]

RULES = {
    "AdamW": (CollageAdamW, {"lr": 3e-3}),
    "Adam": (CollageAdam, {"lr": 3e-3, "weight_decay": 1e-3}),
    "SGD": (CollageSGD, {"lr": 0.01, "momentum": 0.9}),
    "Lion": (CollageLion, {"lr": 1e-3}),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WIDTH = 32


def refusal(rule, strategy, dtype, arithmetic):
    """The words of a refusal, or None for what must work."""
    if STRATEGIES[strategy].is_coded and arithmetic == "storage":
        return f"strategy '{strategy}' keeps other bits than those: leave arithmetic out"
    if dtype in (torch.float32, torch.float64) and strategy != "plain":
        return "is for bfloat16( and float16)? parameters"
    if STRATEGIES[strategy].is_coded and dtype == torch.float16:
        return "use bfloat16 parameters, or strategy 'master-weights'"
    if strategy == "plus" and rule in ("SGD", "Lion"):
        return "has none: use 'light'"
    if strategy == "coupled-7" and rule in ("SGD", "Lion"):
        return "packs exp_avg and exp_avg_sq into one tensor, and .* use strategy 'split-24bit-8bit'"
    if strategy in ("coupled-9", "coupled-8") and rule in ("SGD", "Lion"):
        return (
            "has none: use 'split-master-8bit'" if strategy == "coupled-9" else "has none: use 'split-24bit-8bit'"
        )
    if dtype == torch.float16 and rule in ("AdamW", "Adam"):
        if strategy in ("plus", "full"):
            return "use bfloat16 parameters, or strategy 'master-weights'"
        if arithmetic == "storage" and strategy not in ("fp32-states", "master-weights"):
            return "eps=1e-08 rounds to zero in float16"
    return None


def small_model(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 1)
    ).to(dtype)


def train(model, optimizer, steps, first):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, WIDTH, generator=generator)
        targets = inputs[:, :3].sum(1, keepdim=True)
        optimizer.zero_grad()
        loss = ((model(inputs.to(next(model.parameters()).dtype)).float() - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", RULES)
def test_training_resumes(rule, strategy, dtype, arithmetic):
    optimizer_class, options = RULES[rule]
    model = small_model(dtype)
    options = {**options, "strategy": strategy, "arithmetic": arithmetic}
    words = refusal(rule, strategy, dtype, arithmetic)
    if words is not None:
        with pytest.raises(ValueError, match=words):
            optimizer_class(model.parameters(), **options)
        return
    optimizer = optimizer_class(model.parameters(), **options)
    losses = train(model, optimizer, 50, first=0)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    other = small_model(dtype)
    other.load_state_dict(model.state_dict())
    resumed = optimizer_class(other.parameters(), **{**options, "lr": 1.0})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 5, first=50) == train(other, resumed, 5, first=50)
    assert_same_bits(optimizer, resumed)
