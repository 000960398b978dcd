"""The intended update by brute force: whole tensors, states and gradients in fp64, and a new torch optimizer."""

from typing import Any

import torch


def full_precision_update(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """u of each parameter with a gradient, keyed by id, for the step that `optimizer` is about to take."""
    groups, originals = [], []
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key != "params"}
        if own.get("fused"):
            own["fused"], own["foreach"] = False, False
        if isinstance(own["lr"], torch.Tensor):
            own["lr"] = own["lr"].double()
        own["params"] = []
        for parameter in group["params"]:
            twin = parameter.detach().double().clone()
            if parameter.grad is not None:
                twin.grad = parameter.grad.detach().double().clone()
            own["params"].append(twin)
            originals.append((parameter, twin))
        groups.append(own)
    constructor: Any = type(optimizer)
    shadow = constructor(groups, lr=optimizer.defaults["lr"])
    for group, own in zip(shadow.param_groups, groups, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
    for parameter, twin in originals:
        if parameter in optimizer.state:
            shadow.state[twin] = {
                key: _upcast(key, value, parameter) for key, value in optimizer.state[parameter].items()
            }
    before = {id(parameter): twin.clone() for parameter, twin in originals}
    shadow.step()
    return {id(parameter): twin - before[id(parameter)] for parameter, twin in originals if twin.grad is not None}


def _upcast(key, value, parameter):
    if not isinstance(value, torch.Tensor):
        return value
    elementwise = key != "step" and value.shape == parameter.shape and value.is_floating_point()
    return value.detach().double().clone() if elementwise else value.detach().clone()
