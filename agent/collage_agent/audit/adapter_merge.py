"""What merging a LoRA adapter into stored weights would lose, before it is merged.

A merge adds δ = scaling·B·A to a weight W and rounds the sum to W's dtype. What arrives is e = round(W + δ) − W.
`audit BASE --adapter ADAPTER` prints it (`tests/audit/test_adapter_merge.py` merges by PEFT itself).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from collage_optim.names import dtype_name
from msgspec import Struct
from torch import Tensor

from collage_agent.audit.checkpoint_files import CheckpointError, read_files
from collage_monitor.diagnosis.words import percent

__all__ = ["AdapterMerge", "LayerMerge", "audit_merge", "merge_text"]

_CONFIG: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_SHOWN: Final = 5
_KEEPS: Final = 0.99
"""An adapter of which so much arrives is merged well."""


class LayerMerge(Struct, frozen=True):
    """A weight: how much of what the adapter adds would arrive in it.

    arrived_ratio: Σ δ·e / Σ δ². lost_ratio: of the elements with δ ≠ 0, the share that would not change.
    """

    name: str
    dtype: str
    elements: int
    arrived_ratio: float | None
    lost_ratio: float | None


class _Sums(NamedTuple):
    """Sums over a weight, or several: elements, those with δ ≠ 0, those of them left as they are, Σ δ·e, Σ δ²."""

    name: str
    dtype: str
    elements: int
    added: int
    unchanged: int
    product: float
    squares: float


class AdapterMerge(Struct, frozen=True):
    """All weights that an adapter adds to, those that keep the least first; `total` of them together.

    left_out: tensors of the adapter that no merge of a LoRA's linear weights speaks for, such as embeddings.
    """

    base: str
    adapter: str
    total: LayerMerge
    layers: list[LayerMerge]
    left_out: list[str]

    @property
    def is_kept(self) -> bool:
        """Whether the merge keeps 99 % of what the adapter adds."""
        return self.total.arrived_ratio is None or self.total.arrived_ratio >= _KEEPS


def audit_merge(base: Path, adapter: Path) -> AdapterMerge:
    """What a merge of `adapter`, a folder as PEFT saves it, into the weights of `base` would lose. Host only.

    Raises:
        CheckpointError: no LoRA adapter, one of a kind that is merged otherwise, or one of another model.
    """
    config = _config_of(adapter)
    weights, parts = read_files(base).weights, read_files(adapter).weights
    found = [_merged(weights, parts, name, config) for name in parts if name.endswith(_DOWN)]
    if not found:
        raise CheckpointError(f"{adapter}: holds no lora_A; --adapter takes the folder of a LoRA adapter")
    dtypes = ", ".join(dict.fromkeys(layer.dtype for layer in found))
    total = _Sums("", dtypes, *map(sum, zip(*(layer[2:] for layer in found), strict=True)))
    layers = sorted(
        map(_layer, found), key=lambda own: math.inf if own.arrived_ratio is None else own.arrived_ratio
    )
    left_out = [name for name in parts if not name.endswith((_DOWN, _UP))]
    return AdapterMerge(str(base), str(adapter), _layer(total), layers, left_out)


def merge_text(merge: AdapterMerge) -> str:
    """The merge in plain words."""
    total = merge.total
    lines = [f"left out: {name}" for name in merge.left_out[:_SHOWN]]
    lines += [f"{merge.adapter}: adds to {len(merge.layers)} weights of {merge.base}, {total.elements:,} elements"]
    if total.arrived_ratio is None or total.lost_ratio is None:
        return "\n".join([*lines, "the adapter adds nothing: its B is 0"])
    lines.append(
        f"merged in {total.dtype}, {percent(total.arrived_ratio)} of what it adds arrives; "
        f"{percent(total.lost_ratio)} of the elements do not change"
    )
    if not merge.is_kept:
        lines += ["keeps the least:", *(f"  {_in_words(layer)}" for layer in merge.layers[:_SHOWN])]
        lines.append(
            "what to do: keep the adapter beside the weights, or merge it into float32 weights and keep those"
        )
    return "\n".join(lines)


def _in_words(layer: LayerMerge) -> str:
    if layer.arrived_ratio is None or layer.lost_ratio is None:
        return f"{layer.name}: nothing is added"
    told = f"{percent(layer.arrived_ratio)} arrives, {percent(layer.lost_ratio)} unchanged"
    return f"{layer.name} ({layer.dtype}): {told}"


def _config_of(adapter: Path) -> Mapping[str, Any]:
    try:
        config: Mapping[str, Any] = json.loads((adapter / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{adapter}: has no readable {_CONFIG}; --adapter takes the folder that PEFT's save_pretrained wrote"
        ) from error
    kind = "DORA" if config.get("use_dora") else config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{adapter}: is an adapter of kind {kind}; only LORA's merge is known")
    return config


def _merged(
    weights: Mapping[str, Tensor], parts: Mapping[str, Tensor], down: str, config: Mapping[str, Any]
) -> _Sums:
    """As PEFT merges: δ is computed in fp32 at least, kept in the adapter's dtype, and added."""
    module = down.removesuffix(_DOWN)
    name = f"{module.removeprefix(_PREFIX)}.weight"
    weight, up = weights.get(name), parts.get(module + _UP)
    if weight is None or up is None:
        what = f"{name} of the base" if weight is None else module + _UP
        raise CheckpointError(f"{down}: {what} is not there; pass the model that the adapter was trained on")
    narrow = parts[down].dtype
    wide = torch.float32 if narrow.itemsize < 4 else narrow
    added = _scaling(module, parts[down].shape[0], config) * (up.to(wide) @ parts[down].to(wide))
    added = added.T if config.get("fan_in_fan_out") else added
    if added.shape != weight.shape:
        raise CheckpointError(f"{name}: is {tuple(weight.shape)}, and the adapter adds {tuple(added.shape)}")
    arrived = (weight + added.to(narrow)).to(weight.dtype).double() - weight.double()
    exact = added.double()
    return _Sums(
        name=name,
        dtype=dtype_name(weight.dtype),
        elements=weight.numel(),
        added=int(exact.count_nonzero()),
        unchanged=int(((exact != 0) & (arrived == 0)).sum()),
        product=float((exact * arrived).sum()),
        squares=float(exact.square().sum()),
    )


def _layer(sums: _Sums) -> LayerMerge:
    return LayerMerge(
        name=sums.name,
        dtype=sums.dtype,
        elements=sums.elements,
        arrived_ratio=sums.product / sums.squares if sums.squares else None,
        lost_ratio=sums.unchanged / sums.added if sums.added else None,
    )


def _scaling(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """α / r, or α / √r of a rank-stabilised adapter; a module may have an α of its own, by PEFT's patterns."""
    place = module.removeprefix(_PREFIX)
    patterns = (config.get("alpha_pattern") or {}).items()
    own = (value for pattern, value in patterns if re.fullmatch(rf"(.*\.)?({pattern})", place))
    alpha = next(own, config.get("lora_alpha", rank))
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
