"""The parameters that an optimizer trains, and the bytes of its weights, states and gradients.

`assembly.py` reports `bytes_per_parameter` (`docs/metrics.md`, `tests/agent/test_strategies.py`);
`watch_description.py` puts `wire.Trained` into the watch's description, and advice is made of it
(`docs/api/http.md`, `tests/agent/watching/test_advice.py`). Bytes are counted twice on purpose:
`bytes_per_parameter` as they lie in memory, `float32_bytes` as they would be with weights in fp32.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from collage_optim import CollageOptimizer, Moment
from collage_optim.names import dtype_name
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.sample.quantised_states import stored_tensors
from collage_agent.sample.state_mappings import state_of
from collage_agent.sample.stored_parts import PLAIN_TENSORS
from collage_agent.training.watched_parameters import WatchedParameter
from collage_monitor import wire

__all__ = ["bytes_per_parameter", "describe_trained"]

_SCALAR: Final = torch.Size([])


def describe_trained(
    optimizer: Optimizer,
    watched: Sequence[Sequence[WatchedParameter]],
    strategy: str,
    fitting: type[CollageOptimizer] | None,
    sparse: Collection[str],
) -> wire.Trained:
    """The parameters that an optimizer trains, for advice. strategy: the observed one. fitting, sparse: see
    `watch_description.describe`.

    watched: by how it is kept (`stored_parts.form_of`). Bytes are counted from the states that there are. No
    synchronisation.
    """
    if not optimizer.param_groups:  # Other code has removed all groups.
        fitting = None
    parameters: Counter[str] = Counter()
    of_sparse, size, has_states = 0, 0, False
    for alike in watched:
        elements = sum([entry.shard.elements for entry in alike])
        parameters[dtype_name(alike[0].parameter.dtype)] += elements
        has_states |= bool(state_of(optimizer, alike[0].parameter))
        size += 8 * elements + _bytes_of_states(optimizer, [entry.parameter for entry in alike])
        if sparse:
            of_sparse += sum(entry.shard.elements for entry in alike if entry.name in sparse)
    averages = () if fitting is None else _moments(optimizer, fitting)
    moments = [moment.second for moment in averages]
    is_counted = bool(watched) and (has_states or (fitting is not None and not moments))
    entries = [entry for alike in watched for entry in alike]
    return wire.Trained(
        optimizer=type(optimizer).__name__,
        strategy=strategy,
        fitting=None if fitting is None else fitting.__name__,
        first_moments=moments.count(False),
        second_moments=moments.count(True),
        betas=[moment.decay for moment in averages if moment.decay is not None],
        parameters=dict(parameters),
        sparse=of_sparse,
        sharded=any(local_part(entry.parameter) is not entry.parameter for entry in entries),
        float32_bytes=(size - 4 * of_sparse) / parameters.total() if is_counted and parameters.total() else None,
        device=entries[0].parameter.device.type if entries else "cpu",
    )


def _bytes_of_states(optimizer: Optimizer, alike: Sequence[Tensor]) -> int:
    """Bytes of the states for parameters of one form, if weights were fp32: numbers in the weight's dtype count 4
    each. Numbers kept once for a tensor are left out."""
    size, weight = 0, alike[0]
    elements: int | None = None
    # Each tensor once: our packed moments are seen under two names.
    for key, value in {id(value): (key, value) for key, value in state_of(optimizer, weight).items()}.values():
        if not isinstance(value, Tensor) or value.numel() <= 1:
            continue
        if type(value) is Tensor and value.shape == weight.shape and type(weight) in PLAIN_TENSORS:
            if elements is None:
                elements = sum([parameter.numel() for parameter in alike])
            numbers = elements
        else:
            numbers = sum(local_part(state_of(optimizer, parameter)[key]).numel() for parameter in alike)
        size += numbers * (4 if value.dtype == weight.dtype else value.dtype.itemsize)
    return size


def _moments(optimizer: Optimizer, fitting: type[CollageOptimizer]) -> tuple[Moment, ...]:
    """The averages that the rule keeps under the options of the first group."""
    group = optimizer.param_groups[0]
    options = group if isinstance(optimizer, CollageOptimizer) else fitting.options_like(group)
    return fitting.rule_of(options).moments(options)


def bytes_per_parameter(optimizers: Sequence[Optimizer]) -> float | None:
    """Bytes of weights, optimizer states and gradients over the number of weights; None while there is no state.

    From where they lie in memory, each byte once. Numbers kept once for a tensor, such as step counters, are left
    out. No synchronisation.
    """
    states: dict[Tensor, Mapping[str, Any]] = {
        parameter: state_of(optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not parameter.is_meta
    }
    if not any(states.values()):
        return None
    places: defaultdict[torch.device, list[int]] = defaultdict(list)
    for parameter, state in states.items():
        for tensor in _tensors_of(parameter, state):
            for part in stored_tensors(tensor):
                spanned = part.nbytes if part.is_contiguous() else _bytes_spanned(part)
                places[part.device] += (part.data_ptr(), spanned)
    elements = sum([local_part(parameter).numel() for parameter in states])
    return sum(map(_bytes_covered, places.values())) / elements if elements else None


def _bytes_covered(places: Sequence[int]) -> int:
    """Bytes in which any tensor lies, of address and length of each; an object for each storage takes longer."""
    starts, lengths = np.array(places, dtype=np.uint64).reshape(-1, 2).T
    order = np.argsort(starts)
    starts, ends = starts[order], (starts + lengths)[order]
    reached = np.maximum.accumulate(ends)
    starts[1:] = np.maximum(starts[1:], reached[:-1])
    return int((reached - np.minimum(starts, reached)).sum())


def _bytes_spanned(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _tensors_of(parameter: Tensor, state: Mapping[str, Any]) -> Iterator[Tensor]:
    yield parameter
    for gradient in (parameter.grad, vars(parameter).get("decoupled_grad")):
        if gradient is not None and not gradient.is_sparse:
            yield gradient
    for value in state.values():
        if isinstance(value, Tensor) and (value.numel() > 1 or value.shape == parameter.shape != _SCALAR):
            yield value
