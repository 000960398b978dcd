"""Optimizers for low-precision training: an update rule times a way of keeping weights and averages."""

from collage_optim.arithmetic import Arithmetic, Scalar, State
from collage_optim.base import CollageOptimizer
from collage_optim.distributed import load_distributed
from collage_optim.optimizers import CollageAdam, CollageAdamW, CollageLion, CollageSGD, RuleOptimizer
from collage_optim.state_loading import CONVERTED_FROM, RESIDUALS_FROM
from collage_optim.step_totals import FoundTotals, StepTotals
from collage_optim.strategies import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    SCALE_SUFFIX,
    STRATEGIES,
    StateStorage,
    StorageStrategy,
    known_strategy,
)
from collage_optim.update_rules import Moment, UpdateRule

__all__ = [
    "Arithmetic",
    "CONVERTED_FROM",
    "CollageAdam",
    "CollageAdamW",
    "CollageLion",
    "CollageOptimizer",
    "CollageSGD",
    "FoundTotals",
    "LOW_COMPONENT_SUFFIX",
    "MASTER_PARAMETER",
    "Moment",
    "PARAMETER_LOW",
    "RESIDUALS_FROM",
    "RuleOptimizer",
    "SCALE_SUFFIX",
    "STRATEGIES",
    "Scalar",
    "State",
    "StateStorage",
    "StepTotals",
    "StorageStrategy",
    "UpdateRule",
    "known_strategy",
    "load_distributed",
]

__version__ = "0.1.0"
