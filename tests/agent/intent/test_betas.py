"""A β that is rounded or cut inside the step is told, of Adam's family; one that depends on the step is not."""

from functools import partial

import pytest
import pytorch_optimizer
import torch
from collage_agent.intent.betas import decays_otherwise
from collage_agent.intent.selftest import run_selftest
from torch import nn

from tests.agent.intent.matrix import CONFIGURATIONS, model
from tests.agent.intent.optimizers import ByParameter
from tests.agent.training import watched

pytestmark = pytest.mark.slow


BETAS = {
    "cut": lambda beta, step: (torch.tensor(beta).view(torch.int32) & -65536).view(torch.float32).item(),
    "half": lambda beta, step: torch.tensor(beta, dtype=torch.float16).item(),
    "as said": lambda beta, step: beta,
    "debiased": lambda beta, step: 1 - (1 - beta) / (1 - beta**step),
    "by step": lambda beta, step: min(beta, 1 - step**-0.8) if step > 1 else 0.5,
}


class Adam(ByParameter):
    """Adam whose β is what `of` makes of the group's."""

    def __init__(self, params, of, lr=1e-3, betas=(0.9, 0.999), decay=0.0):
        super().__init__(params, lr, betas=betas, decay=decay)
        self.of = of

    def step_one(self, p, group):
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        first, second = (self.of(beta, state["step"]) for beta in group["betas"])
        state["exp_avg"].mul_(first).add_(p.grad, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
        p.mul_(1 - group["lr"] * group["decay"])
        bound = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt() + 1e-8
        p.addcdiv_(state["exp_avg"] / (1 - first ** state["step"]), bound, value=-group["lr"])


def judged(of, seed, width, **options):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, 12))

    def loss(own, step):
        inputs = torch.randn(32, 12, generator=torch.Generator().manual_seed(step))
        return (own(inputs) - inputs).square().mean()

    return watched(partial(Adam, of=BETAS[of], **options), layers, 60, loss, oracle=True)[2]


@pytest.mark.drawn(by=lambda of, seed, **_: (of, seed))
@pytest.mark.parametrize(("seed", "width", "rate", "decay"), [(0, 24, 1e-3, 0.0), (1, 90, 1e-4, 0.1)])
@pytest.mark.parametrize(
    ("of", "betas"),
    [("cut", (0.9, 0.999)), ("cut", (0.9, 0.9995)), ("cut", (0.95, 0.98)), ("half", (0.9, 0.9993))],
)
def test_what_decays_by_another_beta_is_told(of, betas, seed, width, rate, decay):
    ratio = (1 - BETAS[of](betas[1], 1)) / (1 - betas[1])
    handle = judged(of, seed, width, betas=betas, lr=rate, decay=decay)
    found = handle.summary()["model"]["state_decrement_ratio/exp_avg_sq"]
    # Where the gradient is large against the average, its share weighs in: that of a smaller β is larger, too.
    assert found == pytest.approx(ratio, rel=1e-3, abs=1e-6)
    expected = "healthy" if abs(ratio - 1) < 0.15 else "states are stuck" if ratio < 1 else "steps are off"
    assert handle.judgement().health == expected, handle.judgement().text


@pytest.mark.drawn
@pytest.mark.parametrize(("seed", "width"), [(0, 24), (1, 90)])
@pytest.mark.parametrize("of", ["as said", "debiased", "by step"])
def test_what_decays_as_said_or_by_the_step_is_not_accused(of, seed, width):
    assert judged(of, seed, width).judgement().health == "healthy"


SHADOWED = [entry for entry in CONFIGURATIONS if entry.kind == "shadow" and torch.float32 in entry.dtypes]


@pytest.mark.drawn(by=lambda entry: (entry.library,))
@pytest.mark.parametrize("entry", SHADOWED, ids=[entry.title for entry in SHADOWED])
def test_no_published_optimizer_is_accused(entry):
    optimizer = entry.make(model(entry, torch.float32).parameters())
    for group in optimizer.param_groups:
        assert not decays_otherwise(optimizer, group, run_selftest(optimizer, group))


@pytest.mark.nightly
def test_no_optimizer_of_a_large_collection_is_accused():
    accused, tried = [], 0
    for name in pytorch_optimizer.get_supported_optimizers():
        try:
            weights = [nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4))]
            optimizer = pytorch_optimizer.load_optimizer(name)(weights)
            found = run_selftest(optimizer, optimizer.param_groups[0])
        except Exception:
            continue
        tried += found.kind == "shadow"
        if decays_otherwise(optimizer, optimizer.param_groups[0], found):
            accused.append(name)
    assert accused == []
    assert tried > 30
