"""On a CPU, products of 16-bit weights are computed in fp32 and rounded once.

Most processors have no unit for bfloat16 products: torch then multiplies such matrices eleven times slower than
fp32 ones (AVX2, one thread). Figures become alike on every processor, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["compute_products_in_fp32"]

Model = TypeVar("Model", bound=nn.Module)
_NARROW = (torch.bfloat16, torch.float16)
_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        functional.linear,
        functional.scaled_dot_product_attention,
        torch.addmm,
        torch.gru,
        torch.matmul,
        Tensor.matmul,
    }
)


def compute_products_in_fp32(model: Model) -> Model:
    """Compute each product and attention of the model's calls in fp32 if it is on a CPU; returns `model`.

    Operands in bf16 or fp16 are widened, and the result is rounded to their dtype; gradients likewise. Weights keep
    their dtype. Nothing changes on a device. Does not synchronise.
    """
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)
    return model


class _Fp32Products(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function not in _PRODUCTS or not _is_narrow(arguments[0]):
            return function(*arguments, **named)
        operands = _Operands()
        with saved_tensors_hooks(operands.narrowed, _widened):
            wide = function(*operands.widen(arguments), **operands.widen(named))
        return _rounded(wide, arguments[0].dtype)


class _Operands:
    """The operands of one product: widened for it, and saved for the backward pass as they were."""

    def __init__(self) -> None:
        self._originals: dict[int, Tensor] = {}

    def widen(self, value: Any) -> Any:
        """`value` with its narrow tensors, which may be nested in tuples, lists and dictionaries, in fp32."""
        if isinstance(value, Tensor) and _is_narrow(value):
            wide = value.float()
            if wide.stride() == value.stride():
                self._originals[wide.untyped_storage().data_ptr()] = value.detach()
            return wide
        if isinstance(value, tuple | list):
            return type(value)(self.widen(item) for item in value)
        return {name: self.widen(item) for name, item in value.items()} if isinstance(value, dict) else value

    def narrowed(self, saved: Tensor) -> Tensor:
        """The same view of the operand behind `saved`, so that no fp32 copy is kept until the backward pass."""
        original = self._originals.get(saved.untyped_storage().data_ptr())
        if original is None:
            return saved
        begins = original.storage_offset() + saved.storage_offset()
        return original.as_strided(saved.shape, saved.stride(), begins)


def _is_narrow(value: Tensor) -> bool:
    return value.dtype in _NARROW and value.device.type == "cpu"


def _widened(saved: Tensor) -> Tensor:
    return saved.float() if _is_narrow(saved) else saved


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) else tuple(_rounded(item, dtype) for item in value)


_MODE = _Fp32Products()


def _enter(*_: Any) -> None:
    _MODE.__enter__()  # type: ignore[no-untyped-call]


def _leave(*_: Any) -> None:
    _MODE.__exit__(None, None, None)  # type: ignore[no-untyped-call]
