"""Words that were false on real training code, each beside what an exact fp64 step says of the same steps."""

from dataclasses import replace
from typing import Any

import pytest
import pytorch_optimizer
import torch
from collage_agent.handle import watch
from torch import nn

from collage_monitor.diagnosis import finite, judge
from tests.diagnosis.trainings import Training, run

pytestmark = pytest.mark.slow

PLAIN = Training(seed=4)


def test_an_overshoot_does_not_hide_what_is_lost_nor_layers_that_stand_still():
    """lr 1e-3: every LayerNorm weight still is 1.0, a fifth is lost, and no decay arrives: it was "healthy"."""
    evidence, truth = run(PLAIN)
    assert evidence.model["edq_ratio"] == pytest.approx(1.0, abs=0.05)
    assert truth.lost is not None
    assert truth.lost > 0.1
    assert truth.losing_layers(1.0) > 1e-3
    assert truth.decay_kept == 0.0
    found = judge(evidence)
    assert found.health == "losing updates"
    assert " layers lose most of their updates (norm.weight, …" in found.text
    assert "weight decay moves next to nothing" in found.text


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(replace(PLAIN, lr=3e-4), marks=pytest.mark.nightly),
        replace(PLAIN, optimizer="sgd", lr=0.012, momentum=0.9, decay=0.0),
    ],
    ids=["AdamW, lr 3e-4", "SGD, clipped"],
)
def test_a_third_of_the_updates_lost_is_not_healthy(training):
    evidence, truth = run(training)
    assert truth.lost is not None
    assert 0.2 < truth.lost < 0.6
    assert judge(evidence).health == "losing updates"


def test_the_recent_past_is_judged_and_not_the_last_step():
    """A learning rate that falls to 0 ended "losing updates, EDQ 0.17": that of one step."""
    falling = replace(PLAIN, lr=0.03, optimizer="adam", decay=0.0, schedule="linear to 0", every=1)
    evidence, truth = run(falling)
    assert truth.edq() == pytest.approx(1.0, abs=0.02)
    said = judge(evidence)
    assert "edq_ratio" not in [finding.key for finding in said.findings if finding.health == "losing updates"]
    evidence, truth = run(replace(falling, lr=3e-4, optimizer="collage", strategy="light"))
    assert truth.healthy()
    assert judge(evidence).health == "healthy"


def test_shares_count_only_what_has_an_intended_update():
    """Adafactor on a tied embedding of 40,000 × 32: 0.3 % lost was printed where each measured layer lost 98 %."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(40_000, 32)
            self.mix = nn.Linear(32, 32)
            self.norm = nn.LayerNorm(32)

        def forward(self, tokens):
            return self.norm(self.mix(self.rows(tokens))) @ self.rows.weight[:500].T

    torch.manual_seed(0)
    model = Tied().bfloat16()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-5)
    handle = watch(model, optimizer, every=1)
    for step in range(6):
        tokens = torch.randint(0, 500, (4, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).float()
        nn.functional.cross_entropy(logits.reshape(-1, 500), tokens[:, 1:].reshape(-1)).backward()
        optimizer.step()
    evidence = handle.evidence()
    measured = {name: own for name, own in evidence.layers.items() if own["lost_update_ratio"] is not None}
    assert "rows.weight" not in measured
    shares = [finite(own["lost_update_ratio"]) or 0.0 for own in measured.values()]
    lost = finite(evidence.model["lost_update_ratio"]) or 0.0
    assert 0.9 < lost <= max(shares)
    # Σ (e − u)² / Σ u² of the model is the mean of its layers', weighted by Σ u².
    errors = [finite(own["update_error_ratio"]) or 0.0 for own in measured.values()]
    assert 0.0 < (finite(evidence.model["update_error_ratio"]) or 0.0) <= max(errors)
    assert (finite(evidence.model["edq_cosine"]) or 0.0) >= min(
        finite(own["edq_cosine"]) or 0.0 for own in measured.values()
    )
    found = handle.judgement()
    assert found.health != "healthy"
    assert found.measured == pytest.approx(1120 / (1120 + 40_000 * 32))
    assert "0.1 % of the elements" in found.text
    assert "0.1 % of the elements" in str(handle)


@pytest.mark.parametrize(
    ("dtype", "word"),
    [(torch.bfloat16, "unknown"), pytest.param(torch.float32, "healthy", marks=pytest.mark.nightly)],
)
def test_second_moments_kept_by_row_and_column_that_stand_still_are_not_healthy(dtype, word):
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(dtype)
    weight = model.weight
    optimizer = pytorch_optimizer.CAME(model.parameters(), lr=1e-2, betas=(0.9, 0.999, 0.9999))
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = optimizer.state[weight]["exp_avg_sq_row"].fill_(1.0)
    handle = watch(model, optimizer, every=1, budget=None)
    for _ in range(100):
        weight.grad = (0.1 * torch.randn(64, 64)).to(dtype)
        with torch.no_grad():
            weight.copy_((1 + 0.9 * torch.rand(64, 64)) * torch.randn(64, 64).sign() * 2.0**-4)
        optimizer.step()
    assert (kept == 1.0).all() == (dtype == torch.bfloat16)
    judged = handle.judgement()
    assert judged.health == word
    assert ("exp_avg_sq_row" in judged.text) == (word == "unknown")


def test_a_compensation_that_is_dropped_after_each_step_is_no_good_keeping():
    """`residual_zero_ratio` was 1.0 beside "healthy, 0.0 % lost"."""
    training: Training = replace(PLAIN, optimizer="collage", strategy="kahan", lr=3e-4, decay=0.0, zeroed=True)
    evidence, truth = run(training)
    assert "losing updates" in truth.sick()
    found = judge(evidence)
    assert found.health == "losing updates"
    assert found.deciding is not None
    assert found.deciding.key == "residual_zero_ratio"
    assert judge(run(replace(training, zeroed=False))[0]).health == "healthy"


def test_a_second_moment_that_is_rounded_to_0_is_not_called_healthy():
    """A fused kernel divides by a v that forgets in each step: EDQ 1.000 and decrements of 1 beside long steps."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False).half()
    weight, exact = model.weight, nn.Parameter(model.weight.detach().double())
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer, twin = torch.optim.AdamW([weight], fused=True, **options), torch.optim.AdamW([exact], **options)
    handle, begun = watch(model, optimizer, every=1), exact.detach().clone()
    sizes = torch.where(torch.rand(32, 32) < 0.1, 1e-4, 1e-1)
    for _ in range(20):
        weight.grad = (sizes * torch.randn(32, 32)).half()
        exact.grad = weight.grad.double()
        optimizer.step()
        twin.step()
    assert (weight.double() - begun).norm() > 1.5 * (exact - begun).norm()
    judged = handle.judgement()
    assert judged.health == "unknown"
    assert "of the state exp_avg_sq is rounded to 0 in float16" in judged.text


def test_a_sum_that_stands_still_wakes():
    """Adagrad's in bfloat16, from some hundred steps on: no alert spoke of it."""
    torch.manual_seed(0)
    weight = torch.nn.Linear(24, 24, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.Adagrad(weight.parameters(), lr=1e-2)
    handle = watch(weight, optimizer, every=20, budget=None)
    for _ in range(700):
        weight.weight.grad = torch.randn(24, 24).sign().to(torch.bfloat16)
        optimizer.step()
    finding = next(found for found in handle.judgement().findings if found.key == "state_increment_ratio/sum")
    assert (finding.alert, finding.value) == ("CollageSecondMomentStuck", 9 / 32)
