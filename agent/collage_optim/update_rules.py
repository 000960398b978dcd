"""Update rules: the displacement of one step, in operations that an arithmetic carries out.

A rule is written once. It runs unchanged in fp32 on chunks, in the storage format operation by operation, in fp64
as the exact rule that the agent's intended update comes from, and inside a compiled step: the arithmetic decides.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from collage_optim.arithmetic import Arithmetic, Scalar, State
from collage_optim.extensions import extensions
from collage_optim.from_host import from_host
from collage_optim.hyperparameter_checks import check_learning_rate, check_not_negative, checked_betas

__all__ = [
    "AdamRule",
    "CountedStep",
    "CoupledDisplacement",
    "Group",
    "LionRule",
    "Moment",
    "SGDRule",
    "UpdateRule",
    "on_device",
    "rule_named",
]

Group = Mapping[str, Any]
_MOST_TERMS = 1 << 20
_LOGARITHM_OF_NOTHING = 40.0


@dataclass(frozen=True)
class Moment:
    """A moving average that a rule keeps: its state key, whether it averages squares, and its decay factor."""

    name: str
    second: bool = False
    decay: float | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class CountedStep:
    """Numbers of a step that devices count: in place of an int, what a rule computes of it are tensors there.

    numbers: of each tensor, fp64 [tensors]. A device rounds powers otherwise than the host, which makes tables.
    """

    numbers: Tensor

    def of(self, function: Callable[[float, int], float], beta: float) -> Tensor:
        """function(beta, number), fp64 [tensors], for a function that stays the same once beta^number is small."""
        table = _table(function, beta, self.numbers.device)
        return table[(self.numbers - 1).clamp(0, len(table) - 1).to(torch.int64)]

    def __rpow__(self, beta: float) -> Tensor:
        return self.of(pow, beta)


@cache  # Graphs read them.
def _table(function: Callable[[float, int], float], beta: float, device: torch.device) -> Tensor:
    """The function's values for steps 1, 2, … until 1 − beta^step is 1 in fp64."""
    steps = 1 if beta <= 0 else math.ceil(_LOGARITHM_OF_NOTHING / -math.log(beta)) + 1
    if steps > _MOST_TERMS:
        raise ValueError(f"a decay of {beta} is too near 1 for fused=True; leave fused out")
    return from_host(
        torch.tensor([function(beta, step) for step in range(1, steps + 1)], dtype=torch.float64), device
    )


def _rate(group: Group) -> Any:
    """The learning rate: a number, or a tensor of no dimension that nothing waits for."""
    rate = group["lr"]
    return rate.to(torch.float64).reshape(()) if isinstance(rate, Tensor) and group.get("fused") else float(rate)


def _quotient(one: Any, other: Any) -> Any:
    """one / other as Python rounds it: with a number, torch may multiply by an inverse."""
    if isinstance(one, Tensor) == isinstance(other, Tensor):
        return one / other
    device = one.device if isinstance(one, Tensor) else other.device
    return torch.div(on_device(one, device), on_device(other, device))


def on_device(number: Scalar, device: torch.device) -> Tensor:
    """The number in fp64 there; made there, as nothing may wait for a copy from the host."""
    if isinstance(number, Tensor):
        return number.to(device, torch.float64, non_blocking=True)
    return torch.full((), number, dtype=torch.float64, device=device)


class CoupledDisplacement(NamedTuple):
    """A step's displacement, and how far its first moment m will still move a weight (`collage_optim.coupling`).

    ahead: c, without further gradients the weight would move by −c m; reach: about how far a gradient moves it.
    Each of the three is a tensor, fresh, or of no dimension.
    """

    displacement: Tensor
    ahead: Tensor
    reach: Tensor


