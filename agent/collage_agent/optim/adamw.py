"""AdamW and Adam for low-precision parameters, with any storage strategy."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from collage_agent.optim.base import CollageOptimizer
from collage_agent.optim.options import checked_adam_options
from collage_agent.optim.rules import AdamRule

__all__ = ["CollageAdam", "CollageAdamW"]


class CollageAdamW(CollageOptimizer):
    """AdamW (decoupled weight decay) whose weights and moving averages are kept as `strategy` says.

    strategy (see `STRATEGIES`): `plain` one number each; `stochastic` the same, weight and second moment rounded
    at random; `kahan` a compensated weight; `light` the weight as an expansion of two; `light-stochastic` its low
    component and the second moment rounded at random; `plus` the second moment as an expansion too; `full` also
    the first; `fp32-states` averages in fp32; `master-weights` these and an fp32 weight. arithmetic: `fp32` loads
    the components, computes in fp32 and splits once; `storage` rounds every named operation to the parameters'
    dtype, as the published algorithms do (where the averages are fp32, the two are one). Both may differ by
    group. `plain` in `storage` arithmetic is, bit for bit, torch.optim.AdamW's for-loop. seed: of stochastic
    rounding, by group.

    Other options mean what they mean in torch.optim.AdamW. Raises ValueError, TypeError or RuntimeError in the
    same words as torch where torch has them.
    """

    rule = AdamRule(decoupled=True)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        strategy: str = "plus",
        arithmetic: str = "fp32",
        maximize: bool = False,
        seed: int = 0,
        compiled: str | None = None,
        **torch_options: Any,
    ) -> None:
        options = checked_adam_options(lr, betas, eps, weight_decay, torch_options)
        kept = {"strategy": strategy, "arithmetic": arithmetic, "seed": seed, "compiled": compiled}
        super().__init__(params, {**options, "amsgrad": amsgrad, "maximize": maximize, **kept})


class CollageAdam(CollageAdamW):
    """Adam: as `CollageAdamW`, but the decay is added to the gradient, and is 0 unless given."""

    rule = AdamRule(decoupled=False)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
