"""Data parallelism: replicas under DistributedDataParallel, and optimizers that share out their tensors (ZeRO)."""

from __future__ import annotations

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

__all__ = ["DataParallel", "stepping_optimizer"]


class DataParallel:
    """The replica of a parameter that this rank holds, under a wrapper in the model."""

    def __init__(self, model: nn.Module | None) -> None:
        """model: None where there is one process."""
        self._replicas: dict[int, int] = {}
        for module in () if model is None else model.modules():
            if isinstance(module, DistributedDataParallel):
                rank = distributed.get_rank(module.process_group)
                self._replicas.update((id(parameter), rank) for parameter in module.parameters())

    def replica_of(self, parameter: Tensor) -> int | None:
        """The rank in the wrapper's group; None for a parameter under no wrapper."""
        return self._replicas.get(id(parameter))


def stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps this rank's tensors: the inner one of a wrapper that copies back, otherwise
    itself."""
    if not any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer
