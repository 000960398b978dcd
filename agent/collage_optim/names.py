"""Names of parameters and dtypes for messages."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["dtype_name", "plain_name"]

_WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def plain_name(name: str) -> str:
    """The name without the parts that wrappers (DDP, FSDP, compile, checkpointing) put in front of theirs."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
