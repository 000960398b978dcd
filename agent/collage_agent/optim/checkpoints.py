"""Loading states: fp32 states of 16-bit parameters survive; states of another strategy are converted."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.optim.rules import Group, Moment
from collage_agent.optim.strategies import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    StateStorage,
    StorageStrategy,
    strategy_named,
)

__all__ = ["convert", "load"]

BUILT_IN_OPTIONS = ("strategy", "arithmetic", "compiled", "rule")
"""Group options that belong to this optimizer: a checkpoint does not change them."""


def load(
    optimizer: Optimizer,
    moments_of: Callable[[Group], tuple[Moment, ...]],
    load_as_torch: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
) -> None:
    """Load through torch's own method, then put back what it casts, and convert what is kept in another way.

    moments_of: the moving averages of one of the optimizer's groups, under the options that were loaded.
    torch casts every floating-point state to its parameter's dtype. The pre-hook registered here runs last, so it
    sees the dict as all other hooks left it.
    """
    built = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    seen: dict[str, Any] = {}
    hook = optimizer.register_load_state_dict_pre_hook(lambda _, loaded: seen.update(loaded))
    try:
        load_as_torch(state_dict)
    finally:
        hook.remove()
    saved = chain.from_iterable(group["params"] for group in seen["param_groups"])
    for group, options in zip(optimizer.param_groups, built, strict=True):
        for key, value in options.items():
            if key in BUILT_IN_OPTIONS or key not in group:
                group[key] = value
        for parameter in group["params"]:
            original = seen["state"].get(next(saved))
            if original:
                optimizer.state[parameter] = _loaded(moments_of(group), group, parameter, original)


def _loaded(
    moments: tuple[Moment, ...], group: dict[str, Any], parameter: Tensor, original: dict[str, Any]
) -> dict[str, Tensor]:
    """One parameter's states from a checkpoint, in the dtypes of the checkpoint, then converted to the group's."""
    state = {
        key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
        for key, value in original.items()
    }
    if not isinstance(state.get("step"), Tensor):
        # torch's SGD keeps no counter; that a state exists says that the first step is over.
        state["step"] = torch.tensor(float(state.get("step", 1.0)))
    return convert(
        state, {moment.name: moment.second for moment in moments}, parameter, strategy_named(group["strategy"])
    )


def convert(
    state: dict[str, Tensor], moments: dict[str, bool], parameter: Tensor, strategy: StorageStrategy
) -> dict[str, Tensor]:
    """States of any strategy, converted to those of `strategy`; tensors that already fit are kept as they are.

    moments: name to whether it averages squares. The joined value of each component is kept as well as the new
    form can: a single number by rounding to nearest, a pair by splitting, fp32 by rounding hi + lo.
    """
    converted = {"step": state["step"]}
    for name, second in moments.items():
        high = state.get(name)
        if high is None:
            high = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        low = state.get(name + LOW_COMPONENT_SUFFIX)
        converted.update(_kept(name, high, low, strategy.kept(second), parameter.dtype))
    converted.update(_parameter_components(state, parameter, strategy))
    return converted


def _kept(name: str, high: Tensor, low: Tensor | None, kept: StateStorage, dtype: torch.dtype) -> dict[str, Tensor]:
    low_name = name + LOW_COMPONENT_SUFFIX
    target = torch.float32 if kept is StateStorage.WIDE else dtype
    if kept is StateStorage.PAIR and high.dtype == target and low is not None:
        return {name: high, low_name: low}
    if kept is not StateStorage.PAIR and high.dtype == target and low is None:
        return {name: high}
    joined = high.to(torch.float64) if low is None else high.to(torch.float64) + low.to(torch.float64)
    rounded = joined.to(torch.float32).to(target)
    if kept is not StateStorage.PAIR:
        return {name: rounded}
    return {name: rounded, low_name: (joined - rounded).to(torch.float32).to(target)}


def _parameter_components(
    state: dict[str, Tensor], parameter: Tensor, strategy: StorageStrategy
) -> dict[str, Tensor]:
    """The weight's second component: what the visible weight lacks, or the whole weight in fp32."""
    needed = strategy.parameter_state
    if needed is None:
        return {}
    if needed in state:
        return {needed: state[needed]}
    visible = parameter.detach()
    if needed == MASTER_PARAMETER:
        low = state.get(PARAMETER_LOW)
        master = visible.to(torch.float32, copy=True)
        return {needed: master if low is None else master.add_(low)}
    master_weight = state.get(MASTER_PARAMETER)
    if master_weight is None:
        return {needed: torch.zeros_like(visible, memory_format=torch.preserve_format)}
    return {needed: (master_weight - visible.to(torch.float32)).to(parameter.dtype)}
