"""DeepSpeed: flat fp32 partitions that its optimizers step, and the 16-bit weights whose parts lie in each.

Stages 1 and 2 show all partitions at once, stage 3 one at a time.

`shards.py` and the hooks ask here; no other file knows DeepSpeed's objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, distributed, nn
from torch.optim.optimizer import Optimizer

from collage_agent.training.shard import Piece, Shard

__all__ = ["Partitions", "SubGroup", "is_stepped_by", "showing_only", "sub_groups"]

_Fragment = tuple[str, tuple[int, ...], int, int, str]
"""Name, whole shape, start in the flat partition, elements there, and module type of one tensor."""


@dataclass(frozen=True, eq=False)
class SubGroup:
    """One flat partition on this rank; `group` is its parameter group during its own step.

    cast_from: dtypes of the weights that are copies of it, none where it is their own memory's dtype.
    """

    group: int
    partition: Tensor
    fragments: list[_Fragment] = field(default_factory=list)
    cast_from: dict[str, None] = field(default_factory=dict)

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether the step that the optimizer is taking is this sub-group's."""
        return any(entry is self.partition for entry in optimizer.param_groups[self.group]["params"])


def sub_groups(model: nn.Module, optimizer: Optimizer) -> list[SubGroup]:
    """The partitions that DeepSpeed shows to this optimizer, in the order of their steps; none elsewhere.

    Read from DeepSpeed's links on each weight, without communication.

    Raises:
        ValueError: a weight is partitioned over a part of the ranks, or a partition is not in memory.
    """
    found: dict[int, SubGroup] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if not is_stepped_by(optimizer, parameter):
                continue
            owner: Any = parameter._z3_optimizer
            place = owner.grad_position.get(owner.get_param_id(parameter))
            if place is None:
                continue
            index = place[0]
            if index not in found:
                partition = owner.fp32_partitioned_groups_flat[index]
                found[index] = SubGroup(owner.sub_group_to_group_id[index], partition)
            _add(found[index], f"{prefix}.{own}" if prefix else own, parameter, place, type(module).__name__)
    return [found[index] for index in sorted(found)]


def is_stepped_by(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether DeepSpeed lets this optimizer step a partition in the place of the parameter."""
    owner: Any = getattr(parameter, "_z3_optimizer", None)
    return owner is not None and owner.optimizer is optimizer


@contextmanager
def showing_only(optimizer: Optimizer, sub_group: SubGroup | None) -> Iterator[None]:
    """While the context lasts, let the optimizer hold this sub-group alone, as during the sub-group's step."""
    if sub_group is None:
        yield
        return
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    for index, group in enumerate(groups):
        group["params"] = [sub_group.partition] if index == sub_group.group else []
    try:
        yield
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters


def _add(sub_group: SubGroup, name: str, parameter: Any, place: tuple[int, int, int], kind: str) -> None:
    _, start, size = place
    rank = _rank_among(name, parameter)
    if sub_group.partition.numel() < start + size:
        raise ValueError(f"{name} is not in memory: DeepSpeed's optimizer states on NVMe cannot be watched")
    # Every rank has as many elements; behind a tensor's last one there is padding, maybe nothing else.
    elements = max(0, min(size, parameter.ds_numel - rank * size))
    sub_group.fragments.append((name, tuple(parameter.ds_shape), start if elements else 0, elements, kind))
    if parameter.dtype != sub_group.partition.dtype:
        sub_group.cast_from[str(parameter.dtype).removeprefix("torch.")] = None


def _rank_among(name: str, parameter: Any) -> int:
    """This rank's place in the weight's process group; refuses a group without all ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    ranks, everyone = distributed.get_world_size(parameter.ds_process_group), distributed.get_world_size()
    if ranks != everyone:
        raise ValueError(
            f"{name} is partitioned over {ranks} of {everyone} ranks (MiCS, expert or model parallelism); "
            "DeepSpeed's stage 3 is watched over all ranks only"
        )
    return distributed.get_rank(parameter.ds_process_group)


class Partitions:
    """The flat partitions of an optimizer, and which weights' parts they hold. `cast_to`: the weights' dtypes."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, sub_group: SubGroup | None) -> None:
        """sub_group: the one partition that an optimizer of stage 3 shows at a time."""
        self._fragments: dict[int, list[_Fragment]] = {}
        self.cast_to: tuple[str, ...] = ()
        self._read(model, optimizer)
        if sub_group is not None:
            self._fragments[id(sub_group.partition)] = sub_group.fragments
            self.cast_to = tuple(sub_group.cast_from)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._fragments

    def pieces(self, partition: Tensor, rank: int) -> Iterator[Piece]:
        """The weights of which a partition of this rank holds parts."""
        for name, shape, start, elements, kind in self._fragments[id(partition)]:
            yield name, Shard(shape, elements, rank, 0, start), kind

    def _read(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Stages 1 and 2 tie to each 16-bit weight its part of a partition."""
        ties = []
        for prefix, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                if hasattr(parameter, "_hp_mapping"):
                    name = f"{prefix}.{own}" if prefix else own
                    ties.append((name, parameter, parameter._hp_mapping, type(module).__name__))
        if not ties:
            return
        self.cast_to = tuple({str(weight.dtype).removeprefix("torch."): None for _, weight, _, _ in ties})
        flats = {
            flat.untyped_storage().data_ptr(): flat for group in optimizer.param_groups for flat in group["params"]
        }
        for name, weight, tie, kind in ties:
            shape = tuple(weight.shape)
            if tie is None:
                # Another rank has all of it: the first partition here announces it as empty.
                self._fragments.setdefault(id(next(iter(flats.values()))), []).append((name, shape, 0, 0, kind))
                continue
            flat = flats.get(tie.hp_fragment.untyped_storage().data_ptr())
            if flat is not None:
                place = tie.hp_fragment_address
                self._fragments.setdefault(id(flat), []).append((name, shape, place.start, place.numel, kind))
