"""Lets a clone run in fp64 although its step takes weights apart into bits: an integer view keeps the number.

Some optimizers read a 16-bit weight as an integer, append the bits kept beside it, and write both halves back;
others add noise to the bits below, to round at random. Neither makes sense for an fp64 number. So an integer view
of one carries the number itself: viewed as a float again, it is that number, whatever was done to the integers.
`observed_storage.py` checks this against a clone in the weight's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["CarriedNumbers", "UnsignedBits"]

# Without int64: a view as wide as fp64 shows the number's own bits.
_INTEGERS: Final = frozenset((torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32))
_UNSIGNED: Final = frozenset((torch.uint16, torch.uint32))
_OF_BITS: Final = frozenset(
    f"{start}{name}{end}"
    for name in ("and", "or", "xor", "lshift", "rshift", "add", "sub", "invert")
    for start, end in (("__", "__"), ("__r", "__"), ("__i", "__"))
) | frozenset(
    f"{name}{end}"
    for name in (
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift"),
        *("add", "sub"),
    )
    for end in ("", "_")
)


class CarriedNumbers:
    """The integer tensors of one step that carry fp64 numbers. `met`: whether there ever was one."""

    def __init__(self) -> None:
        self.met = False
        self._carried: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget the tensors of a step that is over."""
        self._carried.clear()

    def result_of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func` if it views a number as bits, or works on bits that carry one; otherwise None."""
        seen_as = _dtype_of_view(func, args, kwargs)
        first = args[0] if args else None
        # A tensor without dimensions is a setting that is rounded on purpose, such as a β, not a weight.
        weights = isinstance(first, Tensor) and first.dtype == torch.float64 and first.dim()
        if isinstance(first, Tensor) and weights and seen_as in _INTEGERS:
            self.met = True
            return self._carrier(first, seen_as)
        if not self._carried:
            return None
        numbers = [self._number(value) for value in args[:2]]
        number = next((known for known in numbers if known is not None), None)
        if number is None:
            return None
        if seen_as is not None:
            return number if seen_as.is_floating_point else self._carrier(number, seen_as)
        if func is Tensor.copy_:
            return self._copied(args[0], numbers)
        if func.__name__ in _OF_BITS:
            return self._worked_on(func.__name__, args, numbers, number)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not result.is_floating_point() and result.dtype != torch.bool:
            return self._tag(result, number.clone() if result.shape == number.shape else func(number, *args[1:]))
        return result

    def _number(self, value: object) -> Tensor | None:
        known = self._carried.get(id(value))
        return None if known is None else known[1]

    def _tag(self, integers: Tensor, number: Tensor) -> Tensor:
        self._carried[id(integers)] = integers, number
        return integers

    def _carrier(self, number: Tensor, dtype: torch.dtype) -> Tensor:
        return self._tag(torch.zeros(number.shape, dtype=dtype, device=number.device), number)

    def _copied(self, target: Tensor, numbers: list[Tensor | None]) -> Tensor:
        known, source = numbers
        if source is None:
            return target
        if known is None:
            return self._tag(target, source.clone())
        known.copy_(source)
        return target

    def _worked_on(self, name: str, args: tuple[Any, ...], numbers: list[Tensor | None], number: Tensor) -> Tensor:
        """The result of joining, shifting or masking bits; noise below them does not change the number."""
        if _is_in_place(name):
            return args[0] if numbers[0] is not None else self._tag(args[0], number.clone())
        carrier = args[0] if numbers[0] is not None else args[1]
        return self._carrier(number.clone(), carrier.dtype)


def _is_in_place(name: str) -> bool:
    """Whether a method of tensors changes its own: `add_` and `__iadd__` do, `add` and `__invert__` do not."""
    return (name.startswith("__i") and name != "__invert__") or (name.endswith("_") and not name.endswith("__"))


def _dtype_of_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a call of `Tensor.view` requests; None for any other call."""
    if func is not Tensor.view:
        return None
    asked = kwargs.get("dtype", args[1] if len(args) == 2 else None)
    return asked if isinstance(asked, torch.dtype) else None


class UnsignedBits(TorchFunctionMode):
    """While entered, bits of unsigned 16 and 32-bit integers can be worked on, for which torch has kernels on the
    host only in compiled code."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.dtype not in _UNSIGNED or func.__name__ not in _OF_BITS:
            return func(*args, **(kwargs or {}))
        kind = first.dtype
        wide = [value.to(torch.int64) if isinstance(value, Tensor) else value for value in args]
        found = func(*wide, **(kwargs or {})).bitwise_and(2 ** (8 * kind.itemsize) - 1).to(kind)
        return first.copy_(found) if _is_in_place(func.__name__) else found
