"""Models whose gradients are known exactly, on any number of processes, and the ways to spread them."""

import functools
from typing import Any

import torch
from collage_optim import CollageAdamW
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

SHAPES = ((37, 11), (5,), (1, 3), (9, 7, 2), (2,))
"""Shapes that no number of ranks divides evenly; some leave ranks with nothing."""


class Part(nn.Module):
    """Two parameters whose gradients are exactly the numbers that `gradient` gives."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(dyadic(SHAPES[index], 100 + index))
        self.bias = nn.Parameter(dyadic((index + 1,), 200 + index))

    def forward(self, step):
        parameters = (self.weight, self.bias)
        return sum(
            (parameter * gradient(parameter.shape, self.index, place, step).to(parameter.dtype)).sum()
            for place, parameter in enumerate(parameters)
        )


class Exact(nn.Module):
    """One parameter whose gradient is exactly the numbers that `gradient` gives."""

    def __init__(self, index: int, start: torch.Tensor) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(start)

    def forward(self, step):
        return (self.weight * gradient(self.weight.shape, self.index, 0, step).to(self.weight.dtype)).sum()


class Row(nn.Module):
    """Parts in a row; the loss is linear in the weights, so that every rank's gradient is the same and exact."""

    def __init__(self, parts) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, step):
        return sum(part(step) for part in self.parts)


def dyadic(shape, seed):
    """Multiples of 1/64 between -1 and 1: exact in bfloat16, and so are their sums over a power of two of ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, shape, generator=generator).to(torch.float32) / 64


def gradient(shape, index, place, step):
    return dyadic(tuple(shape), 1000 * step + 10 * index + place)


adamw: Any = functools.partial(torch.optim.AdamW, lr=2**-9, weight_decay=2**-4, foreach=True)
ours: Any = functools.partial(CollageAdamW, lr=2**-9, weight_decay=2**-4, strategy="plus")


def injected(dtype):
    return Row(map(Part, range(len(SHAPES)))).to(dtype)


def replicated(dtype, model=None, make=adamw):
    model = DistributedDataParallel(model or injected(dtype))
    return model, make(model.parameters())


def zero(dtype, model=None, make=adamw):
    # Imported where it is used: the package warns about its own use of TorchScript.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(model or injected(dtype))
    return model, ZeroRedundancyOptimizer(model.parameters(), make.func, **make.keywords)


def fsdp1(dtype, model=None, make=adamw, **options):
    model = model or injected(dtype)
    wrap: Any = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), **options)
    for index in range(0, len(model.parts), 2):
        model.parts[index] = wrap(model.parts[index])
    model = wrap(model)
    return model, make(model.parameters())


def fsdp2(dtype, model=None, make=adamw, **options):
    model = model or injected(dtype)
    for part in model.parts[:3]:
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model, make(model.parameters())


def hybrid(dtype):
    """Two replicas of a model that is sharded over the other half of the ranks."""
    mesh = init_device_mesh("cpu", (2, distributed.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    return fsdp2(dtype, mesh=mesh)


SPREAD: dict[str, Any] = {
    "ddp": replicated,
    "zero": zero,
    "fsdp1 original": functools.partial(fsdp1, use_orig_params=True),
    "fsdp1 flat": functools.partial(fsdp1, use_orig_params=False),
    "fsdp1 unsharded": functools.partial(fsdp1, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp2": fsdp2,
    "fsdp2 hybrid": hybrid,
}
HALF = torch.bfloat16
MIXED: dict[str, Any] = {
    "fsdp1": functools.partial(fsdp1, use_orig_params=True, mixed_precision=MixedPrecision(param_dtype=HALF)),
    "fsdp2": functools.partial(fsdp2, mp_policy=MixedPrecisionPolicy(param_dtype=HALF)),
}
