"""Checks of hyper-parameters, with torch.optim's own words where it has them.

The constructors call them. What is refused follows torch.optim (`tests/optim/test_update_rules.py`).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = [
    "TORCH_FORMS",
    "check_learning_rate",
    "check_not_negative",
    "check_torch_options",
    "checked_adam_options",
    "checked_betas",
]

TORCH_FORMS = {
    "foreach": "the step goes tensor by tensor, in chunks",
    "fused": "the step goes tensor by tensor, in chunks",
    "capturable": "the step reads its counter on the host",
    "differentiable": "the step works in place",
}
"""torch's choices of implementation, and why there is only one here."""


def check_torch_options(options: Mapping[str, Any]) -> None:
    """Accept torch's choices of implementation as long as they ask for nothing; raise otherwise.

    Raises TypeError for an unknown name, ValueError for a form of step that does not exist here.
    """
    for name, value in options.items():
        if name not in TORCH_FORMS:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported: {TORCH_FORMS[name]}; leave {name} out")


def check_learning_rate(lr: float | Tensor) -> None:
    """Raise ValueError for a learning rate that torch refuses."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError for a negative option, or one that is not a number."""
    if not value >= 0.0:
        raise ValueError(f"Invalid {name} value: {value}")


def checked_betas(betas: tuple[float | Tensor, float | Tensor]) -> tuple[float, ...]:
    """Return the two decay factors as numbers; raise ValueError as torch.optim.Adam does."""
    for index, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{index}] must be 1-element")
        if not 0.0 <= beta < 1.0:
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
    check_torch_options(torch_options)
    check_learning_rate(lr)
    check_not_negative("epsilon", eps)
    numbers = checked_betas(betas)
    check_not_negative("weight_decay", weight_decay)
    return {"lr": lr, "betas": numbers, "eps": eps, "weight_decay": weight_decay}
