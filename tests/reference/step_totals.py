"""Totals of one step by their definitions, in fp64, element by element; and the u that a step itself computed."""

from __future__ import annotations

import torch
from collage_agent.optim import base, stepping, totals


def step_totals(u, e, visible, gradient):
    """{name: total} of one tensor."""
    u, e, visible, gradient = (tensor.double().reshape(-1) for tensor in (u, e, visible, gradient))
    bad = ~(torch.isfinite(u) & torch.isfinite(e) & torch.isfinite(gradient))
    u, e, visible = (tensor[~bad] for tensor in (u, e, visible))
    wanted, moved = u != 0, e != 0
    far = (e - u).abs() > 0.5 * u.abs()
    found = {
        "elements": bad.numel(),
        "nonfinite": bad.sum(),
        "idle": (~wanted).sum(),
        "stray": (~wanted & moved).sum(),
        "lost": (wanted & ~moved).sum(),
        "distorted": (wanted & moved & far).sum(),
        "reversed": (wanted & moved & far & (torch.sign(u) * e < 0)).sum(),
        "faithful": (wanted & moved & ~far).sum(),
        "lost_visible": (wanted & (visible == 0)).sum(),
        "unchanged": (visible == 0).sum(),
        "intended_squared_sum": (u * u).sum(),
        "intended_effective_sum": (u * e).sum(),
        "effective_squared_sum": (e * e).sum(),
        "intended_visible_sum": (u * visible).sum(),
        "visible_squared_sum": (visible * visible).sum(),
    }
    return {name: float(value) for name, value in found.items()}


def taken_down(monkeypatch):
    """A list that the u of every tensor is added to, as a measured step of ours computes it; small tensors last."""
    taken: list[torch.Tensor] = []
    of_one, of_several = totals.totals_of, totals.segmented_totals

    def one(observation):
        taken.append(observation.intended.clone())
        return of_one(observation)

    def several(observation, sizes):
        taken.extend(torch.split(observation.intended.clone(), sizes))
        return of_several(observation, sizes)

    for module in (base, stepping):
        monkeypatch.setattr(module, "totals_of", one)
    monkeypatch.setattr(stepping, "segmented_totals", several)
    return taken
