"""How parameters are spread over ranks: which part of a tensor lives here, of which shape, and which replica it is.

Read from the wrappers themselves, on each rank for itself: nothing here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from collage_optim.stepping import local_part
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from collage_agent.training.subgroups import Fragment, SubGroup

__all__ = ["Shard", "Sharding", "placed_alike", "stepping_optimizer"]

_FLAT_PARAMETER: Final = "_flat_param"


@dataclass(frozen=True)
class Shard:
    """What this rank holds of one tensor.

    shape: the whole tensor's. elements: of the shard, 0 for an empty one. number: which shard it is, 0 for a whole
    tensor. replica: which of the ranks that hold the same elements this one is. start: where in the flattened
    registered parameter the shard begins, None: it is all of it. replicated: a wrapper says that other ranks hold
    the same elements, so that their bits must agree.
    """

    shape: tuple[int, ...]
    elements: int
    number: int = 0
    replica: int = 0
    start: int | None = None
    replicated: bool = False


class Sharding:
    """The shards of a model's parameters on this rank, looked up once at attach. Synchronises nothing.

    `mixed_precision` names the dtypes that the shards are cast to for the forward pass. `sub_group` is what
    there is of an optimizer that DeepSpeed shows one partition at a time.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, sub_group: SubGroup | None = None) -> None:
        self._spread = distributed.is_available() and distributed.is_initialized()
        self._replicas: dict[int, int] = {}
        self._originals: dict[int, tuple[tuple[int, ...], nn.Module]] = {}
        self._flat: dict[int, nn.Module] = {}
        self._fragments: dict[int, list[Fragment]] = {}
        self._partitioned = stepping_optimizer(optimizer) is not optimizer
        self.mixed_precision: tuple[str, ...] = ()
        if self._spread:
            self._read_wrappers(model)
        self._read_partitions(model, optimizer)
        if sub_group is not None:
            self._fragments[id(sub_group.partition)] = sub_group.fragments
            self.mixed_precision = tuple(sub_group.cast_from)

    def pieces(self, name: str, parameter: Tensor) -> Iterator[tuple[str, Shard, str | None]]:
        """(name, shard, module type or None) of each tensor that lives in a registered parameter: mostly one.

        `name` is its registered name; a flat parameter of FSDP holds pieces of several tensors under their own.
        """
        if id(parameter) in self._fragments:
            number = distributed.get_rank() if self._spread else 0
            for own, shape, start, elements, kind in self._fragments[id(parameter)]:
                yield own, Shard(shape, elements, number, 0, start), kind
        elif id(parameter) in self._flat:
            yield from self._pieces_of_flat(name.removesuffix(_FLAT_PARAMETER), parameter)
        else:
            yield name, self._shard(parameter), None

    def _shard(self, parameter: Tensor) -> Shard:
        shape, elements = tuple(parameter.shape), local_part(parameter).numel()
        if not self._spread:
            return Shard(shape, elements)
        if hasattr(parameter, "placements"):
            number, replica, replicas = _mesh_position(parameter)
            replica += replicas * self._replicas.get(id(parameter), 0)
            replicated = replicas > 1 or id(parameter) in self._replicas
            return Shard(shape, elements, number, replica, replicated=replicated)
        original = self._originals.get(id(parameter))
        if original is not None:
            shape, wrapper = original
            number, replica = _fsdp_position(wrapper)
            return Shard(shape, elements, number, replica, replicated=_fsdp_replicated(wrapper))
        if self._partitioned:
            # The ranks' optimizers share out the tensors among themselves: each is stepped, and reported, once.
            return Shard(shape, elements)
        replica = self._replicas.get(id(parameter), distributed.get_rank())
        return Shard(shape, elements, replica=replica, replicated=id(parameter) in self._replicas)

    def _pieces_of_flat(self, prefix: str, parameter: Any) -> Iterator[tuple[str, Shard, str | None]]:
        wrapper = self._flat[id(parameter)]
        (number, replica), replicated = _fsdp_position(wrapper), _fsdp_replicated(wrapper)
        described = zip(
            parameter._fqns,
            parameter._shapes,
            parameter._shard_param_infos,
            parameter._param_infos,
            strict=True,
        )
        for name, shape, place, info in described:
            elements = place.numel_in_shard if place.in_shard else 0
            start = place.offset_in_shard if place.in_shard else 0
            shard = Shard(tuple(shape), elements, number, replica, start, replicated)
            yield prefix + name, shard, type(info.module).__name__

    def _read_wrappers(self, model: nn.Module) -> None:
        # Who uses it has imported it; importing it for the others would cost them its warnings and its time.
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        dtypes: dict[str, None] = {}
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                rank = distributed.get_rank(module.process_group)
                self._replicas.update((id(parameter), rank) for parameter in module.parameters())
            if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
                self._read_flat_parameter(module)
                policy: Any = getattr(module, "mixed_precision", None)
            else:
                state: Any = getattr(module, "_get_fsdp_state", None)
                policy = None if state is None else getattr(state(), "_mp_policy", None)
            if getattr(policy, "param_dtype", None) is not None:
                dtypes[str(policy.param_dtype).removeprefix("torch.")] = None
        self.mixed_precision = tuple(dtypes)

    def _read_partitions(self, model: nn.Module, optimizer: Optimizer) -> None:
        """DeepSpeed's stages 1 and 2 step a flat fp32 partition, and tie to each 16-bit weight its part of that."""
        ties = []
        for prefix, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                if hasattr(parameter, "_hp_mapping"):
                    name = f"{prefix}.{own}" if prefix else own
                    ties.append((name, parameter, parameter._hp_mapping, type(module).__name__))
        if not ties:
            return
        self.mixed_precision = tuple({str(weight.dtype).removeprefix("torch."): None for _, weight, _, _ in ties})
        flats = {
            flat.untyped_storage().data_ptr(): flat for group in optimizer.param_groups for flat in group["params"]
        }
        for name, weight, tie, kind in ties:
            shape = tuple(weight.shape)
            if tie is None:
                # Another rank has it all: announced here with nothing, by whichever partition comes first.
                self._fragments.setdefault(id(next(iter(flats.values()))), []).append((name, shape, 0, 0, kind))
                continue
            flat = flats.get(tie.hp_fragment.untyped_storage().data_ptr())
            if flat is not None:
                place = tie.hp_fragment_address
                self._fragments.setdefault(id(flat), []).append((name, shape, place.start, place.numel, kind))

    def _read_flat_parameter(self, wrapper: Any) -> None:
        handle = wrapper._handle
        if handle is None:
            return
        flat = handle.flat_param
        self._flat[id(flat)] = wrapper
        # With use_orig_params the registered parameters are views of the shard, one-dimensional and maybe empty.
        for parameter, shape in zip(flat._params or (), flat._shapes, strict=False):
            self._originals[id(parameter)] = (tuple(shape), wrapper)


def stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps this rank's tensors: the inner one of a wrapper that copies back, else itself."""
    if not any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def placed_alike(parameter: Tensor, gradient: Tensor | None) -> bool:
    """Whether the local part of a gradient is that of its parameter: not so while it is still to be reduced."""
    placements = getattr(parameter, "placements", None)
    return placements is None or gradient is None or getattr(gradient, "placements", placements) == placements


def _mesh_position(parameter: Any) -> tuple[int, int, int]:
    """(shard number, replica number, replicas) of a distributed tensor, from this rank's place in its mesh."""
    number, replica, replicas = 0, 0, 1
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate() or [0] * len(parameter.placements)
    for place, size, placement in zip(coordinate, mesh.shape, parameter.placements, strict=True):
        if placement.is_replicate():
            replica, replicas = replica * size + place, replicas * size
        else:
            number = number * size + place
    return number, replica, replicas


def _fsdp_position(wrapper: Any) -> tuple[int, int]:
    """(shard number, replica number) under an FSDP wrapper; in a hybrid one replicas stand on different nodes."""
    rank = distributed.get_rank(wrapper.process_group)
    if wrapper.sharding_strategy.name == "NO_SHARD":
        return 0, rank
    between_nodes = getattr(wrapper, "_inter_node_pg", None)
    return rank, 0 if between_nodes is None else distributed.get_rank(between_nodes)


def _fsdp_replicated(wrapper: Any) -> bool:
    return wrapper.sharding_strategy.name == "NO_SHARD" or getattr(wrapper, "_inter_node_pg", None) is not None
