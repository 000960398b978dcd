"""The common part of our optimizers: groups, states, steps and checkpoints, whatever the rule and the strategy.

`optimizers.py` and other packages' rules derive from it. It behaves as torch.optim's classes do (groups, hooks,
closures, `state_dict`), and that is fixed (`tests/optim/test_interface.py`).
"""

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from collage_optim import integer_codes, state_loading
from collage_optim.advance import AskedTotals, Step
from collage_optim.arithmetic import State, WideArithmetic, constant, shared_workspace
from collage_optim.compiled import Structure, adds_totals, check_compiled, compiled_step, device_step, pack_scalars
from collage_optim.device_step import capturing, counted, launches
from collage_optim.external_writes import ON_EXTERNAL_WRITE, ExternalWrites
from collage_optim.hyperparameter_checks import TORCH_FORMS, check_torch_options
from collage_optim.random_numbers import Seeding, default_seed
from collage_optim.range_guards import UpdateGuard, check_moments, check_range, log_once, range_findings
from collage_optim.state_loading import CONVERTED_FROM, RESIDUALS_FROM
from collage_optim.step_totals import StepTotals
from collage_optim.strategies import (
    MASTER_PARAMETER,
    StorageStrategy,
    check_arithmetic,
    check_dtype,
    strategy_named,
    usual_strategy,
)
from collage_optim.tensor_step import (
    Form,
    Gathered,
    Member,
    component_names,
    form_of,
    longest_chunk,
    name_in,
    refuse_form,
    sampled,
    step_tensors,
    wide_dtype,
)
from collage_optim.update_rules import CountedStep, Group, Moment, UpdateRule

__all__ = ["ARITHMETICS", "CollageOptimizer"]

ARITHMETICS = ("fp32", "storage")
_LOOKED_AT = 64
_RULES_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_has_sparse_gradient: Callable[[Tensor], bool] = operator.attrgetter("grad.is_sparse")
_OPTIONS_CHECKED = ("strategy", "arithmetic", "compiled", "on_external_write", *TORCH_FORMS)


