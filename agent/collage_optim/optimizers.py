"""The optimizers: Adam, AdamW, Lion and SGD for low-precision parameters, and one for rules of other packages.

Constructors and defaults are the user's interface and follow torch.optim's (`tests/optim/test_interface.py`). The
rule, the strategy and the step are elsewhere.
"""

from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from collage_optim.base import CollageOptimizer
from collage_optim.hyperparameter_checks import (
    TorchForms,
    check_learning_rate,
    check_not_negative,
    check_torch_options,
    checked_adam_options,
    checked_betas,
)
from collage_optim.update_rules import AdamRule, Group, LionRule, SGDRule, UpdateRule, rule_named

__all__ = ["CollageAdam", "CollageAdamW", "CollageLion", "CollageSGD", "RuleOptimizer"]


class CollageAdamW(CollageOptimizer):
    """AdamW (decoupled weight decay) whose weights and moving averages are kept as `strategy` says.

    The default for bfloat16 is `split-master` (12 bytes a parameter): fp32 weights as bfloat16 and the bits below,
    with moments in 24 bits. `split-master-16bit` (10) and `split-master-8bit` (8) keep moments in 16 or 8 bits.
    The default for float16 is `master-weights`, for wider weights `plain`.

    Options:
        strategy: a name of `STRATEGIES`, by group. None: the default for the dtype; in `storage` arithmetic the
            published method, `plus` (`light` without a second moment).
            `plain`: one number each. `stochastic`: the same, rounded at random. `kahan`: a compensated weight.
            `light`: the weight as an expansion of two. `light-stochastic`: its low component and the moments are
            rounded at random. `plus`: the second moment is an expansion too. `full`: also the first.
            `fp32-states`: averages in fp32. `master-weights`: these, and an fp32 weight.
            `split-24bit-8bit`: 24-bit weights (7 bytes).
        arithmetic: `fp32` loads the components, computes in fp32 and splits once; `storage` rounds every named
            operation to the parameters' dtype, as the published algorithms do. Where the averages are fp32, the two
            are one. By group.
        seed: of stochastic rounding, by group.
        compiled: on CUDA devices a step is one kernel for all tensors, unless it is False; True compiles the step
            on a CPU, too. Every bit is the eager step's. By group.
        fused, capturable: True counts steps on their CUDA device, so that `torch.amp.GradScaler` waits for no
            verdict (the step undoes its scale), and a CUDA graph may hold a step. A learning rate may be a tensor
            there. By group.

    `plain` in `storage` arithmetic is, bit for bit, torch.optim.AdamW's for-loop. Other options mean what they mean
    there. Raises ValueError, TypeError or RuntimeError in the same words as torch where torch has them.
    """

    rule: ClassVar[AdamRule] = AdamRule(decoupled=True)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        strategy: str | None = None,
        arithmetic: str = "fp32",
        maximize: bool = False,
        seed: int | None = None,
        compiled: bool | None = None,
        on_external_write: str = "adopt",
        **torch_options: Unpack[TorchForms],
    ) -> None:
        options = checked_adam_options(lr, betas, eps, weight_decay, torch_options)
        own_options = {"strategy": strategy, "arithmetic": arithmetic, "seed": seed, "compiled": compiled}
        own_options["on_external_write"] = on_external_write
        own_options["decoupled_weight_decay"] = self.rule.decoupled
        super().__init__(params, {**options, "amsgrad": amsgrad, "maximize": maximize, **own_options})


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


class CollageLion(CollageOptimizer):
    """Lion with decoupled decay, kept as `strategy` says (see `CollageAdamW`).

    There is no second moment, so `plus` is refused in favour of `light`. All updates are as large as the learning
    rate, which makes plain storage lose them all at once when it falls below half an ulp of a weight.
    Raises ValueError or TypeError for options out of range, naming the value.
    """

    rule = LionRule()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        strategy: str | None = None,
        arithmetic: str = "fp32",
        maximize: bool = False,
        seed: int | None = None,
        compiled: bool | None = None,
        on_external_write: str = "adopt",
        **torch_options: Unpack[TorchForms],
    ) -> None:
        chosen = check_torch_options(torch_options)
        check_learning_rate(lr)
        check_not_negative("weight_decay", weight_decay)
        own_options = {"strategy": strategy, "arithmetic": arithmetic, "seed": seed, "compiled": compiled}
        own_options["on_external_write"] = on_external_write
        options = {"lr": lr, "betas": checked_betas(betas), "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, **own_options, **chosen})


class CollageSGD(CollageOptimizer):
    """SGD with momentum, Nesterov's momentum and decay, kept as `strategy` says (see `CollageAdamW`).

    There is no second moment, so `plus` is refused in favour of `light`; without momentum there is no average, so
    `full` and `fp32-states` are refused too. `plain` in `storage` arithmetic is, bit for bit, torch.optim.SGD's
    for-loop. Other options and errors are those of torch.optim.SGD.
    """

    rule = SGDRule()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        strategy: str | None = None,
        arithmetic: str = "fp32",
        maximize: bool = False,
        seed: int | None = None,
        compiled: bool | None = None,
        on_external_write: str = "adopt",
        **torch_options: Unpack[TorchForms],
    ) -> None:
        chosen = check_torch_options(torch_options)
        check_learning_rate(lr)
        check_not_negative("momentum", momentum)
        check_not_negative("weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        own_options = {"strategy": strategy, "arithmetic": arithmetic, "seed": seed, "compiled": compiled}
        own_options["on_external_write"] = on_external_write
        super().__init__(params, {"lr": lr, **options, "maximize": maximize, **own_options, **chosen})


class RuleOptimizer(CollageOptimizer):
    """An optimizer of a rule that an installed package adds, kept as `strategy` says (see `CollageAdamW`).

    rule: its name (entry-point group `collage_agent.rules`, an `UpdateRule` object). options: those of the rule,
    whose defaults it names. Raises TypeError for an option that the rule does not have, ValueError for one out of
    range or a rule that no package adds.
    """

    def __init__(
        self,
        params: ParamsT,
        rule: str,
        *,
        strategy: str | None = None,
        arithmetic: str = "fp32",
        maximize: bool = False,
        seed: int | None = None,
        compiled: bool | None = None,
        on_external_write: str = "adopt",
        **options: Any,
    ) -> None:
        known = rule_named(rule).options
        if not options.keys() <= known.keys():
            unknown = ", ".join(sorted(options.keys() - known.keys()))
            raise TypeError(f"rule {rule!r} has no option {unknown}; it has {', '.join(known)}")
        own_options = {"strategy": strategy, "arithmetic": arithmetic, "seed": seed, "compiled": compiled}
        own_options["on_external_write"] = on_external_write
        super().__init__(params, {**known, **options, "rule": rule, "maximize": maximize, **own_options})

    @classmethod
    def rule_of(cls, group: Group) -> UpdateRule:
        return rule_named(group["rule"])

    def _check_group(self, group: dict[str, Any]) -> None:
        self.rule_of(group).check(group)
        super()._check_group(group)
