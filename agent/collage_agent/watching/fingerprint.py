"""The strategy's fingerprint: how weights, gradients and states are really kept, beside what the user declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.choose import Intent
from collage_agent.optim import CollageOptimizer
from collage_agent.sample.gather import local
from collage_agent.sample.quantised import is_quantised, reading_dtype
from collage_agent.sample.stored import OURS, PLAIN, elementwise_state
from collage_agent.training.parameters import WatchedParameter
from collage_monitor import wire
from collage_monitor.strategies import STRATEGIES

__all__ = ["fingerprint", "observed_strategy"]

_UNKNOWN: Final = "unknown"
_NEARLY_ALL: Final = 0.9


def fingerprint(
    optimizer: Optimizer, watched: Sequence[WatchedParameter], intents: Sequence[Intent], declared: str | None
) -> wire.Fingerprint:
    """Dtypes as they are now, and what was observed at attach. Reads no value: synchronises no device."""
    parameters: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    states: dict[str, set[str]] = {}
    for entry in watched:
        parameter, elements = entry.parameter, entry.shard.elements
        parameters[_name(parameter.dtype)] += elements
        if parameter.grad is not None:
            gradients[_name(parameter.grad.dtype)] += elements
        state = optimizer.state.get(parameter, {})
        for key in elementwise_state(parameter, state):
            states.setdefault(key, set()).add(_kept_as(state, key))
    # Before the first step there are no states: what was seen at attach is what will be there.
    seen = {intents[entry.group].kept: None for entry in watched}
    made = [kept for kept in seen if states or kept is not OURS]
    residuals = [kept for kept in made if kept.residual and (kept.residual in states or not states)]
    masters = [kept.master for kept in made if kept.master and (kept.master in states or not states)]
    stochastic = {intents[entry.group].stochastic for entry in watched}
    return wire.Fingerprint(
        parameters=dict(parameters),
        gradients=dict(gradients),
        states={key: " and ".join(sorted(kinds)) for key, kinds in states.items()},
        master=masters[0] if masters else None,
        residual=residuals[0].residual if residuals else None,
        residual_sign=-1 if residuals and residuals[0].sign < 0 else 1,
        stochastic_rounding=stochastic.pop() if len(stochastic) == 1 else None,
        implementation=_implementation(optimizer, watched),
        findings=[
            *_findings(observed_strategy(optimizer, watched, intents), declared, states),
            *(_cast_master(key) for key in masters if _is_cast(key, optimizer, watched)),
        ],
    )


def observed_strategy(optimizer: Optimizer, watched: Sequence[WatchedParameter], intents: Sequence[Intent]) -> str:
    """How weights and states are seen to be kept, as a strategy's name; "unknown" where not seen, or mixed."""
    if isinstance(optimizer, CollageOptimizer):
        names = {str(group["strategy"]) for group in optimizer.param_groups}
        return names.pop() if len(names) == 1 else _UNKNOWN
    # fp32 weights beside 16-bit ones need no help, nor do small tensors: the others give the strategy its name.
    narrow = [entry for entry in watched if entry.parameter.dtype.itemsize < 4]
    elements: Counter[str] = Counter()
    for entry in narrow or watched:
        elements[_strategy_of(optimizer, entry, intents[entry.group])] += entry.shard.elements
    name, most = elements.most_common(1)[0] if elements else (_UNKNOWN, 0)
    return name if most >= _NEARLY_ALL * elements.total() else _UNKNOWN


def _strategy_of(optimizer: Optimizer, entry: WatchedParameter, intent: Intent) -> str:
    state = optimizer.state.get(entry.parameter, {})
    kept = intent.kept
    if kept.master is not None and state.get(kept.master) is not None:
        # Loading a state with torch's load_state_dict casts a master weight to the weight's dtype.
        wider = state[kept.master].dtype.itemsize > entry.parameter.dtype.itemsize
        return "master-weights" if wider else "plain"
    if kept.residual is not None and (not state or state.get(kept.residual) is not None):
        return "kahan"
    if kept.master is not None and not state:
        return "master-weights"
    if intent.stochastic:
        return "stochastic"
    if intent.stochastic is None and kept == PLAIN and entry.parameter.dtype.itemsize < 4:
        return _UNKNOWN
    floats = [
        reading_dtype(state, key)
        for key, value in elementwise_state(entry.parameter, state).items()
        if value.is_floating_point()
    ]
    wide = floats and all(dtype.itemsize >= 4 for dtype in floats)
    quantised = any("quantised" in _kept_as(state, key) for key in elementwise_state(entry.parameter, state))
    return "fp32-states" if wide and not quantised and entry.parameter.dtype.itemsize < 4 else "plain"


def _kept_as(state: Mapping[str, Any], key: str) -> str:
    """In words: a dtype, or how a state is quantised."""
    tensor: Tensor = local(state[key])
    if is_quantised(tensor):
        return f"{type(tensor).__name__}, quantised"
    if tensor.dtype == torch.uint8 and reading_dtype(state, key) != torch.uint8:
        return "8-bit blocks, quantised"
    return _name(tensor.dtype)


def _implementation(optimizer: Optimizer, watched: Sequence[WatchedParameter]) -> str:
    """The path that a step takes by the group's switches: "fused", "foreach" or "for-loop"; "unknown" elsewhere."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if "foreach" not in group:
        return _UNKNOWN
    if group["foreach"] is not None:
        return "foreach" if group["foreach"] else "for-loop"
    if not type(optimizer).__module__.startswith("torch.optim"):
        return _UNKNOWN
    on_device = any(local(entry.parameter).device.type != "cpu" for entry in watched)
    return "foreach" if on_device else "for-loop"


def _findings(observed: str, declared: str | None, states: Mapping[str, set[str]]) -> list[str]:
    found = []
    if declared is not None and observed not in (declared, _UNKNOWN):
        found.append(
            f"declared {declared} ({STRATEGIES[declared].keeps}), but {observed} is what is seen "
            f"({STRATEGIES[observed].keeps}): change strategy= or the optimizer"
        )
    for key, kinds in states.items():
        if len(kinds) > 1:
            found.append(f"{key} is kept in several ways: {', '.join(sorted(kinds))}")
    return found


def _is_cast(key: str, optimizer: Optimizer, watched: Sequence[WatchedParameter]) -> bool:
    """Whether a 16-bit weight has its master weight in its own dtype."""
    narrow = [entry.parameter for entry in watched if entry.parameter.dtype.itemsize < 4]
    kept = ((parameter, optimizer.state.get(parameter, {}).get(key)) for parameter in narrow)
    return any(isinstance(master, Tensor) and master.dtype == parameter.dtype for parameter, master in kept)


def _cast_master(key: str) -> str:
    return (
        f"the master weight {key} has the dtype of the weight: loading a checkpoint with load_state_dict casts it; "
        "make it anew in fp32 after loading"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
