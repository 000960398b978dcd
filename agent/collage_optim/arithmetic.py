"""The two arithmetics for update rules, behind one small set of operations.

A rule is written once, with `product`, `quotient`, `square_root`, `average` and in-place operations on their
results. `WideArithmetic` computes in the tensors' own wide format: fp32 in a step, fp64 for the exact rule.
`StorageArithmetic` rounds every named operation to the format that the values are kept in, as the published
algorithms do.
"""

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol

import numpy
import torch
from torch import Tensor

from collage_optim.numerics.expansions import grow, multiply_expansions, split_scalar
from collage_optim.strategies import LOW_COMPONENT_SUFFIX

__all__ = [
    "Arithmetic",
    "INDEX_FACTOR",
    "Scalar",
    "State",
    "StorageArithmetic",
    "WideArithmetic",
    "Workspace",
    "constant",
    "release_scratch",
    "shared_workspace",
    "signed",
]

Scalar = float | Tensor
State = dict[str, Tensor]


class Arithmetic(Protocol):
    """The operations that a rule may use. Results are fresh tensors, which the rule may change in place, except
    from `average`
    and `keep_maximum`: they return the state itself."""

    def product(self, a: Tensor, b: Tensor | Scalar) -> Tensor:
        """a * b."""

    def quotient(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b; b, a result itself, is used up."""

    def square_root(self, a: Tensor) -> Tensor:
        """The square root of a."""

    def average(self, state: State, name: str, decay: Scalar, increment: Tensor) -> Tensor:
        """Set state[name] to decay * state[name] + increment and return it (for an expansion its high part);
        increment, a result itself, is used up."""

    def keep_maximum(self, state: State, name: str, other: str) -> Tensor:
        """Set state[name] to the larger of state[name] and state[other], neither below 0, and return it (the high
        part); NaN where either is."""


class Workspace:
    """Scratch vectors of one device and dtype, allocated once and reused, the most recently used first.

    Without reuse the allocator returns pages and faults them in again, which costs five times as much as the
    arithmetic.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._longest = elements
        self._dtype = dtype
        self._device = device
        self._buffers: list[Tensor] = []
        self._views: list[Tensor] = []
        self._free: list[Tensor] = []
        self._indices: Tensor | None = None
        self._length = elements

    def restart(self, length: int) -> None:
        """Begin a chunk of `length` elements: all scratch is free again."""
        if length != self._length:
            self._views = [buffer[:length] for buffer in self._buffers]
            self._length = length
        self._free = self._views[::-1]

    def take(self) -> Tensor:
        """A scratch vector as long as the chunk, with undefined content."""
        if not self._free:
            self._buffers.append(torch.empty(self._longest, dtype=self._dtype, device=self._device))
            self._views.append(self._buffers[-1][: self._length])
            return self._views[-1]
        return self._free.pop()

    def give_back(self, vector: Tensor) -> None:
        """Free a vector that `take` returned; the next `take` returns it."""
        self._free.append(vector)

    def indices(self) -> Tensor:
        """The chunk's indices times `INDEX_FACTOR`, int32: not scratch, to be left unchanged."""
        if self._indices is None:
            self._indices = _scaled_indices(self._longest, self._device)
        return self._indices[: self._length]


INDEX_FACTOR = 0x9E3779B1
"""Odd, 2^32 over the golden ratio: multiples of it are far apart."""


_ONE_TWICE = 2 * 0x3F800000
"""A power of two's bits and its inverse's, added: fp32 exponents are counted from that of 1."""


def _scaled_indices(elements: int, device: torch.device, apart: int = 1) -> Tensor:
    """0, 1, … times `apart` times INDEX_FACTOR, the lower 32 bits."""
    return torch.arange(elements, dtype=torch.int32, device=device).mul_(signed(apart * INDEX_FACTOR))


def signed(value: int) -> int:
    """The same lower 32 bits as a signed integer."""
    return ((value + 2**31) & 0xFFFFFFFF) - 2**31


_SCRATCH = threading.local()


def shared_workspace(device: torch.device, dtype: torch.dtype, elements: int) -> Workspace:
    """The scratch for a device and wide format: one per thread, shared by all optimizers.

    Training that steps in the backward pass has one optimizer per parameter; each would need scratch of its own.
    """
    spaces: dict[tuple[torch.device, torch.dtype], Workspace] = _SCRATCH.__dict__.setdefault("spaces", {})
    found = spaces.get((device, dtype))
    if found is None:
        found = spaces[device, dtype] = Workspace(elements, dtype, device)
    return found


def release_scratch() -> None:
    """Free this thread's scratch; the next step allocates it again."""
    _SCRATCH.__dict__.pop("spaces", None)


_CONSTANTS: dict[tuple[float, torch.dtype], Tensor] = {}
_MOST_CONSTANTS = 1024


def constant(value: Tensor | Scalar, dtype: torch.dtype) -> Tensor:
    """A number as a tensor of no dimension on the host; a tensor as it is.

    torch makes one of each Python number, for each operation: 2 µs, half of what an operation costs on 30,000
    elements. Kept without `functools.cache`, which a user's torch.compile cannot trace.
    """
    if isinstance(value, Tensor):
        return value
    found = _CONSTANTS.get((value, dtype))
    if found is None:
        if len(_CONSTANTS) >= _MOST_CONSTANTS:
            # Random numbers' counters are new at each step.
            _CONSTANTS.clear()
        found = _CONSTANTS[value, dtype] = torch.tensor(value, dtype=dtype, device="cpu")
    return found


class WideArithmetic:
    """Wide arithmetic: every operation in the operands' own format, into scratch where a workspace is given.

    Only products, sums and quotients, which are rounded correctly everywhere, so that results don't depend on the
    position of an element or on the machine. torch's fp32 square root is off by an ulp for a fifth of all inputs on
    some machines: numpy's is the processor's and correct, and so is fp64's rounded to fp32, elsewhere.
    Without a workspace results are new tensors of `dtype` (the exact rule, the compiled step), and the root may be
    taken in another format; `apart`: how many elements of the tensor each one stands from the next.
    """

    def __init__(
        self,
        workspace: Workspace | None = None,
        dtype: torch.dtype = torch.float32,
        root_dtype: torch.dtype = torch.float64,
        apart: int = 1,
    ) -> None:
        self._workspace = workspace
        self._dtype = dtype
        self._root_dtype = root_dtype
        self._apart = apart

    @property
    def keeps_new_tensors(self) -> bool:
        """Whether results are new tensors, not scratch."""
        return self._workspace is None

    def take(self, like: Tensor) -> Tensor:
        """A fresh vector as long as `like`."""
        return torch.empty_like(like, dtype=self._dtype) if self._workspace is None else self._workspace.take()

    def give_back(self, vector: Tensor) -> None:
        """Free a result that is no longer needed."""
        if self._workspace is not None:
            integers = vector.dtype == torch.int32
            self._workspace.give_back(vector.view(torch.float32) if integers else vector)

    def on(self, operation: Callable[..., Tensor], a: Tensor, b: Tensor | Scalar) -> Tensor:
        """operation(a, b), where a, a result itself, is used up."""
        return operation(a, b) if self._workspace is None else operation(a, constant(b, a.dtype), out=a)

    def fresh(self, operation: Callable[..., Tensor], a: Tensor, b: Tensor | Scalar) -> Tensor:
        """operation(a, b) of a's dtype; neither is changed."""
        if self._workspace is None:
            return operation(a, b)
        return operation(a, constant(b, a.dtype), out=self.take(a).view(a.dtype))

    def chosen(self, a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """x where a < b, otherwise y; a, of 32 bits, and x, results themselves, are used up."""
        if self._workspace is None:
            return torch.where(a < b, x, y)
        # In scratch: a condition and a result of their own are new memory each time, at ten times the cost.
        scratch = self.take(a)
        less = torch.lt(a, b, out=scratch.view(torch.bool)[: a.numel()])
        torch.where(less, x, y, out=x)
        self.give_back(scratch)
        self.give_back(a)
        return x

    def at_most(self, value: Tensor, most: float) -> Tensor:
        """value, a result itself, used up: its elements above `most` are `most`; a NaN stays."""
        if self._workspace is None:
            # The compiler's clamp makes a NaN of all bits, which rounds to 0 by a carry.
            return torch.where(value > most, most, value)
        return value.clamp_(max=most)

    def integers(self, values: Tensor) -> Tensor:
        """A fresh int32 copy of integers."""
        return (
            values.to(torch.int32) if self._workspace is None else self.take(values).view(torch.int32).copy_(values)
        )

    def indices(self, like: Tensor, start: Scalar) -> Tensor:
        """`start` + the index of each element times INDEX_FACTOR: int32, fresh; only the lower 32 bits count."""
        if self._workspace is None:
            return _scaled_indices(like.numel(), like.device, self._apart) + start
        start = constant(start, torch.int32)
        return torch.add(self._workspace.indices(), start, out=self.take(like).view(torch.int32))

    def load(self, high: Tensor, low: Tensor | None = None) -> Tensor:
        """A fresh wide copy of a stored value, its low component added."""
        own = self._workspace is None
        value = high.to(self._dtype, copy=True) if own else self.take(high).copy_(high)
        if low is not None:
            # Operands of one dtype: with two, torch makes a temporary for every operation, outside the scratch.
            loaded = self.load(low)
            value.add_(loaded)
            self.give_back(loaded)
        return value

    def product(self, a: Tensor, b: Tensor | Scalar) -> Tensor:
        return a * b if self._workspace is None else torch.mul(a, b, out=self.take(a))

    def quotient(self, a: Tensor, b: Tensor) -> Tensor:
        return a / b if self._workspace is None else torch.div(a, b, out=b)

    def over_power(self, a: Tensor, power: Tensor) -> Tensor:
        """a / power, a result itself, used up; fp32 powers of two from 2^-126 to 2^126."""
        if self._workspace is None and power.dtype == torch.float32:
            # The inverse is exact, and the product too: a compiled step waits for its divisions.
            return a * (_ONE_TWICE - power.view(torch.int32)).view(torch.float32)
        return self.on(torch.div, a, power)

    def total(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b."""
        return a + b if self._workspace is None else torch.add(a, b, out=self.take(a))

    def rest(self, value: Tensor, stored: Tensor) -> Tensor:
        """value - stored, which is of a narrower dtype."""
        loaded = self.load(stored)
        return value - loaded if self._workspace is None else torch.sub(value, loaded, out=loaded)

    def square_root(self, a: Tensor) -> Tensor:
        if self._workspace is None:
            return a.to(self._root_dtype).sqrt().to(a.dtype)
        root = self.take(a)
        if a.device.type != "cpu":
            return root.copy_(a.to(torch.float64).sqrt_())
        with numpy.errstate(invalid="ignore"):
            numpy.sqrt(a.numpy(), out=root.numpy())
        return root

    def average(self, state: State, name: str, decay: Scalar, increment: Tensor) -> Tensor:
        state[name].mul_(decay).add_(increment)
        self.give_back(increment)
        return state[name]

    def keep_maximum(self, state: State, name: str, other: str) -> Tensor:
        # On a CPU its NaN is that of all bits, which rounds to 0 by a carry; without its sign it does not.
        return torch.maximum(state[name], state[other], out=state[name]).abs_()


@lru_cache(maxsize=256)
def _scalar_pair(value: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A hyper-parameter as an expansion of two 0-dimensional tensors, its residual against the rounded value."""
    hi, lo = split_scalar(value, dtype)
    return torch.full((), hi, dtype=dtype, device=device), torch.full((), lo, dtype=dtype, device=device)


class StorageArithmetic:
    """Strict arithmetic: every named operation is rounded to the format in which the values are kept.

    rounded: for each state that is rounded at random, how: it is given the whole average in fp32, and returns it in
    the format. A factor that is a Python number enters a product unrounded (as fp32, the product is rounded
    once); a summand that is a Python number is rounded to the format first. A state with a low component decays
    as an expansion times an expansion: the decay's own residual is kept.
    """

    def __init__(self, rounded: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> None:
        self._rounded = rounded or {}

    def product(self, a: Tensor, b: Tensor | Scalar) -> Tensor:
        return a * b

    def quotient(self, a: Tensor, b: Tensor) -> Tensor:
        return a / b

    def square_root(self, a: Tensor) -> Tensor:
        return a.sqrt()

    def average(self, state: State, name: str, decay: Scalar, increment: Tensor) -> Tensor:
        value, low_name = state[name], name + LOW_COMPONENT_SUFFIX
        low = state.get(low_name)
        if name in self._rounded:
            state[name] = self._rounded[name](value.to(torch.float32) * decay + increment.to(torch.float32))
        elif low is None:
            state[name] = value * decay + increment
        else:
            pair = _scalar_pair(float(decay), value.dtype, value.device)
            # An average of such increments stays finite: the sum of a pair with infinity in it is not a number.
            most = torch.finfo(value.dtype).max * max(1 - float(decay), 2.0**-16) / 2
            increment.clamp_(-most, most)
            state[name], state[low_name] = grow(*multiply_expansions(*pair, value, low), increment)
        return state[name]

    def keep_maximum(self, state: State, name: str, other: str) -> Tensor:
        high, other_high = state[name], state[other]
        low = state.get(name + LOW_COMPONENT_SUFFIX)
        if low is None:
            state[name] = torch.maximum(high, other_high)
            return state[name]
        other_low = state[other + LOW_COMPONENT_SUFFIX]
        larger = (other_high > high) | ((other_high == high) & (other_low > low))
        state[name] = torch.where(larger, other_high, high)
        state[name + LOW_COMPONENT_SUFFIX] = torch.where(larger, other_low, low)
        return state[name]
