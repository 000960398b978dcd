"""AdamW with weights and states in formats that no optimizer here keeps: other projects', and coupled rounding's.

Each holds the values that its codes stand for, and computes in fp32, as the published kernels do. Formulas and
sources are in the docstrings, hand-computed codes in `tests/studies/test_emulated_optimizers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import torch
from collage_optim import CollageAdamW, Scalar
from collage_optim.coupling import GAPS_EXCHANGED, REACH_KEPT
from collage_optim.integer_codes import stored_value
from collage_optim.update_rules import AdamRule, Group
from torch import Tensor, nn

__all__ = [
    "WAYS",
    "BitsAndBytesAdamW",
    "BlockAdamW",
    "BlockLayout",
    "EmulatedAdamW",
    "ErrorCompensatedAdamW",
    "FlashAdamW",
    "OurAdamW",
    "Way",
    "companded",
    "distance_ahead",
    "dithered",
    "dynamic_map",
    "in_24_bits",
    "nearest_of",
    "softsign_codes",
]

BETA1: Final = 0.9
_EPS: Final = 1e-8
_GOLDEN: Final = (5**0.5 - 1) / 2
_BLOCK, _FLASH_GROUP, _BITS_AND_BYTES_BLOCK = 128, 32, 256
_SMALLEST_AHEAD: Final = 1e-35


class EmulatedAdamW:
    """AdamW of flat tensors: m = β₁ m + (1 − β₁) g, v = β₂ v + (1 − β₂) g², w += −lr m̂ / (√v̂ + ε) − lr λ w.

    Only `dtype` rounds here; subclasses replace `store`. start: weights [n], n a multiple of 256; decay: λ [n].
    """

    def __init__(self, start: Tensor, beta2: float, decay: Tensor, seed: int, dtype: torch.dtype = torch.float32):
        self.weight, self.decay, self.beta2 = start.to(dtype, copy=True), decay.to(dtype), beta2
        self.first, self.second = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.steps = 0
        self._offsets = torch.rand(3, start.numel(), generator=torch.Generator().manual_seed(seed))

    def step(self, gradient: Tensor, rate: Tensor) -> None:
        """Take a step with the gradients and learning rates, both [n]."""
        self.steps += 1
        gradient, rate = gradient.to(self.weight.dtype), rate.to(self.weight.dtype)
        self.first = BETA1 * self.first + (1 - BETA1) * gradient
        self.second = self.beta2 * self.second + (1 - self.beta2) * gradient.square()
        denominator = (self.second / (1 - self.beta2**self.steps)).sqrt() + _EPS
        self.store(-rate / (1 - BETA1**self.steps) * self.first / denominator, denominator, rate)

    def store(self, moved: Tensor, denominator: Tensor, rate: Tensor) -> None:
        """Move the weight, and keep the moments; `moved` is without decay, the denominator √v̂ + ε."""
        self.weight = self.moved_exactly(moved, rate)

    def ahead(self, rate: Tensor) -> Tensor:
        """c m after a step with these learning rates: without further gradients the weights would move by −c m."""
        denominator = (self.second / (1 - self.beta2**self.steps)).sqrt() + _EPS
        return rate * _ahead_of(self.steps) * self.first / denominator

    def moved_exactly(self, moved: Tensor, rate: Tensor) -> Tensor:
        """The moved weight, rounded by the dtype alone."""
        return self.weight + (moved - rate * self.decay * self.weight)

    def uniform(self, number: int) -> Tensor:
        """Numbers of [0, 1) [n], the golden ratio further in each step, as `collage_optim.random_numbers` does."""
        return (self._offsets[number] + self.steps * _GOLDEN % 1.0) % 1.0


@dataclass(frozen=True)
class BlockLayout:
    """Bits of a weight (24 or 32), and of a first and a second moment in blocks of 128; None keeps fp32.

    The two directions of coupled rounding (`collage_optim.coupling`) and its two bounds can be switched off each.
    first_at_random: m is rounded at random although the weight takes that. linear: equal steps of m. dithered: v is
    dithered subtractively.
    """

    weight: int = 24
    first: int = 8
    second: int | None = 16
    first_into_weight: bool = True
    weight_into_first: bool = True
    reach_kept: float = REACH_KEPT
    gaps_exchanged: float = GAPS_EXCHANGED
    first_at_random: bool = False
    linear: bool = False
    dithered: bool = False

    @property
    def bytes(self) -> float:
        """Bytes a parameter, with scales and a bf16 gradient."""
        return 2 + (self.weight + self.first + (32 if self.second is None else self.second)) / 8 + 8 / _BLOCK


class BlockAdamW(EmulatedAdamW):
    """A weight of 24 or 32 bits and moments in blocks, which exchange what rounding takes as the layout says."""

    def __init__(self, layout: BlockLayout, start: Tensor, beta2: float, decay: Tensor, seed: int) -> None:
        super().__init__(start, beta2, decay, seed)
        self.layout, self._generator = layout, torch.Generator().manual_seed(seed)

    def store(self, moved: Tensor, denominator: Tensor, rate: Tensor) -> None:
        layout, first = self.layout, self.first
        reach = rate * _ahead_of(self.steps)
        ahead = reach / denominator
        displacement = moved - rate * self.decay * self.weight
        gap = _gaps(self.weight, layout.weight)
        coarse = torch.zeros_like(first, dtype=torch.bool)
        if layout.weight_into_first:
            step = first.view(-1, _BLOCK).abs().amax(1, keepdim=True) / (2 ** (layout.first - 1) - 1)
            coarse = (ahead.view(-1, _BLOCK) * step).view(-1) < gap
            coarse &= (gap <= layout.gaps_exchanged * reach) & (ahead > _SMALLEST_AHEAD)
            lag, kept = ahead * first, layout.reach_kept * reach
            within = torch.where(gap > reach / 8, lag.clamp(-kept, kept) - lag, 0.0)
            nearest = ((displacement + within) / gap).round() * gap
            first = torch.where(coarse, first + (nearest - displacement) / ahead, first)
            displacement = torch.where(coarse, nearest, displacement)
        self.first = self._stored_first(first, coarse)
        if layout.first_into_weight:
            displacement = displacement + torch.where(coarse, 0.0, ahead * (self.first - first))
        steps = (displacement / gap + self.uniform(0)).floor()
        self.weight = _nearest(self.weight + steps * gap, 32 - layout.weight)
        self.second = self._stored_second()

    def _stored_first(self, first: Tensor, coarse: Tensor) -> Tensor:
        """m as its codes hold it: to nearest where what that takes goes into the weight, at random elsewhere."""
        threshold = 1 - self.uniform(1)
        if self.layout.first_into_weight and not self.layout.first_at_random:
            threshold = torch.where(coarse, threshold, 0.5)
        return companded(first, self.layout.first, threshold, linear=self.layout.linear)

    def _stored_second(self) -> Tensor:
        """v as the codes of its root hold it."""
        bits = self.layout.second
        if bits is None:
            return self.second
        # A sign bit that a root does not need.
        if self.layout.dithered:
            drawn = torch.rand(self.second.numel() // _BLOCK, 1, generator=self._generator)
            return dithered(self.second.sqrt(), bits + 1, drawn - 0.5).square()
        return companded(self.second.sqrt(), bits + 1, 1 - self.uniform(2)).square()


def companded(values: Tensor, bits: int, threshold: Tensor | float, *, linear: bool = False) -> Tensor:
    """Values of blocks of 128, as signed codes k hold them: sign(k) (k / L)² s, L = 2^(bits − 1) − 1.

    s: the largest size in a block. Between two codes the upper one is taken if the share of the way to it exceeds
    the threshold: 0.5 rounds to nearest, a random one at random. linear: (k / L) s. As `collage_optim`'s BLOCKS.
    """
    sizes, scale = _scaled(values)
    levels = 2 ** (bits - 1) - 1
    shares = sizes * (levels if linear else levels**2)
    lower = (shares if linear else shares.sqrt()).floor().clamp(max=levels - 1)
    part = shares - lower if linear else (shares - lower.square()) / (2 * lower + 1)
    codes = (lower + (part.view(-1) > threshold).view_as(lower)) / levels
    found: Tensor = ((codes if linear else codes.square()) * scale).view(-1)
    return found.copysign(values)


def dithered(values: Tensor, bits: int, dither: Tensor) -> Tensor:
    """Values ≥ 0 of blocks of 128, dithered subtractively: k = round(L √(x / s) + u).

    They are read as ((k − u)² − 1/12) s / L². dither: u from −½ to ½, one number a block [blocks, 1], drawn again
    by its seed at reading, and independent of the last step's. k − u is off by up to half a step, evenly, whatever
    x is, so the mean is right. Source: BReD (OpenReview ATXhZIy5PM), here with the steps of `companded`.
    """
    sizes, scale = _scaled(values)
    levels = 2 ** (bits - 1) - 1
    codes = (sizes.sqrt() * levels + dither).round().clamp(0, levels)
    found: Tensor = ((codes - dither).square() - 1 / 12).clamp_min(0) / levels**2 * scale
    return found.view(-1)


class FlashAdamW(EmulatedAdamW):
    """FlashOptim's AdamW in 7 bytes (arXiv 2602.23349): groups of 32 with fp16 scales, all rounded to nearest."""

    def store(self, moved: Tensor, denominator: Tensor, rate: Tensor) -> None:
        self.weight = in_24_bits(self.moved_exactly(moved, rate))
        self.first = softsign_codes(self.first)
        roots = self.second.sqrt().view(-1, _FLASH_GROUP)
        scale = roots.amax(1, keepdim=True).clamp_min(1e-12)
        codes = (roots / scale * 255 + 0.5).floor()
        self.second = (codes / 255 * scale.half().float()).square().view(-1)


