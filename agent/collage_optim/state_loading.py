"""Loading states: fp32 states of 16-bit parameters survive; states of another strategy are converted.

`base.py` calls it from `load_state_dict`, `distributed.py` and the agent's `audit/conversion.py` convert by it.
Names of states in a checkpoint are fixed: old files stay readable (`tests/optim/test_checkpoint_names.py`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_optim import integer_codes
from collage_optim.blocks import BLOCK_ELEMENTS
from collage_optim.hyperparameter_checks import TORCH_FORMS
from collage_optim.strategies import (
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    SCALE_SUFFIX,
    StateStorage,
    StorageStrategy,
    check_dtype,
    known_strategy,
    strategy_named,
)
from collage_optim.update_rules import Group, Moment

__all__ = [
    "CONVERTED_FROM",
    "OF_WRAPPERS",
    "RESIDUALS_FROM",
    "convert",
    "groups_like",
    "initial_state",
    "load",
    "note_conversion",
    "options_like",
    "take_over",
    "with_our_names",
]

_BUILT_IN_OPTIONS = ("strategy", "arithmetic", "compiled", "on_external_write", "rule")
"""Group options that belong to this optimizer: a checkpoint does not change them."""

RESIDUALS_FROM = "residuals_from"
"""Group entry: the step up to which a residual of 0, or a master weight equal to its weight, lost nothing. Weights
had none until they were converted, or no step had moved them, as at a rate of 0."""
CONVERTED_FROM = "converted_from"
"""Group entry: what the group was converted from, a strategy that keeps nothing beside weights; "" if nothing."""

OF_WRAPPERS = ("z",)
"""States that a wrapper keeps beside ours: schedulefree's its weight."""

NOT_OF_THE_RULE = frozenset(
    ("strategy", "arithmetic", "compiled", "on_external_write", "seed", RESIDUALS_FROM, CONVERTED_FROM)
)
"""Group options that say how a rule's numbers are kept and computed."""

_SUFFIXES = (LOW_COMPONENT_SUFFIX, SCALE_SUFFIX)
_KEPT_BESIDE = (PARAMETER_LOW, MASTER_PARAMETER)
_OF_EVERY_RULE = ("maximize", "seed", RESIDUALS_FROM, CONVERTED_FROM)


def load(
    optimizer: Optimizer,
    moments_of: Callable[[Group], tuple[Moment, ...]],
    load_as_torch: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
) -> None:
    """Load through torch's own method, then restore what it casts, and convert states of another strategy.

    moments_of: the moving averages of one of the optimizer's groups, under the options that were loaded.
    torch casts every floating-point state to its parameter's dtype. The pre-hook registered here runs last, so it
    sees the dict as all other hooks left it. Raises ValueError for a state of another rule or shape, by name and
    before anything has changed; for another number of groups or parameters torch does.
    """
    built = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    seen: dict[str, Any] = {}

    def check(_: Optimizer, loaded: dict[str, Any]) -> None:
        seen.update(loaded)
        groups, saved = optimizer.param_groups, loaded["param_groups"]
        if [len(group["params"]) for group in groups] == [len(group["params"]) for group in saved]:
            for group, old in zip(groups, saved, strict=True):
                _check_rule(optimizer, group, old)
                moments = moments_of(_merged(group, old))
                for parameter, number in zip(group["params"], old["params"], strict=True):
                    _check_state(optimizer, _label(old, number), moments, parameter, loaded["state"].get(number))

    hook = optimizer.register_load_state_dict_pre_hook(check)
    try:
        load_as_torch(state_dict)
    finally:
        hook.remove()
    for group, options, saved in zip(optimizer.param_groups, built, seen["param_groups"], strict=True):
        group.update(_merged(options, group))
        for name in TORCH_FORMS:
            group.pop(name, None)
        group.update({name: True for name in TORCH_FORMS if options.get(name)})
        states = [seen["state"].get(number) for number in saved["params"]]
        note_conversion(group, saved.get("strategy"), [state for state in states if state])
        for parameter, original in zip(group["params"], states, strict=True):
            if original:
                optimizer.state[parameter] = _loaded(moments_of(group), group, parameter, original)


