"""Where u comes from, group by group: our own rule, a shadow of samples or whole tensors, or nowhere.

The hooks ask once at attach and after a change of groups, and a step only looks the answer up. The order of the
attempts is fixed: an own rule is exact, a shadow is tested before it is trusted, and what fails both is measured
without u (`tests/agent/intent/`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, Protocol, cast

import torch
from collage_optim import CollageAdam, CollageAdamW, CollageLion, CollageOptimizer, CollageSGD, known_strategy
from collage_optim.arithmetic import WideArithmetic, shared_workspace
from collage_optim.tensor_step import local_part, longest_chunk
from collage_optim.update_rules import AdamRule, UpdateRule
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import Optimizer

from collage_agent.intent.before_after import BeforeAfter, WholeTensor
from collage_agent.intent.betas import ShadowByBetas, decays_otherwise
from collage_agent.intent.bitsandbytes_rule import BitsandbytesRule, follows_bitsandbytes_rule, rule_mismatch
from collage_agent.intent.foreign_optimizers import ForeignOptimizer, why_no_clone
from collage_agent.intent.observed_storage import observe_storage
from collage_agent.intent.optimizer_clone import isolated, without_output_or_warnings
from collage_agent.intent.probe_runs import HOST, ProbeRun, gradients_of, same_displacements
from collage_agent.intent.selftest import SelfTestResult, run_selftest
from collage_agent.intent.shadow import Shadow
from collage_agent.intent.whole_optimizer import OptimizerCopy, WholeOptimizer
from collage_agent.intent.widening import Widening
from collage_agent.sample.stored_parts import OURS, Composition

__all__ = [
    "Intent",
    "IntentCache",
    "OwnRuleIntent",
    "choose_intent",
    "fitting_class",
]

_CLASSES: Final = (CollageAdamW, CollageAdam, CollageSGD, CollageLion)
_STEPS_ALIKE: Final = 4


class Intent(Protocol):
    """A source of u: the displacement of a step in exact arithmetic."""

    @property
    def kind(self) -> Literal["shadow", "rule", "whole-tensor", "whole-optimizer", "before-after"]:
        """How u is found, as reported with the run."""

    @property
    def composition(self) -> Composition:
        """Which states make up the stored weight."""

    @property
    def stochastic(self) -> bool | None:
        """Whether weights are seen to be rounded at random; None: not known."""

    @property
    def unexplained(self) -> str | None:
        """The state that keeps part of the weights in a way that is not understood; None if there is none."""

    def refresh(self, optimizer: Optimizer) -> None:
        """Copy what changes on the live instance; called once before each step whose u is needed."""

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        """Write u [n] fp64 to `out` and advance `state` in place; False where there is no u."""


class _ExactArithmetic(WideArithmetic):
    """fp64 in scratch, to the bits of `exact_displacement`."""

    def square_root(self, a: Tensor) -> Tensor:
        return torch.sqrt(a, out=self.take(a))


class OwnRuleIntent:
    """u from the rule of a CollageOptimizer; same calls as `Shadow`, no clone and no self-test.

    It equals `exact_displacement`: bit-identical, or within fp64's rounding for Adam by torch's fused kernel.
    """

    kind: Final = "rule"
    composition: Final = OURS
    unexplained: Final[str | None] = None

    def __init__(self, optimizer: CollageOptimizer, group: dict[str, Any]) -> None:
        self.stochastic: bool | None = _stochastic(group)
        self._displacement = optimizer.exact_rule()
        exact = getattr(self._displacement, "__func__", None)
        known = exact is CollageOptimizer.exact_displacement.__func__  # type: ignore[attr-defined]
        self._kind = type(optimizer) if known else None

    def refresh(self, optimizer: Optimizer) -> None:
        """Nothing is kept from one step to the next."""

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        """Write u [n] fp64 of the step to `out`; `parameter` is left as it was. True: there is a u.

        `state` holds joined averages [n] fp64 and `step`, the number of steps taken; it is advanced in place.
        Synchronises only if `step` is a tensor on a device.
        """
        step = int(state.get("step", 0)) + 1
        kind = self._kind if out.is_cpu else None
        if kind is not None and _is_fused(kind.rule_of(group), group):
            _write_fused(group, state, parameter, gradient, step, out)
        elif kind is not None and len(out) <= longest_chunk(HOST):
            # In the optimizer's own scratch: new memory for each operation costs more than the operations.
            workspace = shared_workspace(HOST, torch.float64, longest_chunk(HOST))
            workspace.restart(len(out))
            arithmetic = _ExactArithmetic(workspace, torch.float64)
            out.copy_(kind.exact_step(group, state, parameter, gradient, step, arithmetic))
        else:
            intended, after = self._displacement(group, state, parameter, gradient, step)
            state.update(after)
            out.copy_(intended)
        state["step"] = step
        return True


def _is_fused(rule: UpdateRule, group: dict[str, Any]) -> bool:
    """Whether torch's fused kernel of Adam makes the rule's step, in a pass over fp64 numbers on the host."""
    return type(rule) is AdamRule and (rule.decoupled or not group["weight_decay"])


def _write_fused(
    group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, step: int, out: Tensor
) -> None:
    """Adam's step from a weight of 0, so that no digit of u is lost, and decoupled decay."""
    amsgrad = bool(group["amsgrad"])
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
        if name not in state:
            state[name] = torch.zeros_like(parameter)
    beta1, beta2 = map(float, group["betas"])
    lr = float(group["lr"])
    adam(
        [out.zero_()],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if amsgrad else [],
        [torch.tensor(step - 1.0, dtype=torch.float32, device="cpu")],
        fused=True,
        amsgrad=amsgrad,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=0.0,
        eps=float(group["eps"]),
        maximize=group["maximize"],
    )
    out.sub_(parameter, alpha=lr * float(group["weight_decay"]))


