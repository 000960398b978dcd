"""Distributed tensors, as FSDP2 and tensor parallelism make them: a place in a mesh says which shard is here."""

from __future__ import annotations

from typing import Any

from collage_optim.tensor_step import local_part
from torch import Tensor

from collage_agent.training.shard import Shard

__all__ = ["mesh_shard", "placed_alike", "rows_of_a_shard"]


def mesh_shard(parameter: Tensor, outer_replica: int | None) -> Shard:
    """The shard of a distributed tensor; `outer_replica`: the replica of its whole mesh under an outer wrapper."""
    number, replica, replicas = _mesh_position(parameter)
    replica += replicas * (outer_replica or 0)
    replicated = replicas > 1 or outer_replica is not None
    return Shard(tuple(parameter.shape), local_part(parameter).numel(), number, replica, replicated=replicated)


def placed_alike(parameter: Tensor, gradient: Tensor | None) -> bool:
    """Whether a gradient is sharded like its parameter: not so until it is reduced."""
    placements = getattr(parameter, "placements", None)
    return placements is None or gradient is None or getattr(gradient, "placements", placements) == placements


def rows_of_a_shard(parameter: Any) -> int | None:
    """The length along the first dimension of each shard but the last ones; None if it is sharded in another
    way."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return None
    pairs = zip(parameter.device_mesh.shape, placements, strict=True)
    sharded = [(size, placement) for size, placement in pairs if not placement.is_replicate()]
    # A strided shard, of FSDP over tensor parallelism, holds rows that are no neighbours; importing it costs more.
    if len(sharded) != 1 or type(sharded[0][1]).__name__ != "Shard" or not sharded[0][1].is_shard(0):
        return None
    return -(-int(parameter.shape[0]) // int(sharded[0][0]))


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
