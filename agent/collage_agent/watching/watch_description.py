"""The description of a watch: optimizer, source of u, how everything is really kept, its bytes.

The result is `wire.WatchInfo`, which the dashboard shows and alerts read. The contract defines its fields; the
sentences in `notes` are free.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
from collage_optim import CONVERTED_FROM, LOW_COMPONENT_SUFFIX, RESIDUALS_FROM, CollageOptimizer
from collage_optim.names import dtype_name
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

import collage_monitor
from collage_agent.intent.before_after import BeforeAfter, WholeTensor
from collage_agent.intent.intent_choice import Intent
from collage_agent.sample.quantised_states import is_quantised, reading_dtype
from collage_agent.sample.remainder_codes import codes_of
from collage_agent.sample.state_mappings import state_of, states_of
from collage_agent.sample.stored_parts import OURS, PLAIN, Composition, elementwise_state, factored_state, form_of
from collage_agent.step.rotation import ELEMENTS_A_STEP, IN_PARTS, is_whole, too_large
from collage_agent.training.watched_parameters import WatchedParameter
from collage_agent.watch_options import WatchOptions
from collage_agent.watching.trained_parameters import describe_trained
from collage_monitor import wire
from collage_monitor.strategies import STRATEGIES

__all__ = ["describe", "joined", "notes_on"]

_UNKNOWN: Final = "unknown"
_FOUND: Final[Mapping[str, str]] = {
    "whole-tensor": "whole tensors of group {} in rotation",
    "whole-optimizer": "a copy of the whole optimizer is stepped for group {}",
    "before-after": "only what changed is known of group {}",
}
_SCALAR: Final = torch.Size([])
_NEARLY_ALL: Final = 0.9
_CLOSURE_NOTE = "steps evaluate a closure repeatedly: no one gradient leads to them, only what changed is measured"


def notes_on(
    watched: Sequence[WatchedParameter],
    intents: Sequence[Intent],
    *,
    left_out: Collection[str],
    shared_by: str | None,
    cast_to: Collection[str],
) -> list[str]:
    """Sentences about tensors that are not measured, or measured differently.

    left_out: names of tensors. shared_by: who shares out tensors over ranks. cast_to: dtypes of the forward pass.
    """
    notes = [f"left out: {', '.join(left_out)}"] if left_out else []
    whole = [entry for entry in watched if isinstance(intents[entry.group], WholeTensor)]
    if parts := sum(not is_whole(entry) for entry in whole):
        notes.append(f"{parts} tensors are {IN_PARTS}")
    if shared_by is not None:
        notes.append(f"tensors are shared out over ranks by {shared_by}")
    if cast_to:
        cast = ", ".join(cast_to)
        notes.append(f"shards are cast to {cast} for the forward pass, after the step: that rounding is not seen")
    return notes


def describe(
    optimizer: Optimizer,
    options: WatchOptions,
    watched: Sequence[WatchedParameter],
    intents: Sequence[Intent],
    *,
    notes: Sequence[str],
    closure: bool,
    in_backward: bool = False,
    fitting: type[CollageOptimizer] | None = None,
    sparse: Collection[str] = (),
) -> wire.WatchInfo:
    """One optimizer, for `joined`; where groups differ, the larger part speaks and the reason names the rest.

    fitting: the class of ours that takes the same steps. sparse: names of parameters with sparse gradients.
    in_backward: hooks on the parameters step them in the backward pass.
    """
    dtypes: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    reasons: dict[str, None] = {}
    alike = _kept_alike(optimizer, watched, intents)
    kinds = [(members[0], sum([entry.shard.elements for entry in members])) for members in alike]
    for entry, elements in kinds:
        dtypes[dtype_name(entry.parameter.dtype)] += elements
        intent = intents[entry.group]
        source = intent.source if isinstance(intent, BeforeAfter) else intent.kind
        sources[source] += elements
        if isinstance(intent, BeforeAfter):
            reasons[f"{_FOUND[source].format(entry.group)}: {intent.reason}"] = None
    rotating = [] if options.sample == "all" else watched
    large = sum(too_large(entry) for entry in rotating if isinstance(intents[entry.group], WholeTensor))
    if large:
        reasons[
            f"{large} tensors of more than {ELEMENTS_A_STEP} elements have no turn: only what changed is known of "
            'them; watch(…, sample="all") measures them too'
        ] = None
    strategy = _observed_strategy(optimizer, kinds, intents)
    trained = describe_trained(optimizer, alike, strategy, fitting, sparse)
    intent_kind: Any = "before-after" if closure else _most_common(sources, "shadow")
    return wire.WatchInfo(
        optimizer=type(optimizer).__name__,
        strategy=options.strategy,
        observed_strategy=strategy,
        dtype=_most_common(dtypes, "unknown"),
        intent=intent_kind,
        intent_reason="; ".join([*reasons, *([_CLOSURE_NOTE] if closure else []), *notes]),
        parameters=sum(dtypes.values()),
        every=options.every,
        sample=options.sample,
        oracle=options.oracle,
        agent_version=collage_monitor.__version__,
        host=socket.gethostname(),
        fingerprint=msgspec.structs.replace(
            _fingerprint(optimizer, kinds, intents, options.strategy),
            layer_rounds_at_random=_layer_rounds_at_random(watched, intents),
        ),
        conversion=_conversion(optimizer),
        trained=[msgspec.structs.replace(trained, in_backward=in_backward)],
    )


def _conversion(optimizer: Optimizer) -> wire.Conversion | None:
    """The newest of the groups' conversions, from our optimizers' notes in them."""
    found = [
        wire.Conversion(
            source=str(group[CONVERTED_FROM]), target=str(group["strategy"]), step=int(group[RESIDUALS_FROM])
        )
        for group in optimizer.param_groups
        if isinstance(optimizer, CollageOptimizer) and group.get(CONVERTED_FROM)
    ]
    return max(found, key=lambda conversion: conversion.step, default=None)


def _kept_alike(
    optimizer: Optimizer, watched: Sequence[WatchedParameter], intents: Sequence[Intent]
) -> list[list[WatchedParameter]]:
    """The watched parameters by their storage: one pass over perhaps 20,000 states, while everything else reads
    only a few."""
    found: dict[object, list[WatchedParameter]] = {}
    kept, gradients = states_of(optimizer), [intent.composition.gradient for intent in intents]
    for entry in watched:
        parameter = entry.parameter
        gradient = getattr(parameter, gradients[entry.group], None)
        of_gradient = None if gradient is None else gradient.dtype
        form = form_of(parameter, kept(parameter, {}))
        key = entry.group, parameter.dtype, parameter.device, of_gradient, form
        alike = found.get(key)
        if alike is None:
            alike = found[key] = []
        alike.append(entry)
    return list(found.values())


def joined(infos: Sequence[wire.WatchInfo]) -> wire.WatchInfo:
    """The watch as it travels, of one optimizer or several: names side by side, the larger part speaks where they
    differ."""
    by_size = sorted(infos, key=lambda info: -info.parameters)
    names = dict.fromkeys(info.optimizer for info in infos)
    observed = {info.observed_strategy for info in infos}
    reasons = dict.fromkeys(info.intent_reason for info in infos if info.intent_reason)
    return msgspec.structs.replace(
        by_size[0],
        optimizer=" + ".join(names)[: wire.LIMITS["name_characters"]],
        observed_strategy=observed.pop() if len(observed) == 1 else "unknown",
        intent_reason="; ".join(reasons),
        parameters=sum(info.parameters for info in infos),
        fingerprint=_together([info.fingerprint for info in by_size if info.fingerprint is not None]),
        conversion=next((info.conversion for info in by_size if info.conversion is not None), None),
        trained=[entry for info in infos for entry in info.trained],
        resume_losses=[loss for info in infos for loss in info.resume_losses],
        launch_doubts=[doubt for info in infos for doubt in info.launch_doubts],
        continuation=next((info.continuation for info in by_size if info.continuation is not None), None),
    )


def _together(known: Sequence[wire.Fingerprint]) -> wire.Fingerprint | None:
    """One fingerprint of several, the largest optimizer's first: of master weights and residuals the first that
    there are, elements, states and findings of all. Layers are named only where they are rounded differently."""
    if not known:
        return None
    parameters: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    states: dict[str, str] = {}
    factored: dict[str, str] = {}
    for entry in known:
        parameters.update(entry.parameters)
        gradients.update(entry.gradients)
        states = {**entry.states, **states}
        factored = {**entry.factored, **factored}
    findings = list(dict.fromkeys(finding for entry in known for finding in entry.findings))
    unexplained = dict.fromkeys(entry.unexplained for entry in known if entry.unexplained is not None)
    masters = [entry.master for entry in known if entry.master]
    with_residual = [entry for entry in known if entry.residual] or known
    stepping = [entry for entry in known if entry.parameters] or known
    stochastic = {entry.stochastic_rounding for entry in stepping}
    alike = len(stochastic) == 1 and None not in stochastic
    rounding = {name: random for entry in known for name, random in entry.layer_rounds_at_random.items()}
    return wire.Fingerprint(
        parameters=dict(parameters),
        gradients=dict(gradients),
        states=states,
        factored=factored,
        master=masters[0] if masters else None,
        residual=with_residual[0].residual,
        residual_sign=with_residual[0].residual_sign,
        stochastic_rounding=stochastic.pop() if alike else None,
        layer_rounds_at_random={} if alike else rounding,
        implementation=" and ".join(dict.fromkeys(entry.implementation for entry in stepping)),
        findings=findings,
        unexplained="; ".join(unexplained) or None,
    )


def _most_common(counted: Counter[str], otherwise: str) -> str:
    """The value that most elements have; a rank may hold none."""
    return counted.most_common(1)[0][0] if counted else otherwise


def _fingerprint(
    optimizer: Optimizer,
    kinds: Sequence[tuple[WatchedParameter, int]],
    intents: Sequence[Intent],
    declared: str | None,
) -> wire.Fingerprint:
    """The present dtypes, and the observations at attach. Reads no value: synchronises no device.

    kinds: one parameter of those that are kept alike, and the elements of all of them.
    """
    parameters: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    states: dict[str, set[str]] = {}
    factored: dict[str, set[str]] = {}
    watched = [entry for entry, _ in kinds]
    for entry, elements in kinds:
        parameter = entry.parameter
        parameters[dtype_name(parameter.dtype)] += elements
        composition = intents[entry.group].composition
        if (gradient := composition.gradient_of(parameter)) is not None:
            gradients[dtype_name(gradient.dtype)] += elements
        state = state_of(optimizer, parameter)
        for key in elementwise_state(parameter, state):
            states.setdefault(key, set()).add(_kept_as(state, key, composition))
        for key, value in factored_state(parameter, state).items():
            factored.setdefault(key, set()).add(dtype_name(value.dtype))
    # Before the first step there are no states: use the observations at attach.
    seen = {intents[entry.group].composition: None for entry in watched}
    made = [one for one in seen if states or one is not OURS]
    residuals = [one for one in made if one.residual and (one.residual in states or not states)]
    masters = [one.master for one in made if one.master and (one.master in states or not states)]
    stochastic = {intents[entry.group].stochastic for entry in watched}
    unexplained = dict.fromkeys(_unexplained(optimizer, entry, intents[entry.group]) for entry in watched)
    return wire.Fingerprint(
        parameters=dict(parameters),
        gradients=dict(gradients),
        states={key: " and ".join(sorted(kinds)) for key, kinds in states.items()},
        factored={key: " and ".join(sorted(kinds)) for key, kinds in factored.items()},
        master=masters[0] if masters else None,
        residual=residuals[0].residual if residuals else None,
        residual_sign=-1 if residuals and residuals[0].sign < 0 else 1,
        stochastic_rounding=stochastic.pop() if len(stochastic) == 1 else None,
        implementation=_implementation(optimizer, watched, intents),
        findings=[
            *_findings(_observed_strategy(optimizer, kinds, intents), declared, states),
            *(_cast_master(key) for key in masters if _is_cast(key, optimizer, watched)),
            *dict.fromkeys(_cast_remainders(optimizer, watched, intents)),
        ],
        unexplained="; ".join(told for told in unexplained if told is not None) or None,
    )


def _layer_rounds_at_random(watched: Sequence[WatchedParameter], intents: Sequence[Intent]) -> dict[str, bool]:
    seen = {entry.name: intents[entry.group].stochastic for entry in watched}
    return {name: stochastic for name, stochastic in seen.items() if stochastic is not None}


def _observed_strategy(
    optimizer: Optimizer, kinds: Sequence[tuple[WatchedParameter, int]], intents: Sequence[Intent]
) -> str:
    """The observed strategy of weights and states; "unknown" if not observed, or mixed.

    kinds: one parameter of those that are kept alike, and the elements of all of them.
    """
    if isinstance(optimizer, CollageOptimizer):
        names = {str(group["strategy"]) for group in optimizer.param_groups}
        return names.pop() if len(names) == 1 else _UNKNOWN
    # fp32 weights need no strategy, so in a mixed model only the 16-bit ones name it, weighted by their size.
    narrow = [(entry, elements) for entry, elements in kinds if entry.parameter.dtype.itemsize < 4]
    found: Counter[str] = Counter()
    for entry, elements in narrow or kinds:
        found[_strategy_of(optimizer, entry, intents[entry.group])] += elements
    name, most = found.most_common(1)[0] if found else (_UNKNOWN, 0)
    return name if most >= _NEARLY_ALL * found.total() else _UNKNOWN


def _strategy_of(optimizer: Optimizer, entry: WatchedParameter, intent: Intent) -> str:
    state = state_of(optimizer, entry.parameter)
    composition = intent.composition
    if composition.master is not None and state.get(composition.master) is not None:
        # Loading a state with torch's load_state_dict casts a master weight to the weight's dtype.
        wider = state[composition.master].dtype.itemsize > entry.parameter.dtype.itemsize
        return "master-weights" if wider else "plain"
    if composition.residual is not None and (not state or state.get(composition.residual) is not None):
        return "kahan" if composition.code is None else "integer-remainder"
    if composition.master is not None and not state:
        return "master-weights"
    if intent.stochastic:
        return "stochastic"
    if intent.stochastic is None and composition.is_plain and entry.parameter.dtype.itemsize < 4:
        return _UNKNOWN
    if entry.parameter.dtype.itemsize >= 4:
        return "plain"
    kept_by_element = elementwise_state(entry.parameter, state)
    floats = [reading_dtype(state, key) for key, value in kept_by_element.items() if value.is_floating_point()]
    wide = floats and all(dtype.itemsize >= 4 for dtype in floats)
    quantised = any("quantised" in _kept_as(state, key, composition) for key in kept_by_element)
    return "fp32-states" if wide and not quantised else "plain"


def _unexplained(optimizer: Optimizer, entry: WatchedParameter, intent: Intent) -> str | None:
    """The observations at attach; if no clone could be watched, it mentions integers beside a 16-bit weight."""
    if intent.unexplained is not None or intent.kind != "before-after" or not intent.composition.is_plain:
        return intent.unexplained
    state = state_of(optimizer, entry.parameter)
    found = [
        f"{key} ({dtype_name(value.dtype)})"
        for key, value in elementwise_state(entry.parameter, state).items()
        if any(codes_of(reading_dtype(state, key), entry.parameter.dtype))
    ]
    return (
        f"{' and '.join(found)} may complete the weights: no clone could be watched to see how" if found else None
    )


def _cast_remainders(
    optimizer: Optimizer, watched: Sequence[WatchedParameter], intents: Sequence[Intent]
) -> Iterator[str]:
    for entry in watched:
        composition = intents[entry.group].composition
        if composition is OURS or composition.code is None:
            continue
        remainder = state_of(optimizer, entry.parameter).get(str(composition.residual))
        if remainder is not None and remainder.is_floating_point():
            yield (
                f"the integer remainder {composition.residual} has become {dtype_name(remainder.dtype)}: loading a "
                "checkpoint with load_state_dict casts it, and most of its bits are lost"
            )


def _kept_as(state: Mapping[str, Any], key: str, composition: Composition = PLAIN) -> str:
    """In words: a dtype, how integers complete the weight, or how a state is quantised."""
    tensor: Tensor = local_part(state[key])
    if is_quantised(tensor):
        return f"{type(tensor).__name__}, quantised"
    if tensor.dtype == torch.uint8 and reading_dtype(state, key) != torch.uint8:
        return "8-bit blocks, quantised"
    if key == composition.residual and composition.code is not None and not tensor.is_floating_point():
        return f"{dtype_name(tensor.dtype)}: {composition.code_in(tensor.dtype).words}"
    if reading_dtype(state, key) != tensor.dtype:
        low = state.get(key + LOW_COMPONENT_SUFFIX)
        if low is None or not tensor.is_floating_point():
            return "codes, quantised"
        return f"{dtype_name(tensor.dtype)} with {8 * low.element_size()} bits beside it"
    return dtype_name(tensor.dtype)


def _implementation(optimizer: Optimizer, watched: Sequence[WatchedParameter], intents: Sequence[Intent]) -> str:
    """The path that a step takes by the group's switches: "fused", "foreach" or "for-loop"; or that its
    decay was seen apart; "unknown" elsewhere."""
    if any(intents[entry.group].composition.decays_apart for entry in watched):
        return wire.DECAYS_APART
    group: dict[str, Any] = next(iter(optimizer.param_groups), {})
    if group.get("fused"):
        return "fused"
    if "foreach" not in group:
        return _UNKNOWN
    if group["foreach"] is not None:
        return "foreach" if group["foreach"] else "for-loop"
    if not type(optimizer).__module__.startswith("torch.optim"):
        return _UNKNOWN
    on_device = any(local_part(entry.parameter).device.type != "cpu" for entry in watched)
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
    pairs = ((parameter, state_of(optimizer, parameter).get(key)) for parameter in narrow)
    return any(isinstance(master, Tensor) and master.dtype == parameter.dtype for parameter, master in pairs)


def _cast_master(key: str) -> str:
    return (
        f"the master weight {key} has the dtype of the weight: loading a checkpoint with load_state_dict casts it; "
        "make it again in fp32 after loading"
    )