class IntentCache:
    """Intents already chosen: optimizers with equal settings share theirs, so the self-test runs once."""

    def __init__(self) -> None:
        self._known: dict[object, list[Intent]] = {}
        self._fitting: dict[object, type[CollageOptimizer] | None] = {}

    def of(self, optimizer: Optimizer | ForeignOptimizer) -> list[Intent]:
        """One Intent for each of the optimizer's groups."""
        if isinstance(optimizer, ForeignOptimizer):
            return _intents_of_foreign(optimizer)
        settings = _settings_of(optimizer)
        if settings not in self._known:
            self._known[settings] = choose_intent(optimizer)
        return self._known[settings]

    def of_unknown_rounding(self) -> IntentCache:
        """The same for steps that are not taken by the optimizer's `step`: how they round was not seen."""
        found = IntentCache()
        found._fitting = self._fitting
        for settings, intents in self._known.items():
            found._known[settings] = copied = [copy.copy(intent) for intent in intents]
            for intent in copied:
                if not isinstance(intent, OwnRuleIntent):
                    vars(intent)["stochastic"] = None
        return found

    def fitting(self, optimizer: Optimizer) -> type[CollageOptimizer] | None:
        """The class of ours that takes the same steps; asked once for optimizers of equal settings."""
        settings = _settings_of(optimizer)
        if settings not in self._fitting:
            self._fitting[settings] = fitting_class(optimizer, self.of(optimizer))
        return self._fitting[settings]


def _intents_of_foreign(foreign: ForeignOptimizer) -> list[Intent]:
    """For an object that is not a torch optimizer: by a clone, if one can be stepped apart from the live
    weights."""
    reason = f"how {foreign.named} steps is not known (for updates of your own, see watch_tensor, watch_average)"
    if foreign.cloneable:
        try:
            return choose_intent(cast(Optimizer, foreign.given))
        except Exception as error:
            reason = f"{foreign.named} cannot be cloned: {type(error).__name__}: {error}"
    return [BeforeAfter(reason)] * len(foreign.param_groups)


