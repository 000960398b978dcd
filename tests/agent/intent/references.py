"""u of a step that is about to be taken, from a copy of the whole optimizer, or torch's counterpart, in fp64."""

import copy
from functools import partial
from typing import Any

import pytorch_optimizer
import torch
from torch.optim.optimizer import Optimizer

SCALARS = ("step", "mu_product", "mu", "eta")
COUNTERPARTS: dict[str, tuple[str, dict[str, str]]] = {
    "adam": ("AdamW", {"state1": "exp_avg", "state2": "exp_avg_sq"}),
    "lion": ("Lion", {"state1": "exp_avg"}),
    "momentum": ("SGD", {"state1": "momentum_buffer"}),
    "rmsprop": ("RMSprop", {"state1": "square_avg"}),
    "adagrad": ("Adagrad", {"state1": "sum"}),
}


def rerun(optimizer: Any) -> list[torch.Tensor]:
    """u of each parameter in the order of the groups: the step of a copy whose weights and states are fp64."""
    copied = copy.deepcopy(optimizer)
    # Copies lose what an optimizer keeps on its instance.
    vars(copied).update({key: value for key, value in vars(optimizer).items() if key not in vars(copied)})
    moves = []
    for group, live in zip(copied.param_groups, optimizer.param_groups, strict=True):
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"] = group["lr"].double()
        if "eps" in live:
            group["eps"] = settled_eps(live)
        for p, original in zip(group["params"], live["params"], strict=True):
            weight = stored(optimizer, original)
            state = copied.state[p]
            for key, value in state.items():
                if key not in SCALARS and isinstance(value, torch.Tensor) and value.is_floating_point():
                    state[key] = value.double()
            if state.get("kahan_comp") is not None:
                state["kahan_comp"] = torch.zeros_like(weight)
            p.data = weight.clone()
            p.grad = original.grad.detach().double()
            moves.append((p, weight))
    copied.step()
    return [p.detach() - weight for p, weight in moves]


def edq(intended, before, after) -> float:
    """Σ u·e / Σ u² of tensors that lay at `before`."""
    moved = [now.detach().double() - start for now, start in zip(after, before, strict=True)]
    product = sum(float((u * e).sum()) for u, e in zip(intended, moved, strict=True))
    return product / sum(float((u * u).sum()) for u in intended)


def settled_eps(live: dict[str, Any]) -> Any:
    """A group's eps; what is None torch's Adafactor takes from the weights' dtype, and a copy's are fp64."""
    eps = live.get("eps")
    if not isinstance(eps, tuple):
        return eps
    own = torch.finfo(live["params"][0].dtype).eps
    return tuple(own if value is None else value for value in eps)


def stored(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """θ in fp64: the weight and the residual that it is kept with."""
    residual = optimizer.state[parameter].get("kahan_comp")
    weight = parameter.detach().double()
    return weight if residual is None else weight + residual.double()


def torchao_rerun(optimizer: Any) -> list[torch.Tensor]:
    """The same of torchao's AdamW, by torch's, with states as the numbers that they stand for."""
    group = optimizer.param_groups[0]
    shared = {name: group[name] for name in ("betas", "eps", "weight_decay")}
    counterpart = torch.optim.AdamW(_widened(group), lr=float(group["lr"]), foreach=False, **shared)
    for p, original in zip(counterpart.param_groups[0]["params"], group["params"], strict=True):
        state = optimizer.state[original]
        kept = {key: _numbers(state[key]).double() for key in ("exp_avg", "exp_avg_sq")}
        counterpart.state[p] = {"step": state["step"].clone(), **kept}
    return _stepped(counterpart)


def _numbers(state: Any) -> torch.Tensor:
    numbers: torch.Tensor = state if type(state) is torch.Tensor else state.dequantize()
    return numbers


def bitsandbytes_rerun(optimizer: Any) -> list[torch.Tensor]:
    """The same of bitsandbytes' optimizers, by torch's of the same rule; 8-bit blocks are looked up here."""
    group = optimizer.param_groups[0]
    kind, names = COUNTERPARTS[optimizer.optimizer_name]
    parameters = _widened(group)
    betas, eps = {"betas": group["betas"][:2]}, {"eps": group["eps"]}
    own: dict[str, dict[str, Any]] = {
        "AdamW": betas | eps,
        "Lion": betas,
        "SGD": {"momentum": group["betas"][0]},
        "RMSprop": {"alpha": group["betas"][0]} | eps,
        "Adagrad": eps,
    }
    make = pytorch_optimizer.Lion if kind == "Lion" else partial(getattr(torch.optim, kind), foreach=False)
    counterpart: Any = make(parameters, lr=group["lr"], weight_decay=group["weight_decay"], **own[kind])
    for p, original in zip(parameters, group["params"], strict=True):
        state = optimizer.state[original]
        kept = {name: _looked_up(state, key) for key, name in names.items()}
        counterpart.state[p] = {"step": torch.tensor(float(state["step"])), **kept}
        counterpart.param_groups[0]["step"] = state["step"]
    return _stepped(counterpart)


def _looked_up(state: dict[str, Any], key: str) -> torch.Tensor:
    codes, number = state[key], key.removeprefix("state")
    if codes.dtype != torch.uint8:
        return torch.as_tensor(codes, dtype=torch.float64)
    flat = codes.flatten().tolist()
    table, scales = state[f"qmap{number}"].tolist(), state[f"absmax{number}"].tolist()
    values = [table[code] * scales[index // 256] for index, code in enumerate(flat)]
    return torch.tensor(values, dtype=torch.float64).float().double().view(codes.shape)


def _widened(group: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for original in group["params"]:
        p = original.detach().double().requires_grad_()
        p.grad = original.grad.detach().double()
        found.append(p)
    return found


def _stepped(optimizer: Any) -> list[torch.Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    return [p.detach() - start for p, start in zip(parameters, before, strict=True)]
