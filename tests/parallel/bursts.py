"""Runs long enough for a window and a counterfactual, with decay, residuals and states that are zero."""

from __future__ import annotations

import torch
from torch import nn

from tests.parallel.jobs import measured
from tests.parallel.launch import among_asked
from tests.parallel.models import SPREAD, Injected, Part, adamw, ours

FIRST_STEP = 92
"""States exist after the first step; a window of four ends at step 96; the last, 100, has counterfactuals."""
STEPS = 9
WINDOW = 4
FAINT = 2.0**-75
"""So small a gradient that its second moment is zero in bfloat16."""
MAKERS = {"adamw": adamw, "plus": ours}
WAYS = ("ddp", "fsdp1 original", "fsdp1 flat", "fsdp2")
CASES = {
    f"{way} {name} {dtype}": (way, name, dtype)
    for way in WAYS
    for name in MAKERS
    for dtype in (torch.bfloat16, torch.float32)
    if name == "adamw" or dtype == torch.bfloat16
}


class Faint(Part):
    """A part whose loss, and with it its gradients, is faint."""

    def __init__(self, part):
        nn.Module.__init__(self)
        self.weight, self.bias = part.weight, part.bias
        self.index = part.index

    def forward(self, step):
        return Part.forward(self, step) * FAINT


def partly_faint(dtype):
    model = Injected()
    model.parts[3] = Faint(model.parts[3])
    return model.to(dtype)


def _measured(model, optimizer):
    return measured(model, optimizer, windows=(WINDOW,), first_step=FIRST_STEP, steps=STEPS)


def alone():
    """{(optimizer, dtype): what one process saw}."""
    found = {}
    for name, dtype in {case[1:] for case in CASES.values()}:
        model = partly_faint(dtype)
        found[name, dtype] = _measured(model, MAKERS[name](model.parameters()))
    return found


def spread(folder):
    """What this rank saw in each case that was asked for."""
    return {
        case: _measured(*SPREAD[way](dtype, partly_faint(dtype), MAKERS[name]))
        for case, (way, name, dtype) in among_asked(CASES).items()
    }
