"""Checks of hyper-parameters, with torch.optim's own words where it has them.

The constructors call them. What is refused follows torch.optim (`tests/optim/test_update_rules.py`).
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypedDict

from torch import Tensor

__all__ = [
    "TORCH_FORMS",
    "TorchForms",
    "check_learning_rate",
    "check_not_negative",
    "check_torch_options",
    "checked_adam_options",
    "checked_betas",
]


class TorchForms(TypedDict, total=False):
    """torch's choices of implementation, which are accepted as long as they ask for nothing."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


TORCH_FORMS = {
    "foreach": "the step goes tensor by tensor, in chunks",
    "capturable": "only on a CUDA device can a graph hold a step",
    "fused": "only on a CUDA device is the step one kernel",
    "differentiable": "the step works in place",
}
"""torch's choices of implementation, and why there is only one here."""
_OPTIONS = (
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "dampening", "nesterov", "strategy"),
    *("arithmetic", "maximize", "seed", "compiled", "on_external_write"),
)
_CALLED_OTHERWISE = {"learning_rate": "lr", "beta1": "betas", "beta2": "betas", "params": "the first argument"}


def check_torch_options(options: Mapping[str, Any], launches: bool = True) -> dict[str, bool]:
    """Accept torch's choices of implementation as long as they ask for nothing, or for `fused` where a step
    `launches` kernels; raise otherwise. Returns what a group is to keep of them.

    Raises TypeError for an unknown name, ValueError for a form of step that does not exist here.
    """
    for name, value in options.items():
        if name not in TORCH_FORMS:
            near = _CALLED_OTHERWISE.get(name) or next(iter(get_close_matches(name, _OPTIONS, 1)), "")
            raise TypeError(f"unexpected keyword argument {name!r}" + (f"; did you mean {near}?" if near else ""))
        if value and not (name in ("fused", "capturable") and launches):
            raise ValueError(f"{name}={value!r} is not supported: {TORCH_FORMS[name]}; leave {name} out")
    graphed = {"capturable": True} if options.get("capturable") else {}
    return {"fused": True, **graphed} if graphed or options.get("fused") else {}


def check_learning_rate(lr: float | Tensor) -> None:
    """Raise ValueError for a learning rate that torch refuses."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not _number("lr", lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError for a negative option or NaN, TypeError for one that is not a number."""
    if not _number(name, value) >= 0.0:
        raise ValueError(f"Invalid {name} value: {value}")


def _number(name: str, value: Any) -> Any:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r} is not a number")
    return value


def checked_betas(betas: tuple[float | Tensor, float | Tensor]) -> tuple[float, ...]:
    """Return the two decay factors as numbers; raise ValueError as torch.optim.Adam does."""
    for index, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{index}] must be 1-element")
        if not 0.0 <= _number(f"betas[{index}]", beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    return tuple(float(beta) for beta in betas)


def checked_adam_options(
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float,
    weight_decay: float,
    torch_options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return Adam's options as a group's entries; raise ValueError as torch.optim.Adam does."""
    chosen = check_torch_options(torch_options)
    check_learning_rate(lr)
    check_not_negative("epsilon", eps)
    numbers = checked_betas(betas)
    check_not_negative("weight_decay", weight_decay)
    return {"lr": lr, "betas": numbers, "eps": eps, "weight_decay": weight_decay, **chosen}
