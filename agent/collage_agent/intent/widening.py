"""Keeps an optimizer's step in fp64 where its own code would cast down: exact arithmetic has no casts.

Some optimizers compute in fp32 (or bf16) whatever their inputs are. While a clone of one runs in fp64, such casts
are no-ops, new tensors are fp64, and quantised states come back as plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from collage_agent.intent.optimizer_clone import clone_value, holds_values
from collage_agent.intent.weight_bits import CarriedNumbers
from collage_agent.sample.quantised_states import dequantised, is_quantised

__all__ = ["Widening", "widened"]

_CASTS: Final[frozenset[Any]] = frozenset(
    (Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as)
)
_FACTORIES: Final[frozenset[Any]] = frozenset(
    (
        *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.clone),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
    )
)
_OF_DEFAULT_DTYPE: Final[frozenset[Any]] = frozenset(
    (torch.zeros, torch.ones, torch.full, torch.empty, torch.tensor, torch.as_tensor, torch.scalar_tensor)
)
"""Of these only single numbers, such as a count or a sum of the run's state, become fp64: the dtype of a table or
of codes matters to who made it."""
_DRAWN: Final[frozenset[Any]] = frozenset((torch.randn, torch.rand, torch.randn_like, torch.rand_like))
"""In another dtype the same seed gives other numbers."""


class Widening(TorchFunctionMode):
    """While entered, floats stay or become fp64. `narrowed` says whether a cast of fp64 values was met, or an fp64
    number was taken apart into bits: then `bits.met`.

    native: the dtype of the live gradients. Random numbers that a step draws in its gradient's dtype, here fp64,
    are drawn in `native` and then widened: they equal the live step's. APOLLO draws its projection so.
    """

    def __init__(self, native: torch.dtype | None = None) -> None:
        super().__init__()
        self.narrowed = False
        self.bits = CarriedNumbers()
        self._native = native

    def __exit__(self, *raised: Any) -> None:
        self.bits.clear()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _DRAWN and self._native is not None and _drawn_dtype(args, kwargs or {}) == torch.float64:
            return func(*args, **{**(kwargs or {}), "dtype": self._native}).double()
        carried = self.bits.result_of(func, args, kwargs or {})
        if carried is not None:
            self.narrowed |= self.bits.met
            return carried
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        if is_quantised(result):
            return dequantised(result).double()
        if not (result.is_floating_point() and result.dtype != torch.float64):
            return result
        if func in _CASTS and isinstance(args[0], Tensor):
            return self._cast(args[0], result)
        made = func in _FACTORIES or (func in _OF_DEFAULT_DTYPE and result.numel() == 1)
        return result.double() if made else result

    def _cast(self, value: Tensor, result: Tensor) -> Tensor:
        if value.dtype != torch.float64 or is_quantised(value):
            return result.double()
        self.narrowed = True
        return value if value.device == result.device else value.to(result.device)


def _drawn_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a call of `_DRAWN` names, or that of the tensor it is like; None: torch's default."""
    like = args[0] if args else kwargs.get("input")
    return kwargs.get("dtype") or (like.dtype if isinstance(like, Tensor) else None)


def widened(state: dict[str, Any]) -> dict[str, Any]:
    """The same entries, with every float tensor in fp64, also in containers; the others are not copied."""
    return {key: _widened(value) for key, value in state.items()}


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_widened(entry) for entry in value)
    if type(value) is dict:
        return {key: _widened(entry) for key, entry in value.items()}
    if holds_values(value):
        copied = clone_value(value)
        vars(copied).update(widened(vars(copied)))
        return copied
    return value