def with_our_names(group: Group, own: Mapping[str, Any]) -> Group:
    """The group with what other packages call otherwise: betas one by one, or a momentum as the first of them."""
    if "betas" in own and "betas" not in group and {"beta1", "beta2"} <= group.keys():
        return {**group, "betas": (group["beta1"], group["beta2"])}
    if "momentum" in own and "momentum" not in group and tuple(group.get("betas", (0, 1)))[1] == 0:
        return {**group, "momentum": group["betas"][0]}
    return group


def options_like(name: str, defaults: Group, group: Group) -> dict[str, Any]:
    """The options of another optimizer's group that ours of this name, with these defaults, has too."""
    own = {key: value for key, value in defaults.items() if key not in NOT_OF_THE_RULE}
    group = with_our_names(group, own)
    off = {"weight_decay": 0.0} if "weight_decay" in own else {}
    off.update({key: value for key, value in own.items() if value is False or key == "dampening"})
    missing = sorted(own.keys() - off.keys() - group.keys() - {"decoupled_weight_decay"})
    decoupled = own.get("decoupled_weight_decay")
    if missing or group.get("decoupled_weight_decay", decoupled) != decoupled:
        told = f"no {', '.join(missing)}" if missing else "decay of another kind"
        adam = "CollageAdamW" if group.get("decoupled_weight_decay") else "CollageAdam"
        fits = "CollageSGD" if "dampening" in group else adam if {"betas", "eps"} <= group.keys() else ""
        hint = f"; use {fits}.from_optimizer" if fits not in ("", name) else ""
        raise ValueError(f"its groups have {told}, unlike {name}: it is of another update rule{hint}")
    return {**off, **{key: value for key, value in group.items() if key in own}}


def groups_like(options: dict[str, Any], group: Group, strategy: str | None) -> Iterator[dict[str, Any]]:
    """Groups of these options for another's group: its 16-bit weights under `strategy`, others `plain`."""
    names = group.get("param_names")
    options.update({"initial_lr": group["initial_lr"]} if "initial_lr" in group else {})
    narrow = [parameter.dtype.itemsize < 4 for parameter in group["params"]]
    for kept in (True, False):
        chosen = [index for index, own in enumerate(narrow) if own is kept]
        if chosen or (kept and not narrow):
            part = {"params": [group["params"][index] for index in chosen], **options}
            part["strategy"] = strategy if kept else "plain"
            yield part if names is None else {**part, "param_names": [names[index] for index in chosen]}


def initial_state(strategy: StorageStrategy, moments: Iterable[Moment], parameter: Tensor) -> dict[str, Tensor]:
    """The states of a parameter before its first step. Raises ValueError where the strategy cannot keep it."""
    check_dtype(strategy, parameter.dtype)
    # As in torch: a counter of a 16-bit default dtype would stop at 256.
    double = torch.get_default_dtype() == torch.float64
    state = {"step": torch.tensor(0.0, dtype=torch.float64 if double else torch.float32)}
    for moment in moments:
        storage = strategy.moment_storage(moment.second)
        state.update(integer_codes.empty_state(moment.name, storage, moment.second, parameter))
    if strategy.parameter_state == MASTER_PARAMETER:
        state[MASTER_PARAMETER] = parameter.detach().to(torch.float32, copy=True)
    elif strategy.parameter_state == PARAMETER_LOW:
        state[PARAMETER_LOW] = integer_codes.empty_low(strategy.parameter, parameter)
    return state


