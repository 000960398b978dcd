"""How parameters are spread over ranks: which part of a tensor lives here, of which shape, and which replica it is.

Read from the wrappers themselves, on each rank for itself: nothing here communicates. Each sharding system has a
file of its own: `ddp`, `dtensors` (FSDP2, tensor parallelism), `fsdp` (the first), `deepspeed`. For
Megatron, `stand_ins` finds the weight behind an optimizer's tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from collage_optim.tensor_step import local_part
from torch import Tensor, distributed, nn
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from collage_agent.training.ddp import DataParallel, stepping_optimizer
from collage_agent.training.deepspeed import Partitions, SubGroup
from collage_agent.training.dtensors import mesh_shard
from collage_agent.training.fsdp import FlatParameters
from collage_agent.training.shard import Piece, Shard

__all__ = ["Sharding", "stand_ins"]

_PLAIN: Final = (Tensor, Parameter)


def stand_ins(model: nn.Module, optimizer: Optimizer) -> dict[int, tuple[str, Tensor, str]]:
    """By identity of the tensor that an optimizer steps instead of a weight: the weight's name, the weight, its
    module's type.

    Megatron's optimizers step fp32 copies, which a weight has as `main_param`, or flat pieces of the weight's own
    memory. Reads addresses only.
    """
    named = {
        id(weight): (f"{prefix}.{own}" if prefix else own, weight, type(module).__name__)
        for prefix, module in model.named_modules()
        for own, weight in module.named_parameters(recurse=False)
    }
    unknown = [tensor for group in optimizer.param_groups for tensor in group["params"] if id(tensor) not in named]
    if not unknown:
        return {}
    copies = {
        id(main): entry for entry in named.values() if (main := getattr(entry[1], "main_param", None)) is not None
    }
    places = sorted(
        ((entry[1].data_ptr(), entry) for entry in named.values() if type(entry[1]) in _PLAIN and entry[1].numel()),
        key=lambda place: place[0],
    )
    starts = [start for start, _ in places]
    found = {}
    for tensor in unknown:
        if id(tensor) in copies:
            found[id(tensor)] = copies[id(tensor)]
        elif type(tensor) in _PLAIN and tensor.numel() and (index := bisect_right(starts, tensor.data_ptr())):
            start, entry = places[index - 1]
            if tensor.data_ptr() + tensor.nbytes <= start + entry[1].nbytes and tensor.device == entry[1].device:
                found[id(tensor)] = entry
    return found


class Sharding:
    """The shards of a model's parameters on this rank, looked up once at attach. Synchronises nothing.

    `mixed_precision` names the dtypes that the shards are cast to for the forward pass. `sub_group`: the part of an
    optimizer that DeepSpeed shows at a time.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, sub_group: SubGroup | None = None) -> None:
        self._spread = distributed.is_available() and distributed.is_initialized()
        self._shared_out = stepping_optimizer(optimizer) is not optimizer
        self._data_parallel = DataParallel(model if self._spread else None)
        self._flat = FlatParameters(model if self._spread else None)
        self._partitions = Partitions(model, optimizer, sub_group)
        self._stand_ins = stand_ins(model, optimizer)
        self.mixed_precision = self._partitions.cast_to or self._flat.cast_to

    def pieces(self, name: str, parameter: Tensor) -> Iterator[Piece]:
        """(name, shard, module type or None) of each tensor that lives in a registered parameter: mostly one.

        `name` is its registered name; a flat parameter of FSDP holds pieces of several tensors under their own.
        """
        if parameter in self._partitions:
            yield from self._partitions.pieces(parameter, distributed.get_rank() if self._spread else 0)
        elif parameter in self._flat:
            yield from self._flat.pieces(name, parameter)
        elif id(parameter) in self._stand_ins:
            own_name, weight, kind = self._stand_ins[id(parameter)]
            yield own_name, self._shard_standing_for(weight, parameter), kind
        else:
            yield name, self._shard(parameter), None

    def _shard_standing_for(self, weight: Tensor, parameter: Tensor) -> Shard:
        if parameter.numel() == weight.numel() and not getattr(weight, "main_param_sharded", False):
            return self._shard(weight)
        rank = distributed.get_rank() if self._spread else 0
        return Shard(tuple(weight.shape), local_part(parameter).numel(), number=rank)

    def _shard(self, parameter: Tensor) -> Shard:
        replica = self._data_parallel.replica_of(parameter)
        if not self._spread:
            return Shard(tuple(parameter.shape), local_part(parameter).numel())
        if hasattr(parameter, "placements"):
            return mesh_shard(parameter, replica)
        original = self._flat.shard_of(parameter)
        if original is not None:
            return original
        shape, elements = tuple(parameter.shape), parameter.numel()
        if self._shared_out:
            # The ranks' optimizers share out the tensors among themselves: each is stepped, and reported, once.
            return Shard(shape, elements)
        if replica is None:
            return Shard(shape, elements, replica=distributed.get_rank())
        return Shard(shape, elements, replica=replica, replicated=True)