class UpdateRule(ABC):
    """The base of every rule. A rule of another package is one too, added through entry points (`rule_named`).

    options: the options of a parameter group and their defaults, `lr` among them, for `RuleOptimizer`. Where
    `decoupled_weight_decay` is one and true, the agent counts lr * weight_decay as decay apart from the gradient.
    """

    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def check(self, group: Group) -> None:
        """Raise ValueError for an option out of range; here those that most rules have."""
        check_learning_rate(group["lr"])
        if "betas" in group:
            checked_betas(group["betas"])
        for name in ("eps", "weight_decay"):
            check_not_negative(name, group.get(name, 0.0))

    def check_counted(self, group: Group) -> None:
        """Raise ValueError if the numbers of a step cannot be computed of a `CountedStep`."""
        step: Any = CountedStep(torch.ones(2, dtype=torch.float64))
        try:
            self.scalars(group, step)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"fused=True is not for {type(self).__name__} ({error}); leave fused out") from error

    @abstractmethod
    def moments(self, group: Group) -> tuple[Moment, ...]:
        """The moving averages that the rule keeps under these options."""

    @abstractmethod
    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        """The numbers that enter step `step` (1 for the first), computed in double precision.

        A term that is switched off has no entry, so that its operations are left out, not multiplied by zero.
        """

    @abstractmethod
    def displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> Tensor:
        """The step's displacement, weight decay included; a fresh tensor.

        parameter, gradient: one shape, left unchanged. state: the moving averages by name, advanced in place.
        Elements must not mix: the agent calls this on samples, and large tensors are stepped in chunks.
        """

    def scalars_ahead(self, group: Group, step: int) -> dict[str, Scalar]:
        """What `coupled_displacement` needs beside the numbers of the step; empty where nothing is coupled.

        So it is without a moment or a rate, and where a moment moves the weight by no fixed multiple of it, as
        under Lion's sign.
        """
        return {}

    def coupled_displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> CoupledDisplacement:
        """As `displacement`, for coupled rounding. Raises NotImplementedError where `scalars_ahead` has none."""
        raise NotImplementedError

    def torch_step(self, group: Group, parameter: Tensor, gradient: Tensor, state: State) -> bool:
        """Let torch's own for-loop optimizer make the step, `step` counter included; False where torch has none."""
        return False


_ADDED: dict[str, UpdateRule] = {}
"""Those that were asked for: no `functools.cache`, which a user's torch.compile cannot trace."""


def rule_named(name: str) -> UpdateRule:
    """The rule that an installed package adds under this name (entry-point group `collage_agent.rules`).

    Raises:
        ValueError: no package adds it, or what it adds is no `UpdateRule`.
    """
    if name in _ADDED:
        return _ADDED[name]
    added = extensions("collage_agent.rules")
    rule = added.get(name)
    if rule is None:
        known = f"use one of {', '.join(added)}" if added else "no installed package adds a rule"
        raise ValueError(f"Invalid rule: {name!r}; {known}")
    if not isinstance(rule, UpdateRule):
        raise ValueError(f"collage_agent.rules {name!r} must be an UpdateRule object, not {type(rule).__name__}")
    _ADDED[name] = rule
    return rule


def _decays(group: Group, *, decoupled: bool) -> dict[str, Scalar]:
    """The decay factors of the averages, with their complements, and of the weight, decoupled or not."""
    numbers: dict[str, Scalar] = {}
    for number, beta in enumerate(map(float, group.get("betas", ())), start=1):
        numbers.update({f"beta{number}": beta, f"one_minus_beta{number}": 1 - beta})
    weight_decay = float(group["weight_decay"])
    if weight_decay != 0:
        name, factor = ("decay", _rate(group)) if decoupled else ("coupled_decay", 1.0)
        numbers[name] = factor * weight_decay
    return numbers


def _ahead_of(beta: float, step: int) -> float:
    """Σ_k β^k / (1 − β^(t + k)) over k ≥ 1, by Σ_j β^(j t) q_j / (1 − q_j) with q_j = β^(j + 1), j ≥ 0."""
    terms = min(_MOST_TERMS, math.ceil(math.log(1e-17) / (math.log(beta) * (step + 1))))
    numbers = numpy.arange(terms, dtype=numpy.float64)
    powers = beta ** (numbers + 1)
    return float((beta ** (numbers * step) * powers / (1 - powers)).sum())


def _with_coupled_decay(
    arithmetic: Arithmetic, parameter: Tensor, gradient: Tensor, scalars: Mapping[str, Scalar]
) -> Tensor:
    if "coupled_decay" not in scalars:
        return gradient
    return arithmetic.product(parameter, scalars["coupled_decay"]).add_(gradient)


