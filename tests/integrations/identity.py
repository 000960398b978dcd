"""What a training leaves behind, and the claim that two of them are bit for bit the same."""

import random

import numpy as np
import torch

__all__ = ["assert_same_training", "recorded"]


def recorded(model, optimizer, losses):
    """Weights, optimizer states, losses and random states, copied."""
    parameters = list(model.parameters())
    return {
        "losses": list(losses),
        "weights": [parameter.detach().clone() for parameter in parameters],
        "states": [_copied(optimizer.state.get(parameter, {})) for parameter in parameters],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
    }


def assert_same_training(one, other):
    assert one["losses"] == other["losses"]
    assert one["losses"]
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        _assert_same(mine, theirs)
    for mine, theirs in zip(one["states"], other["states"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            _assert_same(mine[key], theirs[key])
    assert torch.equal(one["torch"], other["torch"])
    assert one["python"] == other["python"]
    assert one["numpy"] == other["numpy"]


def _copied(state):
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _assert_same(mine, theirs):
    if isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    elif isinstance(mine, list | tuple):
        for entry, counterpart in zip(mine, theirs, strict=True):
            _assert_same(entry, counterpart)
    else:
        assert mine == theirs
