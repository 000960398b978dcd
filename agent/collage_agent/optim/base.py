"""What all our optimizers share: groups, states, steps and checkpoints, whatever the rule and the strategy."""

from collections.abc import Callable
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from collage_agent.optim import checkpoints
from collage_agent.optim.advance import Step
from collage_agent.optim.arithmetic import State, WideArithmetic, shared_workspace
from collage_agent.optim.compiled import Structure, check_compiled, compiled_step, scalar_tensors
from collage_agent.optim.guards import (
    check_moments,
    check_range,
    learning_rate_finding,
    log_once,
    range_findings,
)
from collage_agent.optim.random_numbers import Seeding
from collage_agent.optim.rules import Group, Moment, UpdateRule
from collage_agent.optim.stepping import Member, longest_chunk, step_tensors, wide_dtype
from collage_agent.optim.strategies import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    StateStorage,
    StorageStrategy,
    check_dtype,
    strategy_named,
)

__all__ = ["ARITHMETICS", "CollageOptimizer"]

ARITHMETICS = ("fp32", "storage")


class CollageOptimizer(Optimizer):
    """A torch optimizer made of an update rule and a storage strategy; a subclass sets `rule` or `rule_of`.

    Per-group options include `strategy` and `arithmetic`. State keys are torch's, beside them `parameter_low`,
    `master_parameter`, and KEY_low for an average kept as an expansion. Elements never mix, so shards may be
    stepped. Nothing here synchronises a device, unless a learning rate is a tensor that lives on one.
    """

    rule: ClassVar[UpdateRule]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # They are set anew for every tensor: a copy or a checkpoint starts without them.
        self.__dict__.setdefault("_generators", {})

    @classmethod
    def rule_of(cls, group: Group) -> UpdateRule:
        """The update rule of a parameter group."""
        return cls.rule

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
        moments = self._moments(group)
        check_moments(strategy, type(self).__name__, moments)
        for dtype in {parameter.dtype for parameter in group["params"]}:
            check_range(group, strategy, moments, dtype)
            for finding in range_findings(strategy, moments, dtype):
                log_once(finding)

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
            members = self._members(group, position)
            position += len(group["params"])
            for step, planned in self._planned(group, members):
                step_tensors(step, planned)
        return loss

    def _members(self, group: dict[str, Any], first_position: int) -> list[Member]:
        """The group's parameters that have a gradient, with their states; missing states are created."""
        strategy = strategy_named(group["strategy"])
        members, new = [], []
        for position, parameter in enumerate(group["params"], start=first_position):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, please consider SparseAdam instead"
                )
            state: State = self.state[parameter]
            if not state:
                state.update(self._initial_state(group, strategy, parameter))
                new.append(parameter)
            members.append(Member(position, parameter, gradient, state))
        if new and self.rule_of(group).moves_by_learning_rate:
            finding = learning_rate_finding(group, strategy, new)
            if finding is not None:
                log_once(finding)
        return members

    def _planned(self, group: dict[str, Any], members: list[Member]) -> list[tuple[Step, list[Member]]]:
        """Count the step of each member and group those that take the same one; torch's own steps are made here."""
        strategy = strategy_named(group["strategy"])
        strict = group["arithmetic"] == "storage" and not strategy.keeps_wide
        rule = self.rule_of(group)
        plans: dict[tuple[int, torch.dtype, torch.device], tuple[Step, list[Member]]] = {}
        for member in members:
            parameter, state = member.parameter, member.state
            if strict and strategy.is_plain and rule.torch_step(group, parameter, member.gradient, state):
                continue
            state["step"] += 1
            key = (int(state["step"].item()), parameter.dtype, parameter.device)
            if key not in plans:
                plans[key] = (self._step(group, strategy, strict, *key), [])
            plans[key][1].append(member)
        return list(plans.values())

    def _step(
        self,
        group: dict[str, Any],
        strategy: StorageStrategy,
        strict: bool,
        number: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Step:
        """Step `number` of this group for tensors of one dtype on one device."""
        rule = self.rule_of(group)
        moments, scalars = rule.moments(group), rule.scalars(group, number)
        compiled = None
        if group["compiled"] is not None:
            form = (group["maximize"], group["compiled"], dtype, device.type, tuple(scalars))
            compiled = compiled_step(Structure(rule, strategy, moments, *form))
        return Step(
            rule=rule,
            strategy=strategy,
            moments=moments,
            storage_arithmetic=strict,
            maximize=group["maximize"],
            scalars=scalars if compiled is None else scalar_tensors(scalars, wide_dtype(dtype)),
            workspace=shared_workspace(device, wide_dtype(dtype), longest_chunk(device)),
            seeding=Seeding(group["seed"], number, self._generator(device)) if strategy.stochastic else None,
            compiled=compiled,
        )

    def _generator(self, device: torch.device) -> torch.Generator:
        """The random generator for stochastic rounding on a device; the process-wide ones are left alone."""
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device)
        return found

    def _moments(self, group: Group) -> tuple[Moment, ...]:
        return self.rule_of(group).moments(group)

    def _initial_state(self, group: dict[str, Any], strategy: StorageStrategy, parameter: Tensor) -> State:
        check_dtype(strategy, parameter.dtype)
        # As in torch: a counter must not follow a 16-bit default dtype, which stops counting at 256.
        double = torch.get_default_dtype() == torch.float64
        state = {"step": torch.tensor(0.0, dtype=torch.float64 if double else torch.float32)}
        for moment in self._moments(group):
            kept = strategy.kept(moment.second)
            dtype = torch.float32 if kept is StateStorage.WIDE else parameter.dtype
            state[moment.name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
            if kept is StateStorage.PAIR:
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
        rule = cls.rule_of(group)
        value = parameter.to(torch.float64)
        intended = gradient.to(torch.float64)
        if group["maximize"]:
            intended = -intended
        after = {
            moment.name: state[moment.name].to(torch.float64, copy=True)
            if moment.name in state
            else torch.zeros_like(value)
            for moment in rule.moments(group)
        }
        scalars = rule.scalars(group, step)
        return rule.displacement(WideArithmetic(), value, intended, after, scalars), after

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this or another strategy, or of the torch optimizer with the same rule.

        Hyper-parameters come from the checkpoint, as in torch; strategy and arithmetic stay as this optimizer was
        built, and the loaded states are converted. Between equal strategies every bit survives, fp32 states
        beside bf16 parameters included; a conversion loses only what the new strategy cannot hold.
        """
        checkpoints.load(self, self._moments, super().load_state_dict, state_dict)