def _with_decay(
    arithmetic: Arithmetic, parameter: Tensor, displacement: Tensor, scalars: Mapping[str, Scalar]
) -> Tensor:
    if "decay" in scalars:
        displacement.sub_(arithmetic.product(parameter, scalars["decay"]))
    return displacement


@dataclass(frozen=True)
class AdamRule(UpdateRule):
    """Adam, with decay either decoupled from the gradient (AdamW) or added to it.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + ((1 - beta2) g) g; displacement = -lr / (1 - beta1^t) * m /
    (sqrt(v) / sqrt(1 - beta2^t) + eps) - (lr * weight_decay) * parameter. The decay is part of the displacement:
    as a factor of its own, 1 - lr * weight_decay would be rounded away. References: Kingma and Ba 2015;
    Loshchilov and Hutter 2019; Reddi, Kale and Kumar 2018 (amsgrad).
    """

    decoupled: bool

    def moments(self, group: Group) -> tuple[Moment, ...]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        averages = (Moment("exp_avg", decay=beta1), Moment("exp_avg_sq", second=True, decay=beta2))
        return (*averages, Moment("max_exp_avg_sq", second=True)) if group["amsgrad"] else averages

    def scalars(self, group: Group, step: Any) -> dict[str, Scalar]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        second = 1 - beta2**step
        return {
            **_decays(group, decoupled=self.decoupled),
            "root_correction": _quotient(1, second.sqrt() if isinstance(second, Tensor) else math.sqrt(second)),
            "eps": float(group["eps"]),
            "negative_step_size": _quotient(-_rate(group), 1 - beta1**step),
        }

    def displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> Tensor:
        first, denominator = self._averages(arithmetic, parameter, gradient, state, scalars)
        displacement = arithmetic.quotient(first, denominator).mul_(scalars["negative_step_size"])
        return _with_decay(arithmetic, parameter, displacement, scalars)

    def _averages(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> tuple[Tensor, Tensor]:
        """The first moment, and √v̂ + ε as a fresh tensor."""
        gradient = _with_coupled_decay(arithmetic, parameter, gradient, scalars)
        increment = arithmetic.product(gradient, scalars["one_minus_beta1"])
        first = arithmetic.average(state, "exp_avg", scalars["beta1"], increment)
        increment = arithmetic.product(gradient, scalars["one_minus_beta2"]).mul_(gradient)
        second = arithmetic.average(state, "exp_avg_sq", scalars["beta2"], increment)
        if "max_exp_avg_sq" in state:
            second = arithmetic.keep_maximum(state, "max_exp_avg_sq", "exp_avg_sq")
        return first, arithmetic.square_root(second).mul_(scalars["root_correction"]).add_(scalars["eps"])

    def scalars_ahead(self, group: Group, step: Any) -> dict[str, Scalar]:
        rate, beta1 = _rate(group), float(group["betas"][0])
        if not beta1 or (not isinstance(rate, Tensor) and not rate * beta1):
            return {}
        ahead = step.of(_ahead_of, beta1) if isinstance(step, CountedStep) else _ahead_of(beta1, step)
        return {"lr_ahead": rate * ahead, "step_of_ahead": _quotient(-1, ahead * (1 - beta1**step))}

    def coupled_displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> CoupledDisplacement:
        first, denominator = self._averages(arithmetic, parameter, gradient, state, scalars)
        reach = torch.as_tensor(scalars["lr_ahead"])
        ahead = denominator.reciprocal_().mul_(reach)
        displacement = arithmetic.product(first, ahead).mul_(scalars["step_of_ahead"])
        return CoupledDisplacement(_with_decay(arithmetic, parameter, displacement, scalars), ahead, reach)

    def torch_step(self, group: Group, parameter: Tensor, gradient: Tensor, state: State) -> bool:
        adam(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
            [state["step"]],
            foreach=False,
            amsgrad=group["amsgrad"],
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            decoupled_weight_decay=self.decoupled,
        )
        return True


@dataclass(frozen=True)
class LionRule(UpdateRule):
    """Lion with decoupled decay.

    displacement = -lr * sign(beta1 m + (1 - beta1) g) - (lr * weight_decay) * parameter, from the average before
    this step;  m = beta2 m + (1 - beta2) g. Reference: Chen et al. 2023, algorithm 2.
    """

    def moments(self, group: Group) -> tuple[Moment, ...]:
        return (Moment("exp_avg", decay=float(group["betas"][1])),)

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        return {**_decays(group, decoupled=True), "negative_lr": -_rate(group)}

    def displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> Tensor:
        increment = arithmetic.product(gradient, scalars["one_minus_beta1"])
        direction = arithmetic.product(state["exp_avg"], scalars["beta1"]).add_(increment)
        displacement = direction.sign_().mul_(scalars["negative_lr"])
        displacement = _with_decay(arithmetic, parameter, displacement, scalars)
        arithmetic.average(
            state, "exp_avg", scalars["beta2"], arithmetic.product(gradient, scalars["one_minus_beta2"])
        )
        return displacement


@dataclass(frozen=True)
class SGDRule(UpdateRule):
    """SGD as torch.optim.SGD defines it.

    g = g + weight_decay * parameter;  b = momentum b + (1 - dampening) g, without dampening at the first step;
    displacement = -lr * (g + momentum b) with Nesterov's momentum, -lr * b with plain momentum, -lr * g without.
    Reference: Sutskever et al. 2013.
    """

    def moments(self, group: Group) -> tuple[Moment, ...]:
        momentum = float(group["momentum"])
        return (Moment("momentum_buffer", decay=momentum),) if momentum != 0 else ()

    def scalars(self, group: Group, step: Any) -> dict[str, Scalar]:
        numbers = {**_decays(group, decoupled=False), "negative_lr": -_rate(group)}
        if group["momentum"] != 0:
            numbers["momentum"] = float(group["momentum"])
            later = 1 - float(group["dampening"])
            if isinstance(step, CountedStep):
                ones = torch.ones_like(step.numbers)
                numbers["one_minus_dampening"] = torch.where(step.numbers == 1, ones, later * ones)
            else:
                numbers["one_minus_dampening"] = 1.0 if step == 1 else later
            if group["nesterov"]:
                numbers["nesterov_momentum"] = float(group["momentum"])
        return numbers

    def displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> Tensor:
        gradient = _with_coupled_decay(arithmetic, parameter, gradient, scalars)
        direction = gradient
        if "momentum" in scalars:
            increment = arithmetic.product(gradient, scalars["one_minus_dampening"])
            direction = arithmetic.average(state, "momentum_buffer", scalars["momentum"], increment)
        if "nesterov_momentum" in scalars:
            direction = arithmetic.product(direction, scalars["nesterov_momentum"]).add_(gradient)
        return arithmetic.product(direction, scalars["negative_lr"])

    def scalars_ahead(self, group: Group, step: int) -> dict[str, Scalar]:
        rate, momentum = _rate(group), float(group["momentum"])
        ahead = _quotient(rate * momentum, 1 - momentum) if 0 < momentum < 1 else 0.0
        coupled = isinstance(ahead, Tensor) or ahead
        return {"lr_ahead": ahead * (momentum if group["nesterov"] else 1.0)} if coupled else {}

    def coupled_displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> CoupledDisplacement:
        displacement = self.displacement(arithmetic, parameter, gradient, state, scalars)
        ahead = torch.as_tensor(scalars["lr_ahead"])
        return CoupledDisplacement(displacement, ahead, arithmetic.product(gradient, ahead).abs_())

    def torch_step(self, group: Group, parameter: Tensor, gradient: Tensor, state: State) -> bool:
        # torch keeps no buffer before the first step, and copies the gradient into it then.
        buffers: list[Tensor | None] = [state.get("momentum_buffer") if state["step"] > 0 else None]
        sgd(
            [parameter],
            [gradient],
            buffers,
            foreach=False,
            fused=False,
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            lr=float(group["lr"]),
            dampening=float(group["dampening"]),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if buffers[0] is not None and group["momentum"] != 0:
            state["momentum_buffer"] = buffers[0]
        state["step"] += 1
        return True