def choose_intent(optimizer: Optimizer) -> list[Intent]:
    """One Intent per parameter group; groups with the same settings, learning rate and decay aside, share one.

    Runs the self-test, 5 to 35 ms a kind of group, on the host: synchronises no device. Prints, warnings and logs
    of the clones are suppressed; clones that print or log are muted at measured steps, too.
    """
    with without_output_or_warnings() as heard:
        chosen = _choose(optimizer)
    for intent in chosen:
        shadow = intent.shadow if isinstance(intent, WholeTensor | WholeOptimizer) else intent
        if isinstance(shadow, Shadow):
            shadow.is_verbose = bool(heard)
    return chosen


def _choose(optimizer: Optimizer) -> list[Intent]:
    if isinstance(optimizer, CollageOptimizer):
        return [OwnRuleIntent(optimizer, group) for group in optimizer.param_groups]
    leads_to_weights = why_no_clone(optimizer)
    if leads_to_weights is not None:
        return [BeforeAfter(leads_to_weights)] * len(optimizer.param_groups)
    chosen: dict[object, Intent] = {}
    for group in optimizer.param_groups:
        kind = _kind_of(group)
        if kind not in chosen:
            chosen[kind] = _intent_of_group(optimizer, group)
    return [chosen[_kind_of(group)] for group in optimizer.param_groups]


def fitting_class(optimizer: Optimizer, intents: Sequence[Intent]) -> type[CollageOptimizer] | None:
    """The class of ours whose steps move probe tensors as this optimizer's do in fp64, in all of its groups.

    None if no class does, or if a clone of the optimizer cannot show it, because it mixes elements or steps only
    rows. On the host, without a trace in the optimizer.
    """
    if isinstance(optimizer, CollageOptimizer):
        return type(optimizer)
    kinds = {
        _kind_of(group): (group, intent) for group, intent in zip(optimizer.param_groups, intents, strict=True)
    }
    if any(intent.kind not in ("shadow", "rule") or intent.composition.sparse for _, intent in kinds.values()):
        return None
    named = f"Collage{type(optimizer).__name__}"
    with without_output_or_warnings(), isolated(HOST):
        # Without weight decay Adam equals AdamW.
        for kind in sorted(_CLASSES, key=lambda kind: kind.__name__ != named):
            if all(_steps_alike(optimizer, group, intent, kind) for group, intent in kinds.values()):
                return kind
    return None


def _steps_alike(optimizer: Optimizer, group: dict[str, Any], intent: Intent, kind: type[CollageOptimizer]) -> bool:
    try:
        if isinstance(intent, BitsandbytesRule):
            return intent.follows(kind) and bool(kind.options_like(group))
        generator = torch.Generator().manual_seed(0)
        gradients = gradients_of([(24,)], generator)
        start = torch.randn(24, generator=generator, dtype=torch.float64)
        run, state = ProbeRun(optimizer, group, [start], Widening(), intent.composition), dict[str, Any]()
        build: Callable[..., CollageOptimizer] = kind
        options = build([torch.zeros(1)], strategy="plain").defaults | kind.options_like(run.group)
        for step in range(1, _STEPS_ALIKE + 1):
            [gradient] = next(gradients)
            before = run.parameters[0].clone()
            expected, state = kind.exact_displacement(options, state, before, gradient, step)
            if not same_displacements(run.step([gradient]), [expected]):
                return False
    except Exception:
        return False
    return True


