"""LoRA by peft: adapters are trained under every way to keep a weight, merged, unmerged, and trained on."""

import peft
import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW
from torch import nn

from tests.optim.models import trained

KEEPING = [name for name, strategy in STRATEGIES.items() if strategy.parameter_state is not None]


def adapted(**options):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)).bfloat16()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"], **options)
    return peft.get_peft_model(base, config, autocast_adapter_dtype=False)


@pytest.mark.drawn(by=lambda strategy: (STRATEGIES[strategy].parameter,))
@pytest.mark.parametrize("strategy", KEEPING)
def test_adapters_keep_what_is_beside_them_through_a_merge(strategy):
    """Merging and unmerging write to the frozen weights alone."""
    model = adapted()
    optimizer = CollageAdamW(model.parameters(), lr=1e-2, strategy=strategy, seed=1)
    losses = trained(model, optimizer, 30)
    assert losses[-1] < 0.97 * losses[0]
    assert set(optimizer.state) == {member for name, member in model.named_parameters() if "lora_" in name}
    stored = {member: optimizer.stored_parameter(member) for member in optimizer.state}
    model.merge_adapter()
    model.unmerge_adapter()
    assert all(torch.equal(optimizer.stored_parameter(member), value) for member, value in stored.items())
    trained(model, optimizer, 1)
    assert optimizer.external_writes == 0


@pytest.mark.drawn(by=lambda strategy: (STRATEGIES[strategy].parameter,))
@pytest.mark.parametrize("strategy", KEEPING)
def test_a_merge_into_trained_weights_survives(strategy):
    """peft adds to `.data`, which leaves no version behind."""
    model = adapted(init_lora_weights=False)
    for member in model.parameters():
        member.requires_grad_()
    optimizer = CollageAdamW(model.parameters(), lr=1e-3, strategy=strategy, seed=1)
    trained(model, optimizer, 3)
    bases = [member for name, member in model.named_parameters() if name.endswith("base_layer.weight")]
    before = [member.detach().clone() for member in bases]
    model.merge_adapter()
    written = [member.detach().clone() for member in bases]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for member in model.parameters():
        member.grad = torch.ones_like(member)
    optimizer.step()
    assert optimizer.external_writes == len(bases)
    for member, old, value in zip(bases, before, written, strict=True):
        changed = old != value
        assert changed.double().mean() > 0.5
        assert torch.equal(member.detach(), value)
        assert torch.equal(optimizer.stored_parameter(member)[changed], value.double()[changed])
