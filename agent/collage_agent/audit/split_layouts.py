"""Layouts that keep master weights and states apart from the weights: put together by parameter.

DeepSpeed's ZeRO keeps one flat tensor for each parameter group and kind of state, cut into as many pieces as there
are ranks. Megatron keeps states under names of their own among the weights. Read by their usual names, both look
like a training that loses its updates. What is not certain is left apart, and named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from collage_optim import MASTER_PARAMETER
from torch import Tensor

from collage_agent.audit.checkpoint_files import BESIDE_DISTRIBUTED, Checkpoint, CheckpointError, read_files

__all__ = ["read_checkpoint"]

_ZERO: Final = "DeepSpeed ZeRO"
_RANKS: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states")
_MASTERS: Final = {
    "single_partition_of_fp32_groups": "base_optimizer_state",
    "fp32_flat_groups": "optimizer_state_dict",
}
"""Under which name stages 1 and 2, and stage 3, keep flat master weights, and the optimizer beside them."""
_UNCUT: Final = frozenset({"fp32_groups", "fp32_groups_flat"})
_AMONG_WEIGHTS: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(\w+?)\.(.+)|distributed\..+)")
_MEGATRONS_MASTER: Final = "fp32_param"
_Members = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of a group's parameters, in the order in which they stand in the flat tensors."""


class _Unclear(Exception):
    """What keeps a layout from being put together."""


def read_checkpoint(path: Path, *, in_part: bool = False) -> Checkpoint:
    """Everything in a file or folder that can be read safely. Tensors stay on disk where the format allows it.

    in_part: also one that was put together from such a layout, or whose layout is not understood: its weights then.

    Raises:
        CheckpointError: nothing there, nothing readable, or a format that would have to run code.
    """
    checkpoint = read_files(path)
    _put_together(checkpoint)
    if checkpoint.layout and not in_part:
        raise CheckpointError(
            f"{path}: its optimizer is saved in {checkpoint.layout}'s layout, read for audits only; gather "
            "it into one state dict first, with that library's own tools"
        )
    if not checkpoint.weights and not checkpoint.optimizers and not checkpoint.layout:
        told = f" ({'; '.join(checkpoint.notes)})" if checkpoint.notes else ""
        raise CheckpointError(f"{path}: no model weights and no optimizer state were found{told}")
    return checkpoint


def _put_together(checkpoint: Checkpoint) -> None:
    """Make one optimizer of what the layout keeps apart; without certainty, leave the weights alone."""
    inside = [found.get("optimizer") for found in checkpoint.contents.values() if isinstance(found, Mapping)]
    if beside := [found for found in inside if isinstance(found, Mapping) and _UNCUT & found.keys()]:
        checkpoint.layout = "DeepSpeed"
        _attempt(checkpoint, _take_uncut, beside)
        return
    ranks = {name: found for name, found in checkpoint.contents.items() if "zero_stage" in _optimizer_of(found)}
    states = {name: own for name in checkpoint.weights if (own := _AMONG_WEIGHTS.fullmatch(name))}
    if not ranks and not states and not _RANKS.search(" ".join(checkpoint.files)):
        return
    checkpoint.layout = "Megatron" if states else _ZERO
    if states:
        _attempt(checkpoint, _take_named_states, states)
    else:
        _attempt(checkpoint, _take_partitions, ranks)


def _attempt(checkpoint: Checkpoint, take: Callable[[Checkpoint, Any], None], found: Any) -> None:
    checkpoint.optimizers = []
    try:
        take(checkpoint, found)
    except _Unclear as error:
        checkpoint.understood = False
        checkpoint.notes.append(str(error))