def take_over(made: Optimizer, other: Optimizer) -> None:
    """Give `made` the states of `other` for the same parameters, converted like those of a checkpoint."""
    states: dict[int, Any] = {}
    loaded = made.state_dict()
    groups_of = {parameter: group for group in other.param_groups for parameter in group["params"]}
    for group, saved in zip(made.param_groups, loaded["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            held = {key: value for key, value in other.state.get(parameter, {}).items() if value is not None}
            states.update({number: held} if any(isinstance(value, Tensor) for value in held.values()) else {})
            source = groups_of[parameter]
            saved["strategy"] = source.get("strategy")
            saved.update({key: source[key] for key in (RESIDUALS_FROM, CONVERTED_FROM) if key in source})
    if states:
        made.load_state_dict({"state": states, "param_groups": loaded["param_groups"]})


def _merged(built: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group after loading, without its parameters."""
    own = {key: value for key, value in built.items() if key in _BUILT_IN_OPTIONS or key not in loaded}
    if loaded.get("seed") is None:
        own["seed"] = built.get("seed")
    return {**loaded, **own}


def _check_rule(optimizer: Optimizer, group: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Raise ValueError where the options are not those of the optimizer's rule."""
    kind = type(optimizer).__name__
    # A rule of another package may have decoupled decay as an option like any other.
    for name in ("rule",) if "rule" in group else ("decoupled_weight_decay",):
        if name in group and old.get(name, group[name]) != group[name]:
            raise ValueError(
                f"the checkpoint has {name}={old[name]!r}, {kind} has {group[name]!r}: it is of another update rule"
            )
    own = set(optimizer.defaults).difference(_BUILT_IN_OPTIONS, _OF_EVERY_RULE, TORCH_FORMS)
    missing = sorted(own.difference(old))
    if missing:
        raise ValueError(
            f"the checkpoint's groups have no {', '.join(missing)}, which {kind} needs: "
            "it is of another update rule"
        )


def _check_state(
    optimizer: Optimizer,
    label: str,
    moments: tuple[Moment, ...],
    parameter: Tensor,
    state: Mapping[str, Any] | None,
) -> None:
    """Raise ValueError where a state is not that of these averages, or of another shape than its weight."""
    if not state:
        return
    kind = type(optimizer).__name__
    needed = [moment.name for moment in moments]
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and key != "step"}
    missing = [name for name in needed if name not in integer_codes.unpacked(tensors)]
    known = {*needed, *OF_WRAPPERS, *(name + suffix for name in needed for suffix in _SUFFIXES), *_KEPT_BESIDE}
    strange = [key for key, value in tensors.items() if key not in known and value.shape == parameter.shape]
    if missing or strange:
        found, wanted = ", ".join(tensors) or "no average", ", ".join(needed) or "no average"
        raise ValueError(f"the state of {label} holds {found}; {kind} keeps {wanted}: it is of another update rule")
    # One scale a block, so the number of elements decides how many there are.
    blocks = torch.Size([math.ceil(parameter.numel() / BLOCK_ELEMENTS)])
    for key, value in tensors.items():
        expected = blocks if key.endswith(SCALE_SUFFIX) else parameter.shape
        if key in known and value.shape != expected:
            raise ValueError(
                f"the state of {label} holds {key} of shape {tuple(value.shape)}, its weight has shape "
                f"{tuple(parameter.shape)}: it is of another weight"
            )


def _label(group: Mapping[str, Any], number: Any) -> str:
    """A parameter of a checkpoint, by name where there is one."""
    names = group.get("param_names")
    return f"parameter {number}" if names is None else str(names[list(group["params"]).index(number)])


def _loaded(
    moments: tuple[Moment, ...], group: dict[str, Any], parameter: Tensor, original: dict[str, Any]
) -> dict[str, Tensor]:
    """One parameter's states from a checkpoint, in the dtypes of the checkpoint, then converted to the group's."""
    state = {
        key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
        for key, value in original.items()
    }
    if not isinstance(state.get("step"), Tensor):
        # torch's SGD keeps no counter; that a state exists says that the first step is over.
        state["step"] = torch.tensor(float(state.get("step", 1.0)))
    seconds = {moment.name: moment.second for moment in moments}
    return convert(state, seconds, parameter, strategy_named(group["strategy"]))


def note_conversion(group: dict[str, Any], was: Any, states: Iterable[Mapping[str, Any]]) -> None:
    """Note in the group that residuals or master weights begin with nothing to keep: their states had none.

    was: the strategy that these come from, None where the checkpoint names none, as torch's. If its states beside
    the weights are missing, they were dropped, which is no conversion. Reads the counters of steps.
    """
    source = known_strategy(was) if isinstance(was, str) else None
    if strategy_named(group["strategy"]).parameter_state is None:
        return
    if source is not None and source.parameter_state is not None:
        return
    empty = [state for state in states if not any(key in state for key in _KEPT_BESIDE)]
    if empty:
        group[RESIDUALS_FROM] = max(int(state.get("step", 1)) for state in empty)
        group[CONVERTED_FROM] = source.name if source is not None else _seen_strategy(empty[0])


def _seen_strategy(state: Mapping[str, Any]) -> str:
    """The strategy that states without a residual or a name resemble: torch's, in 16 bits or wider."""
    dtypes = {value.dtype for key, value in state.items() if isinstance(value, Tensor) and key != "step"}
    return "float32 states" if dtypes & {torch.float32, torch.float64} else "plain"


def convert(
    state: dict[str, Tensor], moments: dict[str, bool], parameter: Tensor, strategy: StorageStrategy
) -> dict[str, Tensor]:
    """States of any strategy, converted to those of `strategy`; tensors that already fit are kept as they are.

    moments: name to whether it averages squares. The value of each component is kept as well as the new form can:
    rounded to nearest, in a single number, a pair, fp32, or in fewer bits.
    """
    converted = {"step": state["step"]}
    for name, second in sorted(moments.items()):
        converted.update(_average_of(state, name, strategy.moment_storage(second), second, parameter, converted))
    converted.update(_parameter_components(state, parameter, strategy))
    converted.update({key: state[key] for key in OF_WRAPPERS if key in state})
    return converted


def _average_of(
    state: dict[str, Tensor],
    name: str,
    storage: StateStorage,
    second: bool,
    parameter: Tensor,
    converted: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The entries of one average, `converted` being those before it."""
    empty = integer_codes.empty_state(name, storage, second, parameter)
    if name not in integer_codes.unpacked(state):
        return empty
    held = {key: state[key] for key in (name, name + LOW_COMPONENT_SUFFIX, name + SCALE_SUFFIX) if key in state}
    if {key: tensor.dtype for key, tensor in held.items()} == {key: tensor.dtype for key, tensor in empty.items()}:
        return held
    value = integer_codes.stored_value(state, name).to(torch.float32)
    return integer_codes.state_of(name, value, storage, second, parameter, converted)


def _parameter_components(
    state: dict[str, Tensor], parameter: Tensor, strategy: StorageStrategy
) -> dict[str, Tensor]:
    """The weight's second component: what the visible weight lacks, or the whole weight in fp32.

    The visible weight is never changed. If the stored one doesn't round to it, the missing part is kept as far as
    possible: up to half a gap, for bits below the weight's own.
    """
    needed, visible = strategy.parameter_state, parameter.detach()
    if needed is None:
        return {}
    held = state.get(PARAMETER_LOW)
    integers = held is not None and not held.dtype.is_floating_point
    if held is not None and visible.dtype != (torch.bfloat16 if integers else held.dtype):
        # It belongs to a weight of another format, which was then rounded to this one.
        state = {key: tensor for key, tensor in state.items() if key != PARAMETER_LOW}
    stored = state.get(MASTER_PARAMETER)
    if stored is None:
        stored = integer_codes.stored_value(state, "parameter", visible)
    if needed == MASTER_PARAMETER:
        return {needed: stored.to(torch.float32)}
    low = integer_codes.empty_low(strategy.parameter, visible)
    held = state.get(needed)
    if held is not None and held.dtype == low.dtype:
        return {needed: held}
    if low.dtype.is_floating_point:
        return {needed: (stored.to(torch.float64) - visible).to(torch.float32).to(low.dtype)}
    integer_codes.store_low(stored.to(torch.float32), visible, low)
    return {needed: low}
