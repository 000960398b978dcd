"""Which parameters are watched, their names, and how they follow changes of parameter groups.

Layer names are fixed: curves, alerts and resumed runs go by them. Names are those of `model.named_parameters()`,
with a prefix for what lies outside the model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Final

import torch
from collage_optim.names import plain_name
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from collage_agent.training.shard import Shard
from collage_agent.training.shards import Sharding
from collage_agent.watch_options import WatchOptions
from collage_monitor import wire

__all__ = [
    "WatchedParameter",
    "all_optimizers",
    "coverage_of",
    "regrouped",
    "watched_parameters",
    "with_unique_names",
]

_LONGEST_NAME: Final = 512
_NAMED: Final = 3


@dataclass(frozen=True)
class WatchedParameter:
    """One parameter tensor (this rank's shard of it) under its fully qualified name.

    stepped: whether the optimizer still has it; if not, `group` is its former group. A tensor on the meta device
    holds no numbers, and is not stepped until it does.
    """

    name: str
    parameter: Tensor
    group: int
    module_type: str
    shard: Shard
    stepped: bool = True

    def layer(self) -> wire.Layer:
        """How the layer is announced: the whole tensor's shape, the shard's elements."""
        return wire.Layer(
            name=self.name,
            shape=list(self.shard.shape),
            dtype=str(self.parameter.dtype).removeprefix("torch."),
            elements=self.shard.elements,
            module_type=self.module_type,
            replica=self.shard.replica,
        )


def watched_parameters(
    model: nn.Module, optimizer: Optimizer, options: WatchOptions, sharding: Sharding
) -> tuple[list[WatchedParameter], list[str]]:
    """The parameters that the optimizer steps and the options select, in the model's order; and those left out.

    A tied weight counts once, under its first name. Parameters outside the model are called `group0.1` (group,
    position). float64 parameters are not measurable: their own rounding is fp64's. Shards that are empty on this
    rank are among them, so that every rank announces the layer.
    """
    groups = {
        id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    watched: list[WatchedParameter] = []
    left_out: list[str] = []
    taken: set[str] = set()
    for name, parameter, module_type, shard in _named(model, optimizer, sharding):
        if id(parameter) not in groups or not options.selects(plain_name(name)) or 0 in shard.shape:
            continue
        if parameter.dtype == torch.float64 or not parameter.is_floating_point():
            left_out.append(f"{name} ({str(parameter.dtype).removeprefix('torch.')} is not measurable)")
            continue
        short = plain_name(name)[:_LONGEST_NAME]
        # A model may itself have a part called "module": then the full name tells the two apart.
        own_name = name[:_LONGEST_NAME] if short in taken else short
        taken.add(own_name)
        group = groups[id(parameter)]
        watched.append(WatchedParameter(own_name, parameter, group, module_type, shard, not parameter.is_meta))
    return watched, left_out


def regrouped(
    watched: Sequence[WatchedParameter], found: Sequence[WatchedParameter], members: Sequence[Sequence[int]]
) -> tuple[list[WatchedParameter], list[WatchedParameter]]:
    """The watched parameters in their places after groups have changed, and those found that are new.

    members: the identities of each group's parameters. A parameter that the optimizer no longer has is not stepped.
    A new parameter of the same name replaces it.
    """
    groups = {identity: index for index, group in enumerate(members) for identity in group}
    kept = []
    for entry in watched:
        stepped = id(entry.parameter) in groups and not entry.parameter.is_meta
        kept.append(replace(entry, group=groups.get(id(entry.parameter), entry.group), stepped=stepped))
    known = {id(entry.parameter) for entry in watched}
    vacant = {entry.name: place for place, entry in enumerate(kept) if not entry.stepped}
    new = []
    for entry in found:
        if id(entry.parameter) in known:
            continue
        place = vacant.pop(entry.name, None)
        if place is None:
            new.append(entry)
        else:
            kept[place] = entry
    return kept, new


def _named(model: nn.Module, optimizer: Optimizer, sharding: Sharding) -> Iterator[tuple[str, Tensor, str, Shard]]:
    for registered, parameter, module_type in _registered(model, optimizer):
        for name, shard, own_type in sharding.pieces(registered, parameter):
            yield name, parameter, own_type or module_type, shard


def _registered(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, str]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{own}" if prefix else own, parameter, _module_type(module)
    group: dict[str, Any]
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"group{index}.{position}", parameter, ""


def _module_type(module: nn.Module) -> str:
    """The class's name; `fully_shard` had put its own class, FSDPLinear for Linear, in its place."""
    kind = type(module)
    return (
        kind.__name__.removeprefix("FSDP")
        if any(k.__name__ == "FSDPModule" for k in kind.__mro__)
        else kind.__name__
    )


def coverage_of(
    model: nn.Module, optimizers: Sequence[Optimizer], is_watched: Callable[[Optimizer], bool]
) -> wire.Coverage | None:
    """Which of the model's weights that have gradients are not in these optimizers; None: all are.

    None, too, if the optimizers step tensors of their own for the model's. Walks all objects of the process, once,
    if there are such weights.
    """
    held = {id(own): own for optimizer in optimizers for group in optimizer.param_groups for own in group["params"]}
    kept = (own for module in model.modules() for own in module._parameters.values())
    others = [own for own in kept if own is not None and id(own) not in held and own.grad is not None]
    if not others:
        return None
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    others = list({id(own): own for own in others}.values())
    outside = [own for identity, own in held.items() if identity not in named]
    if any(own.grad is not None or "decoupled_grad" in vars(own) for own in outside):
        return None
    elsewhere: set[int] = set()
    for optimizer in all_optimizers():
        if not any(optimizer is own for own in optimizers):
            theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            others = [own for own in others if id(own) not in theirs or not is_watched(optimizer)]
            elsewhere |= theirs
    orphans = [own for own in others if id(own) not in elsewhere]
    if not others:
        return None
    return wire.Coverage(
        watched=sum(own.numel() for own in held.values()),
        elsewhere=sum(own.numel() for own in others if id(own) in elsewhere),
        orphaned=sum(own.numel() for own in orphans),
        orphans=[plain_name(named[id(own)])[:_LONGEST_NAME] for own in orphans[:_NAMED]],
        strangers=[str(tuple(own.shape)) for own in outside[:_NAMED]],
    )


def all_optimizers() -> Iterator[Optimizer]:
    """Every optimizer of this process. No line of Python runs for each of its objects: there may be millions."""
    kinds, waiting = set[type](), [Optimizer]
    while waiting:
        kinds.add(kind := waiting.pop())
        waiting += kind.__subclasses__()
    known = gc.get_objects()
    return compress(known, map(kinds.__contains__, map(type, known)))


def with_unique_names(
    watched: Sequence[WatchedParameter], number: int, names_used: dict[str, None]
) -> list[WatchedParameter]:
    """The parameters under unused names: those outside the model get the same names in every optimizer."""
    found = [
        replace(entry, name=f"optimizer{number}.{entry.name}") if entry.name in names_used else entry
        for entry in watched
    ]
    names_used.update((entry.name, None) for entry in found)
    return found
