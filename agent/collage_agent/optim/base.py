"""What all our optimizers share: groups, states, steps and checkpoints, whatever the rule and the strategy."""

from collections.abc import Callable
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from collage_agent.optim import checkpoints
from collage_agent.optim.advance import Step
from collage_agent.optim.arithmetic import State, Working, Workspace
from collage_agent.optim.compiled import Advance, Structure, check_compiled, compiled_step, scalar_tensors
from collage_agent.optim.guards import check_moments, check_range
from collage_agent.optim.rules import Moment, Rule
from collage_agent.optim.stepping import chunk_elements, step_tensor, working_dtype
from collage_agent.optim.strategies import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    Kept,
    Strategy,
    check_dtype,
    strategy_named,
)

__all__ = ["ARITHMETICS", "CollageOptimizer", "mixed_seed"]

ARITHMETICS = ("fp32", "storage")


def mixed_seed(seed: int, position: int, step: int) -> int:
    """Three counters hashed into a generator's seed (splitmix64, Steele et al. 2014)."""
    mixed = 0
    for value in (seed, position, step):
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed


class CollageOptimizer(Optimizer):
    """A torch optimizer made of an update rule and a storage strategy; subclasses name the rule.

    Per-group options include `strategy` and `arithmetic`. State keys are torch's, beside them `parameter_low`,
    `master_parameter`, and KEY_low for an average kept as an expansion. Elements never mix, so shards may be
    stepped. Nothing here synchronises a device, unless a learning rate is a tensor that lives on one.
    """

    rule: ClassVar[Rule]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._workspaces: dict[tuple[torch.device, torch.dtype], Workspace] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_workspaces", {})
        self.__dict__.setdefault("_generators", {})

    @property
    def strategy(self) -> str:
        """The strategy of the first group; a group may have its own, under group["strategy"]."""
        return str(self.param_groups[0]["strategy"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and check that its parameters can be kept as its strategy says."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        strategy = strategy_named(group["strategy"])
        if group["arithmetic"] not in ARITHMETICS:
            raise ValueError(f"Invalid arithmetic: {group['arithmetic']!r}; use one of {', '.join(ARITHMETICS)}")
        check_compiled(group["compiled"], group["arithmetic"], strategy)
        for parameter in group["params"]:
            if parameter.is_complex():
                raise ValueError("complex parameters are not supported: pass torch.view_as_real of them")
            check_dtype(strategy, parameter.dtype)
        moments = self.rule.moments(group)
        check_moments(strategy, type(self).__name__, moments)
        for dtype in {parameter.dtype for parameter in group["params"]}:
            check_range(group, strategy, moments, dtype)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform a single optimization step; with a closure, evaluate it first and return the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        position = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(group, parameter, parameter.grad, position)
                position += 1
        return loss

    def _step_parameter(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, position: int) -> None:
        if gradient.is_sparse:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients, please consider SparseAdam instead"
            )
        state: State = self.state[parameter]
        strategy = strategy_named(group["strategy"])
        if not state:
            state.update(self._initial_state(group, strategy, parameter))
        strict = group["arithmetic"] == "storage" and strategy.first_moment is not Kept.WIDE
        if strict and strategy.name == "plain" and self.rule.torch_step(group, parameter, gradient, state):
            return
        state["step"] += 1
        number = int(state["step"].item())
        moments, scalars = self.rule.moments(group), self.rule.scalars(group, number)
        compiled = self._compiled(group, strategy, parameter, moments, tuple(scalars))
        step = Step(
            rule=self.rule,
            strategy=strategy,
            moments=moments,
            storage_arithmetic=strict,
            maximize=group["maximize"],
            scalars=scalars if compiled is None else scalar_tensors(scalars, working_dtype(parameter.dtype)),
            workspace=self._workspace(parameter),
            generator=self._generator(parameter.device, group["seed"], position, number)
            if strategy.stochastic
            else None,
            compiled=compiled,
        )
        step_tensor(step, parameter, gradient, state)

    def _compiled(
        self,
        group: dict[str, Any],
        strategy: Strategy,
        parameter: Tensor,
        moments: tuple[Moment, ...],
        scalar_names: tuple[str, ...],
    ) -> Advance | None:
        """The compiled form of this parameter's step where the group asks for it and the self-test passes."""
        if group["compiled"] is None:
            return None
        return compiled_step(
            Structure(
                rule=self.rule,
                strategy=strategy,
                moments=moments,
                maximize=group["maximize"],
                form=group["compiled"],
                dtype=parameter.dtype,
                device_type=parameter.device.type,
                scalar_names=scalar_names,
            )
        )

    def _generator(self, device: torch.device, seed: int, position: int, step: int) -> torch.Generator:
        """The source of stochastic rounding, set anew for each tensor and step from the seed and the two counters.

        So its state is in the state dict (the seed in the group, the counter in `step`), the process-wide
        generators stay untouched, and replicas that step the same tensors round alike.
        """
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device)
        return found.manual_seed(mixed_seed(seed, position, step))

    def _workspace(self, parameter: Tensor) -> Workspace:
        """The scratch for this parameter's device and wide format: made once, shared by all tensors."""
        dtype = working_dtype(parameter.dtype)
        found = self._workspaces.get((parameter.device, dtype))
        if found is None:
            found = Workspace(chunk_elements(parameter.device), dtype, parameter.device)
            self._workspaces[parameter.device, dtype] = found
        return found

    def _initial_state(self, group: dict[str, Any], strategy: Strategy, parameter: Tensor) -> State:
        check_dtype(strategy, parameter.dtype)
        # As in torch: a counter must not follow a 16-bit default dtype, which stops counting at 256.
        double = torch.get_default_dtype() == torch.float64
        state = {"step": torch.tensor(0.0, dtype=torch.float64 if double else torch.float32)}
        for moment in self.rule.moments(group):
            kept = strategy.kept(moment.second)
            dtype = torch.float32 if kept is Kept.WIDE else parameter.dtype
            state[moment.name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
            if kept is Kept.PAIR:
                state[moment.name + LOW_COMPONENT_SUFFIX] = torch.zeros_like(state[moment.name])
        if strategy.parameter_state == MASTER_PARAMETER:
            state[MASTER_PARAMETER] = parameter.detach().to(torch.float32, copy=True)
        elif strategy.parameter_state == PARAMETER_LOW:
            state[PARAMETER_LOW] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def stored_parameter(self, p: Tensor) -> Tensor:
        """The exact value kept for parameter p: p, p + its low component, or its master weight.

        Returns a new fp64 tensor of p's shape. No synchronisation.
        """
        state: State = self.state.get(p, {})
        if MASTER_PARAMETER in state:
            return state[MASTER_PARAMETER].detach().to(torch.float64, copy=True)
        stored = p.detach().to(torch.float64, copy=True)
        return stored.add_(state[PARAMETER_LOW]) if PARAMETER_LOW in state else stored

    def exact_rule(self) -> Callable[..., tuple[Tensor, State]]:
        """The function that makes this optimizer's step in fp64: `exact_displacement`."""
        return self.exact_displacement

    @classmethod
    def exact_displacement(
        cls, group: dict[str, Any], state: State, parameter: Tensor, gradient: Tensor, step: int
    ) -> tuple[Tensor, State]:
        """The displacement that step `step` (1 for the first) makes in exact arithmetic, up to fp64's own rounding.

        group: a parameter group of this optimizer, read only. parameter, gradient, state[KEY]: *joined* values
        (weight = p + low or master; average = high + low), one arbitrary shape; state may hold further keys,
        which are left out; an average that is missing counts as zero. Returns (displacement, the averages after
        the step), all fp64 and new: nothing passed in is changed. Elementwise: a sample of the elements gives a
        sample of the result.
        """
        value = parameter.to(torch.float64)
        intended = gradient.to(torch.float64)
        if group["maximize"]:
            intended = -intended
        after = {
            moment.name: state[moment.name].to(torch.float64, copy=True)
            if moment.name in state
            else torch.zeros_like(value)
            for moment in cls.rule.moments(group)
        }
        scalars = cls.rule.scalars(group, step)
        return cls.rule.displacement(Working(), value, intended, after, scalars), after

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this or another strategy, or of the torch optimizer with the same rule.

        Hyper-parameters come from the checkpoint, as in torch; strategy and arithmetic stay as this optimizer was
        built, and the loaded states are converted. Between equal strategies every bit survives, fp32 states
        beside bf16 parameters included; a conversion loses only what the new strategy cannot hold.
        """
        checkpoints.load(self, super().load_state_dict, state_dict)
