"""Quantised optimizer states: recognised by their form, and decoded to the numbers that they represent.

Three forms: a tensor subclass that can `dequantize()` (torchao's 8-bit, 4-bit and FP8 states), bytes beside their
table and their blocks' scales under the numbered keys of bitsandbytes (`state1`, `qmap1`, `absmax1`), and averages
that our own optimizers keep as integers, wholly or in part (`collage_optim.integer_codes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from collage_optim import LOW_COMPONENT_SUFFIX, PARAMETER_LOW, SCALE_SUFFIX
from collage_optim.integer_codes import decoded
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.nn import Parameter

__all__ = [
    "completes_another",
    "dequantised",
    "is_quantised",
    "is_read_as_kept",
    "own_parts",
    "reading",
    "reading_dtype",
    "stored_tensors",
]

_PLAIN: Final = (Tensor, Parameter)
_BLOCK: Final = 256
"""Elements that share a scale in bitsandbytes' states."""


def is_quantised(tensor: Tensor) -> bool:
    """Whether the tensor's class keeps codes and knows how to turn them into numbers."""
    kind = type(tensor)
    return kind not in _PLAIN and getattr(kind, "dequantize", Tensor.dequantize) is not Tensor.dequantize


def dequantised(tensor: Tensor) -> Tensor:
    """The numbers, in the float dtype that the class computes in; of a distributed tensor this rank's shard."""
    tensor = local_part(tensor)
    return tensor.dequantize() if is_quantised(tensor) else tensor


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the bytes of a quantised tensor, in this shard if it is distributed; any other tensor
    is its own.

    A sparse tensor has no storage of its own: nothing is returned.
    """
    if tensor.layout != torch.strided:
        return []
    if type(tensor) in _PLAIN:
        return [tensor]
    tensor = local_part(tensor.detach()) if not is_quantised(tensor) else tensor
    if not is_quantised(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(tensor, name) for name in names]


def reading(state: Mapping[str, Any], key: str) -> Tensor:
    """The state under `key` as numbers: the tensor itself unless it is quantised. No synchronisation."""
    tensor: Tensor = state[key]
    if _is_coded(state, key):
        parts = (key, key + LOW_COMPONENT_SUFFIX, key + SCALE_SUFFIX)
        numbers = decoded({part: local_part(state[part]) for part in parts if part in state}, key)
        return tensor if numbers is None else numbers
    table, scales = _table_and_scales(state, key)
    if table is not None and scales is not None and tensor.dtype == torch.uint8:
        return _blockwise(tensor, table, scales)
    return tensor if type(tensor) in _PLAIN or not is_quantised(local_part(tensor)) else dequantised(tensor)


def reading_dtype(state: Mapping[str, Any], key: str) -> torch.dtype:
    """The dtype that `reading` returns, without reading; quantised states are read as fp32."""
    tensor: Tensor = state[key]
    if _is_coded(state, key):
        return torch.float32
    if type(tensor) in _PLAIN and tensor.dtype != torch.uint8:
        return tensor.dtype
    table, scales = _table_and_scales(state, key)
    bytes_of_table = table is not None and scales is not None and tensor.dtype == torch.uint8
    return torch.float32 if bytes_of_table or is_quantised(local_part(tensor)) else tensor.dtype


def is_read_as_kept(state: Mapping[str, Any], key: str) -> bool:
    """Whether `reading` gives the tensor itself."""
    tensor: Tensor = state[key]
    table, scales = _table_and_scales(state, key)
    of_table = table is not None and scales is not None and tensor.dtype == torch.uint8
    return not (_is_coded(state, key) or of_table or is_quantised(local_part(tensor)))


def own_parts(state: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The keys of our own codes for an average, if a sample of them can be decoded; empty for other states."""
    parts = tuple(part for part in (key, key + LOW_COMPONENT_SUFFIX, key + SCALE_SUFFIX) if part in state)
    alike = all(state[part].shape == state[key].shape for part in parts if not part.endswith(SCALE_SUFFIX))
    return parts if alike and _is_coded(state, key) else ()


def completes_another(state: Mapping[str, Any], key: str) -> bool:
    """Whether the entry is a part of an average under another key: integers below it, or blocks' scales."""
    if key.endswith(SCALE_SUFFIX):
        return key.removesuffix(SCALE_SUFFIX) in state
    return key.endswith(LOW_COMPONENT_SUFFIX) and _is_coded(state, key.removesuffix(LOW_COMPONENT_SUFFIX))


def _is_coded(state: Mapping[str, Any], key: str) -> bool:
    """Whether our own codes keep the average, wholly or in part."""
    tensor, low = state.get(key), state.get(key + LOW_COMPONENT_SUFFIX)
    if not isinstance(tensor, Tensor):
        return False
    in_part = isinstance(low, Tensor) and not low.dtype.is_floating_point
    # int16 is the root of a second moment only beside the weight's low bits.
    root = tensor.dtype == torch.int16 and key != PARAMETER_LOW and PARAMETER_LOW in state
    return root or in_part or key + SCALE_SUFFIX in state


def _table_and_scales(state: Mapping[str, Any], key: str) -> tuple[Tensor | None, Tensor | None]:
    number = key.removeprefix("state")
    return state.get(f"qmap{number}"), state.get(f"absmax{number}")


def _blockwise(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Codes looked up in the table and scaled by their block; the last block may be shorter."""
    flat = table[codes.reshape(-1).int()]
    spread = scales.reshape(-1, 1).expand(-1, _BLOCK).reshape(-1)[: flat.numel()]
    return (flat * spread).view(codes.shape)
