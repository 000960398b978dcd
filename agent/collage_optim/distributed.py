"""Distributed checkpoints of any strategy, or of torch's optimizer, loaded into an optimizer of another one.

`torch.distributed.checkpoint.load` asks for the tensors that the new optimizer has. Where the checkpoint was
written under another strategy they are not in it. Here its own tensors are asked for, sharded like the weights.

`load_distributed` is public. Conversion is `state_loading.py`'s (`tests/parallel/test_checkpoints.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from collage_optim.base import CollageOptimizer
from collage_optim.names import plain_name
from collage_optim.strategies import MASTER_PARAMETER

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["load_distributed"]


def load_distributed(checkpoint: str | Path, model: nn.Module, optimizer: CollageOptimizer) -> None:
    """Load the weights of `model` and the states of `optimizer` from a folder of torch.distributed.checkpoint.

    Any number of ranks wrote it and any number reads it; all of them call this. The states are converted to the
    optimizer's strategy as `load_state_dict` does. Weights kept wider than the model's (a torch run in fp32) are
    rounded, and what that drops is given to the strategy. Parameters are found by name, or by their place where
    the checkpoint holds `optimizer.state_dict()` itself. Raises ValueError for what `load_state_dict` refuses, and
    for a weight or an optimizer that is not there.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._traverse import get_element, set_element
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    metadata = reader.read_metadata()
    names = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    entries = {plain_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = {**names, **{str(number): parameter for number, parameter in enumerate(ordered)}}
    request: dict[str, Any] = {}
    states: dict[Tensor, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    options: dict[tuple[Any, ...], tuple[str, str]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        path = (metadata.planner_data or {}).get(key, (key,))
        kind, owner, name = _part_of_optimizer(path)
        wanted: Any = None
        if kind == "param_groups":
            options[path] = owner, name
        elif kind == "state":
            if not isinstance(stored, TensorStorageMetadata) or owner not in owners:
                continue
            wanted = _empty(None if name == "step" else owners[owner], stored)
            states.setdefault(owners[owner], {})[name] = wanted
        elif (
            isinstance(stored, TensorStorageMetadata)
            and (own := entries.get(plain_name(str(path[-1])))) is not None
        ):
            wide = stored.properties.dtype.itemsize > own.dtype.itemsize
            wanted = weights[plain_name(str(path[-1]))] = _empty(own, stored) if wide else own
        else:
            continue
        set_element(request, path, wanted)
    missing = sorted(names.keys() - weights.keys())
    if missing or not states:
        raise ValueError(
            f"{checkpoint}: has no {'weight ' + missing[0] if missing else 'optimizer state of this model'}"
        )
    with warnings.catch_warnings():
        # torch warns a single process that it is alone.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(request, storage_reader=reader)
    with torch.no_grad():
        for name, loaded in weights.items():
            if loaded is entries[name]:
                continue
            entries[name].copy_(loaded)
            if name in names:
                states.setdefault(names[name], {}).setdefault(MASTER_PARAMETER, loaded.to(torch.float32))
    groups = _groups(optimizer, {where: get_element(request, path) for path, where in options.items()}, names)
    number_of = {parameter: number for number, parameter in enumerate(ordered)}
    state = {number_of[parameter]: own for parameter, own in states.items() if parameter in number_of}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _part_of_optimizer(path: tuple[Any, ...]) -> tuple[str, str, str]:
    """("state" or "param_groups", parameter or group, entry), from nested dictionaries or from flattened ones."""
    parts = [str(part) for part in path]
    if len(parts) >= 3 and parts[-3] in ("state", "param_groups"):
        return parts[-3], plain_name(parts[-2]), parts[-1]
    kind, _, rest = parts[-1].partition(".")
    owner, _, name = rest.rpartition(".")
    if kind in ("state", "param_groups") and owner:
        return kind, plain_name(owner), name
    return "", "", ""


def _empty(like: Tensor | None, stored: TensorStorageMetadata) -> Tensor:
    """A tensor to load into, of the checkpoint's dtype; sharded like the weight where it has its shape."""
    dtype = stored.properties.dtype
    if like is not None and stored.size == like.shape:
        return torch.empty_like(like.detach(), dtype=dtype, memory_format=torch.preserve_format)
    return torch.empty(stored.size, dtype=dtype)


def _groups(
    optimizer: CollageOptimizer, options: Mapping[tuple[str, str], Any], names: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """The optimizer's groups with the checkpoint's options, which are kept by group or by parameter."""
    groups, first = [], 0
    for number, group in enumerate(optimizer.param_groups):
        members = {id(parameter) for parameter in group["params"]}
        owners = {str(number), *(name for name, parameter in names.items() if id(parameter) in members)}
        loaded = {entry: value for (owner, entry), value in options.items() if owner in owners}
        loaded = loaded or {key: value for key, value in group.items() if key != "params"}
        loaded.pop("param_names", None)
        groups.append({**loaded, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return groups
