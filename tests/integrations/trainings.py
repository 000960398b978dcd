"""What trainings leave behind: themselves, bit for bit the same or not, and what arrived at a MemoryTransport."""

import random

import numpy as np
import torch

from collage_monitor.wire import RunCreate

__all__ = ["assert_same_training", "begun", "recorded", "scalars_of", "steps_of"]


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


def steps_of(transport):
    """The measured steps, in order."""
    return [report.step for report in transport.reports if report.statistics is not None]


def scalars_of(transport):
    """Name to (step, value) of everything logged."""
    found: dict[str, list[tuple[int, float]]] = {}
    for report in transport.reports:
        for name, value in report.scalars.items():
            found.setdefault(name, []).append((report.step, value))
    return found


def begun(transport):
    """The message that began the run."""
    return next(message for message in transport.messages if isinstance(message, RunCreate))
