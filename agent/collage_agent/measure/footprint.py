"""What the agent keeps in memory between steps: the tensors of its own that a measuring object holds on to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from collage_agent.sample.gather import local
from collage_agent.sample.quantised import stored_tensors

__all__ = ["kept_bytes"]


def kept_bytes(root: object, foreign: Iterable[Tensor]) -> int:
    """Bytes of the tensors reachable from `root` through the agent's objects, on whatever device they are.

    Memory is counted once however many views look at it. `foreign` are the tensors of the training (weights,
    gradients, states), whose memory is not the agent's. Reads sizes and addresses only: synchronises no device.
    """
    not_ours = {_address(part) for tensor in foreign for part in stored_tensors(tensor)}
    sizes = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors(root)}
    return sum(size for address, size in sizes.items() if address not in not_ours)


def _address(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def _tensors(root: object) -> Iterator[Tensor]:
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield local(found)
        elif isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
        elif type(found).__module__.partition(".")[0] == "collage_agent":
            waiting += vars(found).values() if hasattr(found, "__dict__") else ()
