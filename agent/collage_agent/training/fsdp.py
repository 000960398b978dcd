"""FSDP1's flat parameters, which hold pieces of several tensors, and the dtypes that FSDP1 or 2 casts shards to.

For FSDP2's distributed tensors see `dtensors.py`. `tests/test_borrowed_names.py` checks that torch still has the
private names that are read here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from collage_optim.tensor_step import local_part
from torch import Tensor, distributed, nn

from collage_agent.training.shard import Piece, Shard

__all__ = ["FlatParameters"]

_FLAT_PARAMETER: Final = "_flat_param"


class FlatParameters:
    """The flat parameters of a model. `cast_to`: the forward pass's dtypes, in either FSDP."""

    def __init__(self, model: nn.Module | None) -> None:
        """model: None if there is a single process."""
        self._wrappers: dict[int, Any] = {}
        self._originals: dict[int, tuple[tuple[int, ...], Any]] = {}
        # A training that uses FSDP has imported it; for others the import would cost time and print warnings.
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        dtypes: dict[str, None] = {}
        for module in () if model is None else model.modules():
            if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
                self._read(module)
                policy: Any = getattr(module, "mixed_precision", None)
            else:
                state: Any = getattr(module, "_get_fsdp_state", None)
                policy = None if state is None else getattr(state(), "_mp_policy", None)
            if getattr(policy, "param_dtype", None) is not None:
                dtypes[str(policy.param_dtype).removeprefix("torch.")] = None
        self.cast_to = tuple(dtypes)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._wrappers

    def pieces(self, name: str, parameter: Any) -> Iterator[Piece]:
        """Yield the pieces of tensors in this flat parameter, which is registered as `name`."""
        prefix, wrapper = name.removesuffix(_FLAT_PARAMETER), self._wrappers[id(parameter)]
        (number, replica), replicated = _position(wrapper), _is_replicated(wrapper)
        described = zip(
            parameter._fqns,
            parameter._shapes,
            parameter._shard_param_infos,
            parameter._param_infos,
            strict=True,
        )
        for own, shape, place, info in described:
            elements, start = (place.numel_in_shard, place.offset_in_shard) if place.in_shard else (0, 0)
            shard = Shard(tuple(shape), elements, number, replica, start=start, replicated=replicated)
            yield prefix + own, shard, type(info.module).__name__

    def shard_of(self, parameter: Tensor) -> Shard | None:
        """The shard that a parameter is a view of, under use_orig_params; None for any other parameter."""
        if id(parameter) not in self._originals:
            return None
        shape, wrapper = self._originals[id(parameter)]
        number, replica = _position(wrapper)
        return Shard(shape, local_part(parameter).numel(), number, replica, replicated=_is_replicated(wrapper))

    def _read(self, wrapper: Any) -> None:
        handle = wrapper._handle
        if handle is None:
            return
        flat = handle.flat_param
        self._wrappers[id(flat)] = wrapper
        # Under use_orig_params the registered parameters are flat views of the shard, which may be empty.
        for parameter, shape in zip(flat._params or (), flat._shapes, strict=False):
            self._originals[id(parameter)] = (tuple(shape), wrapper)


def _position(wrapper: Any) -> tuple[int, int]:
    """(shard number, replica number) of this rank; hybrid sharding keeps replicas on different nodes."""
    rank = distributed.get_rank(wrapper.process_group)
    if wrapper.sharding_strategy.name == "NO_SHARD":
        return 0, rank
    between_nodes = getattr(wrapper, "_inter_node_pg", None)
    return rank, 0 if between_nodes is None else distributed.get_rank(between_nodes)


def _is_replicated(wrapper: Any) -> bool:
    return wrapper.sharding_strategy.name == "NO_SHARD" or getattr(wrapper, "_inter_node_pg", None) is not None
