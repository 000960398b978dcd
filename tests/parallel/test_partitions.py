"""A flat fp32 partition, as DeepSpeed's first two stages step it, is taken apart into the tensors it stands for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from collage_agent.handle import watch
from torch import nn


def partitioned(model, first, last):
    """A flat fp32 parameter with elements first to last of all weights in a row, tied to them as DeepSpeed does."""
    weights = list(model.parameters())
    whole = torch.cat([weight.detach().float().reshape(-1) for weight in weights])
    flat = nn.Parameter(whole[first:last].clone())
    begin = 0
    for weight in weights:
        end = begin + weight.numel()
        start, stop = max(begin, first), min(end, last)
        weight._hp_mapping = None
        if start < stop:
            address = SimpleNamespace(start=start - first, numel=stop - start)
            fragment = flat.detach().narrow(0, address.start, address.numel)
            weight._hp_mapping = SimpleNamespace(hp_fragment=fragment, hp_fragment_address=address)
        begin = end
    return flat


def test_a_partition_is_reported_under_the_names_of_its_tensors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 8)).to(torch.bfloat16)
    flat = partitioned(model, 0, 700)
    optimizer = torch.optim.AdamW([flat], lr=1e-3)
    handle = watch(model, optimizer, every=1, sample="all")
    flat.grad = torch.randn(700)
    before = flat.detach().clone()
    optimizer.step()
    moved = (flat.detach() - before).double().split([600, 20, 80])
    layers = handle.summary()["layers"]
    assert list(layers) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [layers[name]["elements"] for name in layers] == [600, 20, 80, None]
    for name, change in zip(("0.weight", "0.bias", "1.weight"), moved, strict=True):
        assert layers[name]["effective_norm"] == pytest.approx(float(change.norm()), rel=1e-12)
    assert handle._last is not None
    told = {layer.name: layer for layer in handle._last.layout.layers}
    assert (told["1.weight"].shape, told["1.weight"].elements) == ([8, 20], 80)
    assert (told["1.bias"].elements, told["1.bias"].module_type) == (0, "Linear")
    assert "cast to bfloat16" in handle.info.intent_reason