def softsign_codes(values: Tensor) -> Tensor:
    """m as FlashOptim's int8 codes of y = 2 x / (1 + |x|) hold it, x = m / s, s in fp16 as it is read."""
    groups = values.view(-1, _FLASH_GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-12)
    share = groups / scale
    codes = (2 * share / (1 + share.abs()) * 127 + 0.5).floor() / 127
    return (codes / (2 - codes.abs()) * scale.half().float()).view(-1)


def in_24_bits(value: Tensor) -> Tensor:
    """A weight as FlashOptim splits it: bf16, and its rounding error in 127ths of half the bf16 number's gap."""
    narrow = value.bfloat16().float()
    half = _powers(narrow) * 2.0**-8
    error = ((value - narrow) / half).clamp(-1, 1) * 127
    return narrow + (error.abs() + 0.5).floor().copysign(error) / 127 * half


class BitsAndBytesAdamW(EmulatedAdamW):
    """bitsandbytes' blockwise 8-bit AdamW (arXiv 2110.02861): dynamic maps in blocks of 256, rounded to nearest.

    Its weights are fp32, or `narrow`: bf16, rounded to nearest by the update and by the decay. Source: the kernel
    kOptimizerStatic8bit2StateBlockwise, which turns a negative m that would become 0 into the code below 0.
    """

    def __init__(self, narrow: bool, start: Tensor, beta2: float, decay: Tensor, seed: int) -> None:
        super().__init__(start, beta2, decay, seed)
        self._narrow, self._signed, self._unsigned = narrow, dynamic_map(signed=True), dynamic_map(signed=False)

    def store(self, moved: Tensor, denominator: Tensor, rate: Tensor) -> None:
        kept = torch.bfloat16 if self._narrow else torch.float32
        moved_only = (self.weight + moved).to(kept).float()
        self.weight = torch.where(self.decay > 0, moved_only * (1 - rate * self.decay), moved_only).to(kept).float()
        first, scale = _scaled(self.first, _BITS_AND_BYTES_BLOCK)
        first = first.copysign(self.first.view_as(first))
        codes = nearest_of(self._signed, first)
        codes -= ((self._signed[codes] == 0) & (first < 0)).long()
        self.first = (self._signed[codes] * scale).view(-1)
        second = self.second.view(-1, _BITS_AND_BYTES_BLOCK)
        scale = second.amax(1, keepdim=True)
        shares = second / torch.where(scale > 0, scale, 1.0)
        self.second = (self._unsigned[nearest_of(self._unsigned, shares)] * scale).view(-1)


