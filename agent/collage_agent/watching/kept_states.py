"""Looks at many states at once: each stepped parameter with its state, and samples of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.intent_choice import Intent
from collage_agent.sample.quantised_states import is_quantised
from collage_agent.sample.state_mappings import states_of
from collage_agent.sample.stored_parts import average_names, components, elementwise_state
from collage_agent.training.watched_parameters import WatchedParameter

__all__ = ["KeptStates", "SAMPLED", "averages_of", "glance", "places_alike", "sample"]

SAMPLED: Final = 4096
"""Elements of each tensor."""
_GLANCED: Final = 64


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
