"""What the run is told about a watch: optimizer, strategy, where u comes from, bytes for each parameter."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

import collage_monitor
from collage_agent.intent.before_after import BeforeAfter
from collage_agent.intent.choose import Intent
from collage_agent.intent.whole_tensor import WholeTensor
from collage_agent.measure.rotation import ELEMENTS_A_STEP, too_large
from collage_agent.options import WatchOptions
from collage_agent.sample.gather import local
from collage_agent.sample.quantised import stored_tensors
from collage_agent.training.parameters import WatchedParameter
from collage_agent.watching.fingerprint import fingerprint, observed_strategy
from collage_monitor import wire

__all__ = ["bytes_per_parameter", "describe", "joined"]

_CLOSURE_NOTE = "steps evaluate a closure repeatedly: no one gradient leads to them, only what changed is measured"


def describe(
    optimizer: Optimizer,
    options: WatchOptions,
    watched: Sequence[WatchedParameter],
    intents: Sequence[Intent],
    *,
    notes: Sequence[str],
    closure: bool,
) -> wire.WatchInfo:
    """The watch as it travels; where groups differ, the larger part speaks and the reason names the rest."""
    dtypes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    reasons: dict[str, None] = {}
    large = 0
    for entry in watched:
        elements = entry.shard.elements
        dtypes[str(entry.parameter.dtype).removeprefix("torch.")] += elements
        intent = intents[entry.group]
        kinds["whole-tensor" if isinstance(intent, WholeTensor) else intent.kind] += elements
        if isinstance(intent, WholeTensor):
            reasons[f"whole tensors of group {entry.group} in rotation: {intent.reason}"] = None
            large += too_large(entry) and options.sample != "all"
        elif isinstance(intent, BeforeAfter):
            reasons[f"only what changed is known of group {entry.group}: {intent.reason}"] = None
    if large:
        reasons[
            f"{large} tensors of more than {ELEMENTS_A_STEP} elements have no turn: only what changed is known of "
            'them; watch(…, sample="all") measures them too'
        ] = None
    intent_kind: Any = "before-after" if closure else _most_common(kinds, "shadow")
    return wire.WatchInfo(
        optimizer=type(optimizer).__name__,
        strategy=options.strategy,
        observed_strategy=observed_strategy(optimizer, watched, intents),
        dtype=_most_common(dtypes, "unknown"),
        intent=intent_kind,
        intent_reason="; ".join([*reasons, *([_CLOSURE_NOTE] if closure else []), *notes]),
        parameters=sum(dtypes.values()),
        every=options.every,
        sample=options.sample,
        oracle=options.oracle,
        agent_version=collage_monitor.__version__,
        host=socket.gethostname(),
        fingerprint=fingerprint(optimizer, watched, intents, options.strategy),
    )


def joined(infos: Sequence[wire.WatchInfo]) -> wire.WatchInfo:
    """Several optimizers under one watch: names side by side, the larger part speaks where they differ."""
    if len(infos) == 1:
        return infos[0]
    largest = max(infos, key=lambda info: info.parameters)
    names = dict.fromkeys(info.optimizer for info in infos)
    observed = {info.observed_strategy for info in infos}
    reasons = dict.fromkeys(info.intent_reason for info in infos if info.intent_reason)
    return msgspec.structs.replace(
        largest,
        optimizer=" + ".join(names)[: wire.LIMITS["name_characters"]],
        observed_strategy=observed.pop() if len(observed) == 1 else "unknown",
        intent_reason="; ".join(reasons),
        parameters=sum(info.parameters for info in infos),
        fingerprint=_together(largest.fingerprint, [info.fingerprint for info in infos]),
    )


def _together(
    largest: wire.Fingerprint | None, fingerprints: Sequence[wire.Fingerprint | None]
) -> wire.Fingerprint | None:
    """The largest optimizer's fingerprint, with elements, states and findings of all."""
    known = [entry for entry in fingerprints if entry is not None]
    if largest is None or not known:
        return largest
    parameters: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    states: dict[str, str] = {}
    for entry in known:
        parameters.update(entry.parameters)
        gradients.update(entry.gradients)
        states = {**entry.states, **states}
    findings = list(dict.fromkeys(finding for entry in known for finding in entry.findings))
    return msgspec.structs.replace(
        largest, parameters=dict(parameters), gradients=dict(gradients), states=states, findings=findings
    )


def _most_common(counted: Counter[str], otherwise: str) -> str:
    """What most elements have; a rank may hold none."""
    return counted.most_common(1)[0][0] if counted else otherwise


def bytes_per_parameter(optimizers: Sequence[Optimizer]) -> float | None:
    """Bytes of weights, optimizer states and gradients over the number of weights; None while there is no state.

    From the storages, each counted once. Numbers kept once for a tensor, such as step counters, are left out.
    No synchronisation.
    """
    states: dict[Tensor, dict[str, Any]] = {
        parameter: optimizer.state.get(parameter, {})
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    if not any(states.values()):
        return None
    storages: dict[tuple[torch.device, int], int] = {}
    for parameter, state in states.items():
        for tensor in _tensors_of(parameter, state):
            for part in stored_tensors(tensor):
                if part.numel():
                    storage = part.untyped_storage()
                    storages[part.device, storage.data_ptr()] = storage.nbytes()
    elements = sum(local(parameter).numel() for parameter in states)
    return sum(storages.values()) / elements if elements else None


def _tensors_of(parameter: Tensor, state: dict[str, Any]) -> Iterator[Tensor]:
    yield parameter
    if parameter.grad is not None and not parameter.grad.is_sparse:
        yield parameter.grad
    for value in state.values():
        if isinstance(value, Tensor) and (value.numel() > 1 or value.shape == parameter.shape != torch.Size([])):
            yield value