def dynamic_map(*, signed: bool) -> Tensor:
    """bitsandbytes' 256 numbers up to 1, ascending: 7 decades, each in twice as many intervals as the last.

    Decade i of 0 … 6, times 10^(i − 6): the middles of the 2^i (unsigned 2^(i + 1)) equal intervals from 0.1 to 1;
    with their negatives if signed; and 0 and 1. Unsigned, the first decade has 2 intervals.
    """
    numbers = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values


def nearest_of(numbers: Tensor, values: Tensor) -> Tensor:
    """The index of the nearest among ascending numbers."""
    return torch.bucketize(values, (numbers[:-1] + numbers[1:]) / 2)


class ErrorCompensatedAdamW(EmulatedAdamW):
    """ECO (arXiv 2601.22101): a bf16 weight without master, and fp32 moments that take its rounding error.

    e = w − bf16(w), m −= (1 − β₁) / (β₁ η) e with η = lr / ((1 − β₁^t) (√v̂ + ε)): ECO's (1 / η) (1 − 1 / β) e.
    """

    def __init__(self, at_random: bool, start: Tensor, beta2: float, decay: Tensor, seed: int) -> None:
        super().__init__(start, beta2, decay, seed)
        self._at_random = at_random

    def store(self, moved: Tensor, denominator: Tensor, rate: Tensor) -> None:
        exact = self.moved_exactly(moved, rate)
        added = (self.uniform(0) * 2**16).int() if self._at_random else 1 << 15
        self.weight = (exact.view(torch.int32) + added).bitwise_and(-(1 << 16)).view(torch.float32)
        step = rate / ((1 - BETA1**self.steps) * denominator)
        self.first = self.first - (1 - BETA1) / (BETA1 * step) * (exact - self.weight)


