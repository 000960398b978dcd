"""Optimizers of other makes: wrappers around another optimizer, objects that only look like one, step functions.

Only the attributes listed here are called. A library is recognised by its form, never by importing it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

__all__ = ["ForeignOptimizer", "contained", "inner_optimizers", "is_foreign", "unwrapped", "why_no_clone"]

_PASSES_ON: Final = ("AcceleratedOptimizer", "LightningOptimizer")
_PLAIN: Final = (int, float, complex, str, bytes, type(None), Tensor, type)


class ForeignOptimizer:
    """Parameter groups and states of an object that is not a torch optimizer, if it has them; otherwise those of
    the model.

    given: the object that takes the steps. `named` is its usual name; `advice` says what to do, in one sentence.
    Whether a clone of it may be stepped: `cloneable`.
    """

    def __init__(self, given: object, model: nn.Module) -> None:
        self.given = given
        self.named = getattr(given, "__name__", None) or type(given).__name__
        groups: Any = getattr(given, "param_groups", None)
        states: Any = getattr(given, "state", None)
        self.cloneable = False
        if _are_groups(groups):
            self.param_groups: list[dict[str, Any]] = groups
            self.state: Mapping[Any, Any] = states if isinstance(states, Mapping) else {}
            self.cloneable = isinstance(states, Mapping) and callable(getattr(type(given), "step", None))
            self.cloneable &= _is_plain(vars(given)) if hasattr(given, "__dict__") else False
        else:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self.param_groups, self.state = [{"params": parameters}], {}
        inner = next(inner_optimizers(given), None)
        by_hand = "call handle.before() and handle.after() around each step"
        if inner is None:
            what = "a step function" if inspect.isroutine(given) else "no torch optimizer that calls hooks"
            self.advice = f"{self.named} is {what}: to measure it, {by_hand}"
        else:
            path, held = inner
            self.advice = (
                f"{self.named} wraps {type(held).__name__}: watch optimizer.{path} in its place, "
                f"or, for what changes over a whole step, {by_hand}"
            )


def is_foreign(given: object) -> bool:
    """Whether it can be stepped, but its steps call no hooks of torch's."""
    if isinstance(given, Optimizer):
        # The base class's constructor, which makes the tables of hooks, was never called.
        return "_optimizer_load_state_dict_post_hooks" not in vars(given)
    if isinstance(given, type | nn.Module):
        return False
    return (
        callable(getattr(given, "step", None)) or inspect.isroutine(given) or isinstance(given, functools.partial)
    )


def unwrapped(given: object) -> Optimizer | None:
    """The optimizer inside a wrapper that does not change its steps; None if it is not such a wrapper."""
    inner = given
    while any(kind.__name__ in _PASSES_ON for kind in type(inner).__mro__):
        inner = getattr(inner, "optimizer", None)
    return inner if inner is not given and isinstance(inner, Optimizer) and not is_foreign(inner) else None


def contained(given: object) -> list[Optimizer]:
    """The optimizers that a container steps one after the other, such as torchtitan's; none of anything else.

    It lists them as `optimizers`, iterating over it gives the same, and its own groups hold their parameters alone.
    """
    held: Any = getattr(given, "optimizers", None)
    if not isinstance(held, list | tuple) or not callable(getattr(type(given), "__iter__", None)):
        return []
    listed: Any = given
    if any(is_foreign(entry) or not isinstance(entry, Optimizer) for entry in held) or [*listed] != [*held]:
        return []
    own = {id(entry) for group in getattr(given, "param_groups", ()) for entry in group["params"]}
    theirs = {id(entry) for one in held for group in one.param_groups for entry in group["params"]}
    return [*held] if not own or own == theirs else []


def inner_optimizers(given: object) -> Iterator[tuple[str, object]]:
    """(where, optimizer) of each optimizer that its own attributes hold: its step may call theirs."""
    for name, value in vars(given).items() if hasattr(given, "__dict__") else ():
        if name in ("state", "param_groups"):
            continue
        if _can_step(value):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", entry) for key, entry in value.items() if _can_step(entry))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{index}]", entry) for index, entry in enumerate(value) if _can_step(entry))


def why_no_clone(optimizer: object) -> str | None:
    """The reason why no clone may step: it would step the live weights. None if the clone cannot reach them."""
    for path, held in inner_optimizers(optimizer):
        return (
            f"{type(optimizer).__name__} steps through {type(held).__name__}: watch optimizer.{path} in its place"
        )
    for name, value in vars(optimizer).items():
        if isinstance(value, nn.Module):
            return f"{type(optimizer).__name__} holds the model ({name}): a clone would step the live weights"
    return None


def _can_step(value: object) -> bool:
    return isinstance(value, Optimizer) or (
        _are_groups(getattr(value, "param_groups", None)) and callable(getattr(value, "step", None))
    )


def _are_groups(groups: object) -> bool:
    return (
        isinstance(groups, list)
        and any(isinstance(group, dict) and group.get("params") for group in groups)
        and all(
            isinstance(group, dict)
            and isinstance(group.get("params"), list)
            and all(isinstance(entry, Tensor) for entry in group["params"])
            for group in groups
        )
    )


def _is_plain(value: object) -> bool:
    """Whether it holds nothing but numbers, tensors, names and containers of these: a copy shares nothing."""
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(entry) for entry in value)
    return isinstance(value, _PLAIN)
