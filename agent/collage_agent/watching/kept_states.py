"""Looks at many states at once: each stepped parameter with its state, and samples of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.intent_choice import Intent
from collage_agent.sample.quantised_states import is_quantised
from collage_agent.sample.state_mappings import states_of
from collage_agent.sample.stored_parts import average_names, components, elementwise_state
from collage_agent.training.watched_parameters import WatchedParameter

__all__ = [
    "KeptStates",
    "NARROW",
    "SAMPLED",
    "averages_of",
    "glance",
    "holds",
    "places_alike",
    "sample",
    "weights_were_rounded",
]

SAMPLED: Final = 4096
"""Elements of each tensor."""
NARROW: Final = (torch.bfloat16, torch.float16)
"""What wide numbers may have been rounded to on their way through a checkpoint."""
_GLANCED: Final = 64
_FEWEST: Final = 64
"""Weights other than 0 that are no 16-bit numbers by chance."""


@dataclass(frozen=True)
class KeptStates:
    """Each stepped parameter that has a state, with that state and its group's intent.

    Each look builds them again: 20,000 kept tuples would make Python's garbage collector scan everything, which
    takes longer than the rest of the look.
    """

    optimizer: Optimizer
    watched: Sequence[WatchedParameter]
    intents: Sequence[Intent]

    def __iter__(self) -> Iterator[tuple[WatchedParameter, Mapping[str, Any], Intent]]:
        kept = states_of(self.optimizer)
        for entry in self.watched:
            if entry.stepped and (state := kept(entry.parameter, {})):
                yield entry, state, self.intents[entry.group]


def averages_of(
    entry: WatchedParameter, state: Mapping[str, Any], intent: Intent
) -> Iterator[tuple[str, list[Tensor]]]:
    """The name of each moving average of a parameter, and its tensors."""
    keys = tuple(elementwise_state(entry.parameter, state))
    for name in average_names(keys, intent.composition):
        tensors = [local_part(state[key]) for key in components(name, keys, intent.composition)]
        if not any(map(is_quantised, tensors)):
            yield name, tensors


def glance(tensor: Tensor) -> Tensor:
    """The first few elements of this rank's part."""
    return local_part(tensor).reshape(-1)[:_GLANCED]


def places_alike(glances: Sequence[tuple[Tensor, ...]]) -> list[list[int]]:
    """The places of glances of one form: one operation can look at all of them."""
    alike: dict[object, list[int]] = {}
    for place, own in enumerate(glances):
        alike.setdefault(tuple([(part.dtype, part.device) for part in own]), []).append(place)
    return list(alike.values())


def sample(tensor: Tensor, most: int = SAMPLED) -> Tensor:
    """Elements at equal distances, at most this many."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(-(-flat.numel() // most), 1)]


def holds(dtype: torch.dtype, numbers: Tensor) -> bool:
    """Whether each number is one of this dtype, too."""
    return torch.equal(numbers, numbers.to(dtype).to(numbers.dtype))


def weights_were_rounded(kept: KeptStates) -> torch.dtype | None:
    """The 16-bit dtype that holds every wide weight which steps have moved, beside averages that it does not hold.

    An optimizer of 16-bit weights would have left averages of that dtype. None: there is no such dtype, or one of
    them holds the averages, too. Reads samples.
    """
    narrow, beside, found = list(NARROW), dict.fromkeys(NARROW, False), 0
    for entry, state, intent in kept:
        if entry.parameter.dtype.itemsize < 4:
            continue
        weight = sample(local_part(entry.parameter))
        averages = [sample(tensors[0]) for _, tensors in averages_of(entry, state, intent)]
        if not any(bool(own.count_nonzero()) for own in averages):
            continue
        narrow = [dtype for dtype in narrow if holds(dtype, weight)]
        if not narrow:
            return None
        found += int(weight.count_nonzero())
        for dtype in narrow:
            beside[dtype] |= any(own.dtype.itemsize >= 4 and not holds(dtype, own) for own in averages)
    return narrow[0] if narrow and found >= _FEWEST and all(beside[dtype] for dtype in narrow) else None
