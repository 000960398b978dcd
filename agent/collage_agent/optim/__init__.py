"""Optimizers for low-precision training: an update rule times a way of keeping weights and averages."""

from collage_agent.optim.adamw import CollageAdam, CollageAdamW
from collage_agent.optim.base import CollageOptimizer
from collage_agent.optim.lion import CollageLion
from collage_agent.optim.sgd import CollageSGD
from collage_agent.optim.strategies import LOW_COMPONENT_SUFFIX, MASTER_PARAMETER, PARAMETER_LOW, STRATEGIES

__all__ = [
    "LOW_COMPONENT_SUFFIX",
    "MASTER_PARAMETER",
    "PARAMETER_LOW",
    "STRATEGIES",
    "CollageAdam",
    "CollageAdamW",
    "CollageLion",
    "CollageOptimizer",
    "CollageSGD",
]