@cache
def _ahead_of(step: int) -> float:
    """Σ_k β₁^k / (1 − β₁^(t + k)), k ≥ 1: how many steps' worth m will still move a weight."""
    return math.fsum(BETA1**k / (1 - BETA1 ** (step + k)) for k in range(1, 400))


def _scaled(values: Tensor, block: int = _BLOCK) -> tuple[Tensor, Tensor]:
    """Sizes relative to the largest of their block, [blocks, block], and these [blocks, 1]."""
    sizes = values.abs().view(-1, block)
    scale = sizes.amax(1, keepdim=True)
    return sizes / torch.where(scale > 0, scale, 1.0), scale


def _powers(values: Tensor) -> Tensor:
    """The largest power of two up to each size, at least 2^-103."""
    return (values.view(torch.int32) & 0x7F800000).clamp_min((127 - 103) << 23).view(torch.float32)


def _gaps(values: Tensor, bits: int) -> Tensor:
    return _powers(values) * 2.0 ** (9 - bits)


def _nearest(values: Tensor, dropped: int) -> Tensor:
    """Rounded to nearest to fp32 without its last bits."""
    if not dropped:
        return values
    added = values.view(torch.int32) + (1 << (dropped - 1))
    return added.bitwise_and(-(1 << dropped)).view(torch.float32)


@dataclass(frozen=True)
class _ElementwiseRule(AdamRule):
    """AdamW whose rate and decay are vectors, one number an element, in place of the group's, which are 1."""

    now: dict[str, Tensor] = field(default_factory=dict)

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        numbers = super().scalars(group, step)
        moved = {"negative_step_size": self.now["rate"] * numbers["negative_step_size"]}
        return numbers | moved | {"decay": self.now["rate"] * self.now["decay"]}

    def scalars_ahead(self, group: Group, step: int) -> dict[str, Scalar]:
        numbers = super().scalars_ahead(group, step)
        return numbers | {"lr_ahead": self.now["rate"] * numbers["lr_ahead"]}


class OurAdamW:
    """CollageAdamW itself, under one of its strategies."""

    def __init__(self, strategy: str, start: Tensor, beta2: float, decay: Tensor, seed: int) -> None:
        now = {"decay": decay.float()}

        class Elementwise(CollageAdamW):
            rule = _ElementwiseRule(decoupled=True, now=now)

        self._now, self._parameter = now, nn.Parameter(start.to(torch.bfloat16, copy=True))
        options: dict[str, Any] = {"lr": 1.0, "betas": (BETA1, beta2), "weight_decay": 1.0}
        self._optimizer = Elementwise([self._parameter], strategy=strategy, seed=seed, **options)

    @property
    def weight(self) -> Tensor:
        """All stored bits of the weight."""
        return self._optimizer.stored_parameter(self._parameter)

    @property
    def first(self) -> Tensor:
        """The stored first moment."""
        return stored_value(self._optimizer.state[self._parameter], "exp_avg")

    def ahead(self, rate: Tensor) -> Tensor:
        """c m after a step with these learning rates."""
        self._now["rate"] = rate.float()
        return distance_ahead(self._optimizer, self._parameter)

    def step(self, gradient: Tensor, rate: Tensor) -> None:
        """Take a step with the gradients and learning rates, both [n]."""
        self._now["rate"], self._parameter.grad = rate.float(), gradient
        self._optimizer.step()