def _take_uncut(checkpoint: Checkpoint, found: Sequence[Mapping[str, Any]]) -> None:
    """DeepSpeed without ZeRO: master weights by group and parameter, beside the optimizer's state dict.

    Raises:
        _Unclear: flat ones, of which the file does not say where a parameter begins.
    """
    for own in found:
        masters, inner = own.get("fp32_groups"), own.get("optimizer_state_dict")
        if not isinstance(masters, list) or not isinstance(inner, Mapping):
            raise _Unclear("its master weights are flat, and nothing says where a parameter begins")
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        kept = dict(zip(numbers, chain(*masters), strict=True))
        states = {number: {**inner["state"].get(number, {}), MASTER_PARAMETER: own} for number, own in kept.items()}
        checkpoint.optimizers.append({**inner, "state": states})


def _optimizer_of(found: Any) -> Mapping[str, Any]:
    own = found.get("optimizer_state_dict") if isinstance(found, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def _take_partitions(checkpoint: Checkpoint, ranks: Mapping[str, Any]) -> None:
    """ZeRO: cut each flat tensor into its parameters.

    Raises:
        _Unclear: a rank is missing, or the tensors do not have the sizes that the parameters need.
    """
    models = [found for found in checkpoint.contents.values() if isinstance(found, Mapping) and "module" in found]
    checkpoint.weights = {
        name: own for found in models[:1] for name, own in found["module"].items() if isinstance(own, Tensor)
    }
    places = {name: tuple(map(int, own.groups())) for name in ranks if (own := _RANKS.search(name))}
    parts = [_optimizer_of(ranks[name]) for name in sorted(places, key=places.__getitem__)]
    shapes = models[0].get("param_shapes") if models else None
    counts = parts[0].get("partition_count") if parts else None
    whole = max(counts) if isinstance(counts, list) else counts
    if not shapes or len(parts) != len(ranks) or len(parts) != (whole or len(parts)) or not parts:
        raise _Unclear("parts of the optimizer are missing, or were not read")
    if any(model for _, model in places.values()):
        raise _Unclear("its tensors are cut by model parallelism, too")
    members = [[(str(name), tuple(shape)) for name, shape in group.items()] for group in shapes]
    masters = next((key for key in _MASTERS if key in parts[0]), "")
    inner: list[Any] = [part.get(_MASTERS.get(masters, "")) for part in parts]
    if not all(isinstance(own, Mapping) and isinstance(own.get("state"), Mapping) for own in inner):
        raise _Unclear("its optimizer is kept in a form that is not known")
    by_rank = masters == "fp32_flat_groups"
    groups = [[*chain(*members)]] if by_rank else members
    paddings = [] if by_rank else parts[0].get("param_alignment_paddings") or []
    states: dict[str, dict[str, Any]] = {name: {} for group in members for name, _ in group}
    for key, flat in _flat_tensors(parts, inner, masters, by_rank):
        if len(flat) != len(groups):
            raise _Unclear(f"{key} is kept for {len(flat)} of {len(groups)} parameter groups")
        for place, (group, pieces) in enumerate(zip(groups, flat, strict=True)):
            gaps = paddings[place] if paddings else [0] * len(group)
            cut = _cut_by_rank(group, pieces) if by_rank else _cut(group, gaps, torch.cat(pieces))
            for name, tensor in cut:
                states[name][key] = tensor
    _join(checkpoint, members, states, inner[0])


def _flat_tensors(
    parts: Sequence[Mapping[str, Any]], inner: Sequence[Any], masters: str, by_rank: bool
) -> Iterator[tuple[str, list[list[Tensor]]]]:
    """(state, by group the pieces of all ranks). Stage 3 makes sub-groups, one after the other: one group then."""
    numbers = sorted(inner[0]["state"])
    keys = [key for key, own in inner[0]["state"][numbers[0]].items() if isinstance(own, Tensor) and own.dim()]
    found = {MASTER_PARAMETER: [list(part[masters]) for part in parts]}
    found |= {key: [[own["state"][number][key] for number in numbers] for own in inner] for key in keys}
    for key, ranks in found.items():
        if by_rank:
            yield key, [[torch.cat([own.reshape(-1) for own in pieces]) for pieces in ranks]]
        else:
            yield key, [[own.reshape(-1) for own in pieces] for pieces in zip(*ranks, strict=True)]


def _cut(group: _Members, gaps: Sequence[int], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Stages 1 and 2: the parameters stand one after the other; at the end there may be padding."""
    start = 0
    for (name, shape), gap in zip(group, gaps, strict=True):
        if start + prod(shape) > len(flat):
            raise _Unclear(f"its flat tensors end inside {name}")
        yield name, flat[start : start + prod(shape)].reshape(shape)
        start += prod(shape) + gap


def _cut_by_rank(group: _Members, pieces: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Stage 3: each rank holds an equal share of every parameter, the last one padded."""
    start = 0
    for name, shape in group:
        share = -(-prod(shape) // len(pieces))
        if any(start + share > len(piece) for piece in pieces):
            raise _Unclear(f"its flat tensors end inside {name}")
        whole = torch.cat([piece[start : start + share] for piece in pieces])
        yield name, whole[: prod(shape)].reshape(shape)
        start += share


def _join(
    checkpoint: Checkpoint,
    members: Sequence[_Members],
    states: Mapping[str, dict[str, Any]],
    optimizer: Mapping[str, Any],
) -> None:
    """Give each weight its states; weights that are not in the files are what their masters round to."""
    given, numbers = optimizer["param_groups"], sorted(optimizer["state"])
    step = optimizer["state"][numbers[0]].get("step", given[0].get("step"))
    for name, state in states.items():
        master, weight = state[MASTER_PARAMETER], checkpoint.weights.get(name)
        if weight is None or not weight.numel():
            dtype = master.dtype if weight is None else weight.dtype
            weight = checkpoint.weights[name] = master.to(dtype)
        if weight.shape != master.shape:
            raise _Unclear(f"{name} and its master weight have other shapes")
        if master.dtype.itemsize <= weight.dtype.itemsize:
            del state[MASTER_PARAMETER]
        if step is not None:
            state["step"] = step
    options = [given[place] if len(given) == len(members) else given[0] for place in range(len(members))]
    groups = [
        {**own, "params": [name for name, _ in group]} for own, group in zip(options, members, strict=True) if group
    ]
    checkpoint.optimizers = [{"state": states, "param_groups": groups}]


def _take_named_states(checkpoint: Checkpoint, found: Mapping[str, re.Match[str]]) -> None:
    """Megatron: states of a parameter have its name after theirs.

    Raises:
        _Unclear: states in flat buffers, and states of which no weight is there, or of another shape.
    """
    tensors = checkpoint.weights
    checkpoint.weights = {name: own for name, own in tensors.items() if name not in found}
    states: dict[str, dict[str, Any]] = {}
    for name, own in found.items():
        key, of = own.groups()
        if of is None:
            raise _Unclear("its states are kept in flat buffers, whose order is not in the files")
        if of not in checkpoint.weights or checkpoint.weights[of].shape != tensors[name].shape:
            raise _Unclear(f"{name} has no weight of its shape")
        states.setdefault(of, {})[MASTER_PARAMETER if key == _MEGATRONS_MASTER else key] = tensors[name]
    for name, state in states.items():
        master = state.get(MASTER_PARAMETER)
        if master is not None and master.dtype.itemsize <= checkpoint.weights[name].dtype.itemsize:
            del state[MASTER_PARAMETER]
    options = _options_of_all(checkpoint.contents.get(BESIDE_DISTRIBUTED))
    for state in states.values() if "step" in options else ():
        state["step"] = options["step"]
    checkpoint.optimizers = [{"state": states, "param_groups": [{**options, "params": list(states)}]}]


def _options_of_all(beside: Any) -> dict[str, Any]:
    """The options that all parameter groups share, from what Megatron saves beside the tensors: which group steps
    which parameter is not there."""
    inner = beside.get("optimizer") if isinstance(beside, Mapping) else None
    inner = inner.get("optimizer", inner) if isinstance(inner, Mapping) else None
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups) or not groups:
        return {}
    plain = {key: own for key, own in groups[0].items() if key != "params" and not isinstance(own, Tensor)}
    return {key: own for key, own in plain.items() if all(group.get(key) == own for group in groups)}