class CollageOptimizer(Optimizer):
    """A torch optimizer made of an update rule and a storage strategy; a subclass sets `rule` or `rule_of`.

    Per-group options include `strategy` and `arithmetic`. State keys are torch's, beside them `parameter_low`,
    `master_parameter`, and KEY_low for an average kept as an expansion. Elements never mix, so shards may be
    stepped. Nothing here synchronises a device, unless a learning rate is a tensor that lives on one.

    step_totals: set before a step, it asks for totals of its updates, which kernels add up and leave there. The
    step takes it, so that the next one is not asked. No copy or checkpoint has it.
    """

    rule: ClassVar[UpdateRule]
    step_totals: StepTotals | None
    _taken_totals: StepTotals | None

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        if isinstance(params, torch.nn.Module):
            raise TypeError(f"params={type(params).__name__} is a model; pass its parameters: model.parameters()")
        self._start_without_memory()
        super().__init__(params, {"on_external_write": "adopt", RESIDUALS_FROM: 0, CONVERTED_FROM: "", **defaults})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_external_writes" not in self.__dict__:
            self._start_without_memory()
            self._accepted.extend(map(self._options, self.param_groups))

    def _start_without_memory(self) -> None:
        """Begin the parts that no copy or checkpoint has: every step makes them again."""
        self._external_writes = ExternalWrites()
        self._update_guard = UpdateGuard()
        self.step_totals = self._taken_totals = None
        self._accepted: list[tuple[Any, ...]] = []
        self._forms: dict[Tensor, Form] = {}
        self._last_gathered: dict[int, Gathered] = {}

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer, *, strategy: str | None = None, **options: Any) -> Self:
        """This class over another optimizer's groups: its options, those by name that both have, and its states.

        For an optimizer of the same update rule; decay that it does not have is 0. A group's 16-bit weights are
        kept as `strategy` says, else by default; its other weights become a separate `plain` group.
        options: others of this class, for all groups. Raises ValueError for options or states that are known to be
        another rule's, and as the class does for what `strategy` cannot keep.
        """
        if type(optimizer).__module__.startswith("torch.optim.") and type(optimizer) not in _RULES_OF_TORCH:
            raise ValueError(f"{type(optimizer).__name__} is of another update rule than {cls.__name__}")
        groups = [
            part
            for group in optimizer.param_groups
            for part in state_loading.groups_like(cls.options_like(group), group, strategy)
        ]
        rule = {"rule": groups[0]["rule"]} if "rule" in groups[0] else {}
        build: Callable[..., Self] = cls
        made = build(groups, strategy=strategy, **rule, **options)
        state_loading.take_over(made, optimizer)
        return made

    @classmethod
    def options_like(cls, group: Group) -> dict[str, Any]:
        """The options of another optimizer's group that this class has too.

        A switch or a decay that it does not have is off. Raises ValueError for options of another update rule.
        """
        rule = {"rule": group["rule"]} if "rule" in group else {}
        build: Callable[..., CollageOptimizer] = cls
        defaults = build([torch.zeros(1)], strategy="plain", **rule).defaults
        return {**state_loading.options_like(cls.__name__, defaults, group), **rule}

    @classmethod
    def rule_of(cls, group: Group) -> UpdateRule:
        """The update rule of a parameter group."""
        return cls.rule

    @property
    def strategy(self) -> str:
        """The strategy of the first group; a group may have its own, under group["strategy"]."""
        return str(self.param_groups[0]["strategy"])

    @property
    def external_writes(self) -> int:
        """How often a weight was changed externally, so that its residual or master value was dropped."""
        return self._external_writes.count

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and check that its parameters can be kept as its strategy says."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._accepted.append(self._options(group))

    def _check_group(self, group: dict[str, Any]) -> None:
        if group["strategy"] is None:
            group["strategy"] = usual_strategy(group, any(moment.second for moment in self._moments(group)))
        strategy = strategy_named(group["strategy"])
        launched = all(launches(parameter.device) for parameter in group["params"])
        launched = launched and group["arithmetic"] != "storage" and group["compiled"] is not False
        if check_torch_options({name: group[name] for name in TORCH_FORMS if name in group}, launched):
            self.rule_of(group).check_counted(group)
        for option, known in (("arithmetic", ARITHMETICS), ("on_external_write", ON_EXTERNAL_WRITE)):
            if group[option] not in known:
                raise ValueError(f"Invalid {option}: {group[option]!r}; use one of {', '.join(known)}")
        check_arithmetic(strategy, group["arithmetic"])
        on_cpu = any(parameter.device.type == "cpu" for parameter in group["params"])
        check_compiled(group["compiled"], group["arithmetic"], strategy, on_cpu)
        if strategy.stochastic and group["seed"] is None:
            if self.defaults["seed"] is None:
                self.defaults["seed"] = default_seed()
            group["seed"] = self.defaults["seed"]
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

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler may leave its scale and its verdict to a step, which then reads neither."""
        return all(group.get("fused") for group in self.param_groups)

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
        if capturing():
            self._external_writes.stop()
            if any(
                own.grad is not None and own not in self.state
                for group in self.param_groups
                for own in group["params"]
            ):
                raise RuntimeError("a CUDA graph cannot hold a first step, which makes states: take one before it")
        members = self._gathered()
        self._taken_totals, self.step_totals = self.step_totals, None
        named = partial(name_in, self.param_groups)
        self._external_writes.adopt(zip(self.param_groups, members, strict=True), named)
        self._look_at_updates(members)
        for group, own in zip(self.param_groups, members, strict=True):
            for step, planned in self._planned(group, own):
                step_tensors(step, planned)
        self._external_writes.remember()
        return loss

    def _gathered(self) -> list[list[Member]]:
        """The parameters of each group that take the step; raises for unsupported ones before any counter moves."""
        options = [self._options(group) for group in self.param_groups]
        if options != self._accepted:
            for group, now, before in zip_longest(self.param_groups, options, self._accepted):
                self._check_group(group)
                if before is not None and before != now:
                    self._convert(group, before[0])
            self._accepted = options
            self._last_gathered.clear()
        position, gathered = 0, []
        for number, group in enumerate(self.param_groups):
            gathered.append(self._members(number, group, position))
            position += len(group["params"])
        return gathered

    def _options(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """The key of how a group's weights and averages are kept, which users may change between two steps."""
        return (*map(group.get, _OPTIONS_CHECKED), *(moment.name for moment in self._moments(group)))

    def _convert(self, group: dict[str, Any], was: str) -> None:
        """Convert a group's states if its strategy was changed."""
        moments = {moment.name: moment.second for moment in self._moments(group)}
        strategy = strategy_named(group["strategy"])
        states = {parameter: self.state[parameter] for parameter in group["params"] if self.state.get(parameter)}
        state_loading.note_conversion(group, was, states.values())
        for parameter, state in states.items():
            self.state[parameter] = state_loading.convert(state, moments, parameter, strategy)

    def _members(self, number: int, group: dict[str, Any], first_position: int) -> list[Member]:
        """The group's parameters that have a gradient, with their states; missing states are created."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if any(map(_has_sparse_gradient, parameters)):
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients, please consider SparseAdam instead"
            )
        forms, last = list(map(form_of, parameters)), self._last_gathered.get(number)
        states: list[Any] = list(map(self.state.get, parameters))
        if last is None or not last.is_still(parameters, forms, states, first_position):
            members = self._new_members(group, first_position)
            states = [member.state for member in members]
            last = self._last_gathered[number] = Gathered(parameters, forms, states, members, first_position)
        return last.members

    def _new_members(self, group: dict[str, Any], first_position: int) -> list[Member]:
        strategy = strategy_named(group["strategy"])
        members: list[Member] = []
        new = False
        for position, parameter in enumerate(group["params"], start=first_position):
            if parameter.grad is None:
                continue
            form = form_of(parameter)
            state: State = self.state.get(parameter, {})
            # A wrapper's own entries may be there first.
            if "step" not in state:
                if not new:
                    # Its dtype may have changed since the group was added.
                    self._check_group(group)
                    new = True
                initial = state_loading.initial_state(strategy, self._moments(group), parameter)
                state = self.state[parameter]
                state.update(initial)
                self._forms[parameter] = form
            elif self._forms.setdefault(parameter, form) != form:
                refuse_form(name_in(self.param_groups, parameter), self._forms[parameter], form)
            if group.get("fused"):
                # A checkpoint may have been counted on the host.
                state["step"] = state["step"].to(parameter.device)
            members.append(Member(position, parameter, state))
        return members

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look_at_updates(self, members: list[list[Member]]) -> None:
        """Let the guard check, now and then, whether a group's strategy can hold its updates."""
        self._update_guard.begin()
        for number, (group, own) in enumerate(zip(self.param_groups, members, strict=True)):
            strategy = strategy_named(group["strategy"])
            if group.get("fused") or not any(member.parameter.dtype.itemsize < 4 for member in own):
                continue
            if not self._update_guard.is_due(number, group, strategy):
                continue
            narrow = [member for member in own if member.parameter.dtype.itemsize < 4]
            parameter, step = narrow[0].parameter, int(narrow[0].state["step"].item())
            alike = [
                member
                for member in narrow[:: math.ceil(len(narrow) / _LOOKED_AT)]
                if (member.parameter.dtype, member.parameter.device) == (parameter.dtype, parameter.device)
                and int(member.state["step"].item()) == step
            ]
            moments = self._moments(group)
            sample = sampled(alike, component_names(strategy, moments), [moment.name for moment in moments])
            displacement, _ = self.exact_rule()(group, sample, sample["weight"], sample["gradient"], step + 1)
            self._update_guard.look(number, group, strategy, moments, sample["parameter"], displacement)

    def _planned(self, group: dict[str, Any], members: list[Member]) -> list[tuple[Step, list[Member]]]:
        """Count the step of each member and group those that take the same one; torch's own steps are made here."""
        strategy = strategy_named(group["strategy"])
        if group.get("fused"):
            return self._counted(group, strategy, members)
        strict = group["arithmetic"] == "storage" and not strategy.keeps_wide
        rule = self.rule_of(group)
        rate = group.get("lr")
        still = not isinstance(rate, Tensor) and rate == 0
        plans: dict[tuple[int, torch.dtype, torch.device], tuple[Step, list[Member]]] = {}
        if strict and strategy.is_plain:
            members = [
                member
                for member in members
                if not rule.torch_step(group, member.parameter, member.gradient, member.state)
            ]
        counters = [member.state["step"] for member in members]
        if members:
            # With a number as it stands, each counter would make a tensor of it.
            if {counter.is_cpu for counter in counters} == {True}:
                torch._foreach_add_(counters, torch.ones((), dtype=torch.int64), alpha=1)
            else:
                torch._foreach_add_(counters, 1)
        numbers = [int(counter.item()) for counter in counters]
        keys = [(number, *form_of(own.parameter)[:2]) for number, own in zip(numbers, members, strict=True)]
        for number in dict.fromkeys(numbers):
            if still and group.get(RESIDUALS_FROM) == number - 1:
                group[RESIDUALS_FROM] = number
        if len(set(keys)) == 1:
            return [(self._step(group, strategy, strict, *keys[0]), members)]
        for key, member in zip(keys, members, strict=True):
            if key not in plans:
                plans[key] = (self._step(group, strategy, strict, *key), [])
            plans[key][1].append(member)
        return list(plans.values())

    def _counted(
        self, group: dict[str, Any], strategy: StorageStrategy, members: list[Member]
    ) -> list[tuple[Step, list[Member]]]:
        """As `_planned` where devices count: a step that a loss scaler skips changes nothing and does not count."""
        plans = []
        verdict = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for dtype, device in dict.fromkeys((own.parameter.dtype, own.parameter.device) for own in members):
            alike = [own for own in members if (own.parameter.dtype, own.parameter.device) == (dtype, device)]
            counters = [own.state["step"] for own in alike]
            numbers = counted(counters, *verdict)
            number: Any = CountedStep(numbers[0])
            step = self._step(group, strategy, False, number, dtype, device)
            if step.launch is None:
                raise RuntimeError("fused=True has no kernel here: leave it out")
            torch._foreach_add_(counters, [1 - numbers[2]] * len(counters))  # One alone would be read.
            seeding = None if step.seeding is None else Seeding(step.seeding.seed, 0)
            plans.append((replace(step, seeding=seeding, counted=numbers, asked=None), alike))
        return plans

    def _step(
        self,
        group: dict[str, Any],
        strategy: StorageStrategy,
        strict: bool,
        number: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Step:
        """Step `number` of this group for tensors of one dtype on one device."""
        rule = self.rule_of(group)
        moments, scalars = rule.moments(group), rule.scalars(group, number)
        ahead = rule.scalars_ahead(group, number) if strategy.coupled else {}
        scalars.update(ahead)
        wide, compiled, launch, asked = wide_dtype(dtype), None, None, None
        form = (group["maximize"], dtype, device.type, tuple(scalars), bool(ahead))
        by_device = isinstance(number, CountedStep) and capturing()
        if group["compiled"] is not False and not strict and (launches(device) or by_device):
            launch, adds = self._launch(Structure(rule, strategy, moments, *form))
            if self._taken_totals is not None and adds:
                asked = AskedTotals(dict(scalars), self._taken_totals.found)
        elif group["compiled"] and device.type == "cpu":
            compiled = compiled_step(Structure(rule, strategy, moments, *form))
        if compiled is not None:
            scalars = pack_scalars(scalars, wide, device)
        elif not strict and launch is None:
            scalars = {name: constant(value, wide) for name, value in scalars.items()}
        return Step(
            dtype=dtype,
            rule=rule,
            strategy=strategy,
            moments=moments,
            storage_arithmetic=strict,
            maximize=group["maximize"],
            scalars=scalars,
            workspace=shared_workspace(device, wide, longest_chunk(device)),
            seeding=Seeding(group["seed"], number) if strategy.stochastic else None,
            compiled=compiled,
            is_coupled=bool(ahead),
            launch=launch,
            asked=asked,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _launch(self, structure: Structure) -> tuple[Any, bool]:
        """The kernel of a step, if there is one here, and whether it adds up the totals that are asked for.

        A user's torch.compile must not trace how it is made.
        """
        kernel = device_step(structure)
        return kernel, self._taken_totals is not None and kernel is not None and adds_totals(structure)

    def _moments(self, group: Group) -> tuple[Moment, ...]:
        return self.rule_of(group).moments(group)

    def stored_parameter(self, p: Tensor) -> Tensor:
        """The exact value kept for parameter p: p, p with its low component, or its master weight.

        Returns a new fp64 tensor of p's shape. No synchronisation.
        """
        state: State = self.state.get(p, {})
        if MASTER_PARAMETER in state:
            return state[MASTER_PARAMETER].detach().to(torch.float64, copy=True)
        return integer_codes.stored_value(state, "parameter", p)

    def exact_rule(self) -> Callable[..., tuple[Tensor, State]]:
        """The function that makes this optimizer's step in fp64: `exact_displacement`."""
        return self.exact_displacement

    @property
    def has_rules_step(self) -> bool:
        """Whether `exact_rule` is the rule's own step, which kernels that add up totals take for u."""
        return getattr(self.exact_rule(), "__func__", None) is CollageOptimizer.exact_displacement.__func__  # type: ignore[attr-defined]

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
        after = {
            moment.name: state[moment.name].to(torch.float64, copy=True)
            for moment in cls.rule_of(group).moments(group)
            if moment.name in state
        }
        return cls.exact_step(group, after, value, gradient.to(torch.float64), step, WideArithmetic()), after

    @classmethod
    def exact_step(
        cls,
        group: Group,
        averages: State,
        parameter: Tensor,
        gradient: Tensor,
        step: int,
        arithmetic: WideArithmetic,
    ) -> Tensor:
        """The displacement of `exact_displacement`, from fp64 alone: `averages` are advanced in place, and made
        where they are missing. The result is the arithmetic's scratch, if it has any."""
        rule = cls.rule_of(group)
        for moment in rule.moments(group):
            if moment.name not in averages:
                averages[moment.name] = torch.zeros_like(parameter)
        intended = -gradient if group["maximize"] else gradient
        return rule.displacement(arithmetic, parameter, intended, averages, rule.scalars(group, step))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this or another strategy, or of the torch optimizer with the same rule.

        Hyper-parameters come from the checkpoint, as in torch; strategy and arithmetic stay as this optimizer was
        built, and the loaded states are converted. Between equal strategies every bit survives, fp32 states
        beside bf16 parameters included; a conversion loses only what the new strategy cannot hold.
        """
        self._external_writes.forget()
        self._forms.clear()
        self._last_gathered.clear()
        state_loading.load(self, self._moments, super().load_state_dict, state_dict)
        self._accepted = [self._options(group) for group in self.param_groups]
