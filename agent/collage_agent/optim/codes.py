"""The same totals for a compiled step: it writes a code for each element, and the codes are counted outside.

A compiler makes one good pass of elementwise work, and a slow one of many reductions.
"""

from functools import lru_cache

import torch
from torch import Tensor

from collage_agent.optim.totals import Observation

__all__ = ["CodedChunk"]

_BAD, _WANTED, _MOVED, _OPPOSED, _FAR, _VISIBLE = (1 << bit for bit in range(6))
_CODES = 1 << 6


class CodedChunk:
    """Scratch for the chunks of a tensor: u, e, the visible change, a code for each element; and their totals."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, shows_all: bool) -> None:
        self._observed = torch.empty(2 if shows_all else 3, elements, dtype=dtype, device=device)
        self._codes = torch.empty(elements, dtype=torch.uint8, device=device)
        self._counts: list[Tensor] = []
        self._sums: list[Tensor] = []

    def tensors(self, elements: int) -> dict[str, Tensor]:
        """The first so many elements of each, by name, for `write`."""
        rows = zip(("intended", "effective", "visible"), self._observed, strict=False)
        return {"codes": self._codes[:elements], **{name: row[:elements] for name, row in rows}}

    def count(self, elements: int) -> None:
        """Add up the first so many elements, which `write` has filled."""
        observed, codes = self._observed[:, :elements], self._codes[:elements]
        if codes.device.type == "cpu":
            counts = torch.bincount(codes, minlength=_CODES)
            masking = bool(counts[_BAD::2].any())
        else:
            ones = torch.ones((), dtype=torch.int64, device=codes.device).expand(elements)
            counts = torch.zeros(_CODES, dtype=torch.int64, device=codes.device).index_add_(0, codes.int(), ones)
            masking = True
        if masking:
            observed = observed.masked_fill(codes.bitwise_and(_BAD) != 0, 0)
        self._counts.append(counts)
        u, e, visible = observed[0], observed[1], observed[-1]
        pairs = ((u, u), (u, e), (e, e), (u, visible), (visible, visible))
        self._sums.append(torch.stack([torch.dot(a, b) for a, b in pairs]))

    def totals(self) -> Tensor:
        """The totals of all that was counted since the last call, as exact as those of `totals_of`."""
        counts = torch.stack(self._counts).sum(0).to(torch.float64) @ _class_table(self._codes.device)
        sums = torch.stack(self._sums).to(torch.float64).sum(0)
        self._counts, self._sums = [], []
        return torch.cat([counts, sums])

    @staticmethod
    def write(observation: Observation, into: dict[str, Tensor]) -> None:
        """Write what was observed, and its codes: elementwise only, on bit patterns.

        Every question is put so that its answer is a sign bit, which shifts into its place: comparisons make
        masks, and compilers spend more on turning masks into numbers than on all the rest.
        """
        u, e, gradient = observation.intended, observation.effective, observation.gradient
        visible = e if observation.visible is None else observation.visible
        width, integer = (32, torch.int32) if u.dtype == torch.float32 else (64, torch.int64)
        largest = 0x7F7FFFFF if width == 32 else 0x7FEFFFFFFFFFFFFF

        def exceeds(x: Tensor, pattern: int) -> Tensor:
            """Negative where the pattern of |x| lies above this one; no difference here overflows."""
            return pattern - (x.view(integer) & ((1 << (width - 1)) - 1))

        answers = {
            _BAD: exceeds(u, largest) | exceeds(e, largest) | exceeds(gradient, largest),
            _WANTED: exceeds(u, 0),
            _MOVED: exceeds(e, 0),
            _OPPOSED: u.view(integer) ^ e.view(integer),
            _FAR: (u.abs() * 0.5 - (e - u).abs()).view(integer),
            _VISIBLE: exceeds(visible, 0),
        }
        code = torch.zeros_like(u, dtype=integer)
        for bit, answer in answers.items():
            code = code | ((answer >> (width - bit.bit_length())) & bit)
        into["codes"].copy_(code.to(torch.uint8))
        into["intended"].copy_(u)
        into["effective"].copy_(e)
        if "visible" in into:
            into["visible"].copy_(visible)


@lru_cache(maxsize=8)
def _class_table(device: torch.device) -> Tensor:
    """fp64 [codes, counts]: what an element of each code adds to each count."""
    return torch.tensor([_classes(code) for code in range(_CODES)], dtype=torch.float64, device=device)


def _classes(code: int) -> list[int]:
    """What one element with this code adds to each count of `STEP_TOTALS`."""
    if code & _BAD:
        return [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    wanted, moved, far, visible = (bool(code & bit) for bit in (_WANTED, _MOVED, _FAR, _VISIBLE))
    kept = wanted and moved
    backwards = kept and bool(code & _OPPOSED)
    named = (not wanted, moved and not wanted, wanted and not moved, kept and far, backwards, kept and not far)
    return [1, 0, *map(int, named), int(wanted and not visible), int(not visible)]