def _intent_of_group(optimizer: Optimizer, group: dict[str, Any]) -> Intent:
    if follows_bitsandbytes_rule(optimizer):
        failure = rule_mismatch(optimizer, group)
        return BitsandbytesRule(optimizer) if failure is None else BeforeAfter(failure)
    found = run_selftest(optimizer, group)
    seen = observe_storage(optimizer, group, found)
    if found.kind == "before-after":
        return BeforeAfter(found.reason, seen.composition, seen.stochastic, seen.unexplained)
    failure = seen.failure or _failure_on_device(optimizer, group, found)
    if failure is not None:
        return BeforeAfter(failure, seen.composition, seen.stochastic, seen.unexplained)
    kind = ShadowByBetas if decays_otherwise(optimizer, group, found) else Shadow
    shadow = kind(
        optimizer, seen.composition, widens=found.widens, stochastic=seen.stochastic, unexplained=seen.unexplained
    )
    if found.kind == "whole-optimizer":
        return WholeOptimizer(shadow, found.reason, OptimizerCopy())
    return shadow if found.kind == "shadow" else WholeTensor(shadow, found.reason)


def _failure_on_device(optimizer: Optimizer, group: dict[str, Any], found: SelfTestResult) -> str | None:
    """Why the clone cannot step fp64 tensors where the weights are, or would wait for the device each time.

    Steps a probe there twice; nothing of it is read.
    """
    device = local_part(group["params"][0]).device if group["params"] else HOST
    if device.type in ("cpu", "meta"):
        return None
    name = type(optimizer).__name__
    try:
        with isolated(device):
            shadow, state = Shadow(optimizer, found.composition, widens=found.widens), dict[str, Any]()
            # Whole tensors may have to be matrices. The first step makes states, with copies from the host.
            probe, gradient = torch.zeros(2, 4, 4, dtype=torch.float64, device=device)
            shadow.step(group, state, probe, gradient)
            with _collect_sync_warnings(device) as waited:
                shadow.step(group, state, probe, gradient)
    except Exception as error:
        return f"{name} cannot step fp64 tensors on {device.type}: {type(error).__name__}: {error}"
    # The mode itself warns once in a process that it is a prototype.
    waits = any("called a synchronizing" in str(warning.message) for warning in waited)
    # A step size that is a number of all elements is read in the live step, too.
    if waits and found.kind != "whole-optimizer":
        return f"{name} waits for the {device.type} device in its step: its clone would too"
    return None


@contextmanager
def _collect_sync_warnings(device: torch.device) -> Iterator[list[Any]]:
    """Collects a warning for each time that the host waits for a CUDA device inside."""
    if device.type != "cuda":
        yield []
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as waited:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waited
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _kind_of(group: dict[str, Any]) -> object:
    """A key for the form of a step: names of the settings, and the values that are not plain numbers."""
    switches = []
    for key, value in sorted(group.items()):
        if key == "params" or isinstance(value, Tensor):
            continue
        plain_number = isinstance(value, int | float) and not isinstance(value, bool)
        switches.append((key, value != 0 if plain_number else repr(value)))
    tensors = sorted(key for key, value in group.items() if isinstance(value, Tensor) and key != "params")
    dtypes = frozenset(parameter.dtype for parameter in group["params"])
    return (tuple(switches), tuple(tensors), dtypes, torch.get_default_dtype())


def _settings_of(optimizer: Optimizer) -> object:
    """Equal for optimizers that step alike: class, run state on the instance, groups' settings and dtypes."""
    own = {key: _setting(value) for key, value in vars(optimizer).items() if not _is_common_attribute(key, value)}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: _setting(value) for key, value in group.items() if key != "params"}
        kinds = {(parameter.dtype, parameter.device) for parameter in group["params"]}
        groups.append((tuple(sorted(settings.items())), frozenset(kinds)))
    return type(optimizer), tuple(sorted(own.items())), tuple(groups)


def _is_common_attribute(name: str, value: object) -> bool:
    return name in ("state", "param_groups", "defaults") or name.endswith("_hooks") or callable(value)


def _setting(value: object) -> str:
    """A setting in comparable form; an object that can change equals only itself."""
    plain = isinstance(value, int | float | str | tuple | None)
    return repr(value) if plain else f"{type(value).__name__} {id(value)}"


def _stochastic(group: dict[str, Any]) -> bool:
    known = known_strategy(str(group.get("strategy")))
    return known is not None and known.stochastic_parameter