def distance_ahead(optimizer: CollageAdamW, parameter: Tensor) -> Tensor:
    """c m of a weight: without further gradients it would move by −c m; fp64."""
    (group,) = (group for group in optimizer.param_groups if any(own is parameter for own in group["params"]))
    state, rule = optimizer.state[parameter], optimizer.rule_of(group)
    step = int(state["step"])
    numbers = {**rule.scalars(group, step), **rule.scalars_ahead(group, step)}
    first, second = (stored_value(state, name) for name in ("exp_avg", "exp_avg_sq"))
    return numbers["lr_ahead"] * first / (second.sqrt() * numbers["root_correction"] + numbers["eps"])


@dataclass(frozen=True)
class Way:
    """A way to keep weights and moments: bytes a parameter with a bf16 gradient; made(start, β₂, decay, seed)."""

    bytes: float
    made: Callable[[Tensor, float, Tensor, int], EmulatedAdamW | OurAdamW]


def _blocks(**changed: Any) -> Way:
    layout = BlockLayout(**changed)
    return Way(layout.bytes, partial(BlockAdamW, layout))


_SCALES: Final = 8 / _BLOCK
_OUR_BYTES: Final = {
    "split-master": 12,
    "split-master-16bit": 10,
    "coupled-9": 9 + _SCALES,
    "coupled-8": 8 + _SCALES,
    "split-master-8bit": 8 + _SCALES,
    "split-24bit-8bit": 7 + _SCALES,
}
_NEITHER: Final[Mapping[str, Any]] = {"first_into_weight": False, "weight_into_first": False}
WAYS: Final[Mapping[str, Mapping[str, Way]]] = {
    "ours": {name: Way(size, partial(OurAdamW, name)) for name, size in _OUR_BYTES.items()},
    "packed": {"coupled-7": Way(7 + _SCALES, partial(OurAdamW, "coupled-7"))},
    "others": {
        "fp32": Way(16, EmulatedAdamW),
        "ECO, to nearest": Way(12, partial(ErrorCompensatedAdamW, False)),
        "ECO, at random": Way(12, partial(ErrorCompensatedAdamW, True)),
        "bitsandbytes, fp32 weights": Way(10 + 8 / _BITS_AND_BYTES_BLOCK, partial(BitsAndBytesAdamW, False)),
        "split-master-8bit, not coupled": _blocks(weight=32, second=8, **_NEITHER),
        "split-24bit-8bit, not coupled": _blocks(weight=24, second=8, **_NEITHER),
        "FlashOptim": Way(7 + 4 / _FLASH_GROUP, FlashAdamW),
        "m in 4 bits, v in 12": _blocks(first=4, second=12),
        "bitsandbytes, bf16 weights": Way(6 + 8 / _BITS_AND_BYTES_BLOCK, partial(BitsAndBytesAdamW, True)),
    },
    "parts": {
        "coupled, emulated": _blocks(),
        "neither direction": _blocks(**_NEITHER),
        "only m into w": _blocks(weight_into_first=False),
        "only w into m": _blocks(first_into_weight=False),
        "no bound φ": _blocks(reach_kept=math.inf),
        "no cut-off": _blocks(gaps_exchanged=math.inf),
        "linear codes of m": _blocks(linear=True),
        "v in 8 bits": _blocks(second=8),
        "v in 12 bits": _blocks(second=12),
        "v in fp32": _blocks(second=None),
    },
    "dithered": {f"v in {bits} bits, dithered": _blocks(second=bits, dithered=True) for bits in (8, 12, 16)},
    "at random": {"m rounded at random": _blocks(first_at_random=True)},
}
"""Our strategies; what they are compared with; and coupled-8 with one thing changed at a time, v dithered, or m at
random as no stream is stepped."""
