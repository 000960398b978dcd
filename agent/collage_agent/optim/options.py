"""Checks of hyper-parameters, with torch.optim's own words where it has them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["check_learning_rate", "check_torch_options", "checked_adam_options"]

_TORCH_FORMS = {
    "foreach": "the step goes tensor by tensor, in chunks",
    "fused": "the step goes tensor by tensor, in chunks",
    "capturable": "the step reads its counter on the host",
    "differentiable": "the step works in place",
}


def check_torch_options(options: Mapping[str, Any]) -> None:
    """Accept torch's choices of implementation as long as they ask for nothing; raise otherwise.

    Raises TypeError for an unknown name, ValueError for a form of step that does not exist here.
    """
    for name, value in options.items():
        if name not in _TORCH_FORMS:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported: {_TORCH_FORMS[name]}; leave {name} out")


def check_learning_rate(lr: float | Tensor) -> None:
    """Raise ValueError for a learning rate that torch refuses."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")


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
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    for index, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{index}] must be 1-element")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    return {"lr": lr, "betas": tuple(float(beta) for beta in betas), "eps": eps, "weight_decay": weight_decay}
