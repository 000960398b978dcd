"""One rank's part of one tensor."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Piece", "Shard"]


@dataclass(frozen=True)
class Shard:
    """This rank's part of one tensor.

    shape: the whole tensor's. elements: of the shard, 0 for an empty one. number: which shard it is, 0 for a whole
    tensor. replica: which of the ranks that hold the same elements this one is. start: where in the flattened
    registered parameter the shard begins, None: it is all of it. replicated: a wrapper says that other ranks hold
    the same elements, so that their bits must agree.
    """

    shape: tuple[int, ...]
    elements: int
    number: int = 0
    replica: int = 0
    start: int | None = None
    replicated: bool = False


Piece = tuple[str, Shard, str | None]
"""A tensor's name, what is held of it, and its module's type, where the sharding system knows that."""
