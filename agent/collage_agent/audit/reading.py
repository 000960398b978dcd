"""Reading checkpoints without running their code: torch files with weights_only, safetensors, folders of both."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from collage_monitor.errors import CollageError

__all__ = ["Checkpoint", "CheckpointError", "read_checkpoint"]

_TORCH_ENDINGS: Final = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NOT_WEIGHTS: Final = ("rng_state", "random_states", "scheduler", "scaler", "training_args", "trainer_state")
_DEPTH: Final = 5
_UNSAFE: Final = (
    "holds Python objects beyond tensors and plain values, and loading those could run code; save state dicts: "
    "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, PATH)"
)


class CheckpointError(CollageError):
    """A checkpoint that cannot be read; the message names the file and what to do."""


@dataclass
class Checkpoint:
    """What was found: the model's tensors by name, the optimizers' state dicts, and what was passed over."""

    files: list[str] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_checkpoint(path: Path) -> Checkpoint:
    """Everything in a file or folder that can be read safely. Tensors stay on disk where the format allows it.

    Raises:
        CheckpointError: nothing there, nothing readable, or a format that would have to run code.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder; pass a checkpoint file, or the folder that holds it"
        )
    checkpoint = Checkpoint()
    if path.is_file():
        _read_file(path, checkpoint)
    else:
        _read_folder(path, checkpoint)
    if not checkpoint.weights and not checkpoint.optimizers:
        told = f" ({'; '.join(checkpoint.notes)})" if checkpoint.notes else ""
        raise CheckpointError(f"{path}: no model weights and no optimizer state were found{told}")
    return checkpoint


def _read_folder(folder: Path, checkpoint: Checkpoint) -> None:
    if (folder / ".metadata").exists():
        raise CheckpointError(
            f"{folder}: a distributed checkpoint, whose metadata is a pickle; convert it first: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} checkpoint.pt"
        )
    for file in _files_of(folder):
        try:
            _read_file(file, checkpoint)
        except CheckpointError as error:
            checkpoint.notes.append(f"not read: {error}")


def _files_of(folder: Path) -> Iterator[Path]:
    """The folder's tensor files; where weights are there twice, safetensors."""
    files = sorted(entry for entry in folder.iterdir() if entry.is_file())
    safe = [file for file in files if file.suffix == ".safetensors"]
    for index in folder.glob("*.safetensors.index.json"):
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(named - {file.name for file in safe})
        if missing:
            raise CheckpointError(
                f"{index}: names {missing[0]}, which is not there; {len(missing)} shards are missing"
            )
        safe = [file for file in safe if file.name in named]
    yield from safe
    for file in files:
        if not file.name.endswith(_TORCH_ENDINGS) or file.name.startswith(_NOT_WEIGHTS):
            continue
        if not (safe and file.name.startswith("pytorch_model")):
            yield file


def _read_file(path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.files.append(path.name)
    if path.suffix == ".safetensors":
        checkpoint.weights.update(_read_safetensors(path))
        return
    found = _load_torch(path)
    candidates: list[tuple[str, dict[str, Tensor]]] = []
    _search(found, "", candidates, checkpoint.optimizers, _DEPTH)
    candidates.sort(key=lambda entry: -sum(tensor.numel() for tensor in entry[1].values()))
    for place, _ in candidates[1:]:
        checkpoint.notes.append(
            f"{path.name}: the tensors under {place!r} were not looked at, a larger part is the model"
        )
    if candidates:
        checkpoint.weights.update(candidates[0][1])


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(f"{path}: reading it needs safetensors; pip install safetensors") from error
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); write or copy it again") from error


def _load_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            # What torch would warn of here ends in one of the errors below.
            warnings.simplefilter("ignore")
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:
                # Files of the format before torch 1.6 cannot be mapped.
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unsafe = "nsupported global" in str(error) or "nsupported class" in str(error)
        reason = _UNSAFE if unsafe else "is not a torch file, or is cut off"
        raise CheckpointError(f"{path}: {reason}") from error
    except (RuntimeError, EOFError, OSError, ValueError, AttributeError, KeyError) as error:
        first = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{path}: cannot be read as a torch file ({first}); is it whole?") from error


def _search(
    value: Any,
    place: str,
    candidates: list[tuple[str, dict[str, Tensor]]],
    optimizers: list[Mapping[str, Any]],
    depth: int,
) -> None:
    """Find optimizer state dicts and dicts of tensors, wherever a training puts them."""
    if isinstance(value, list | tuple) and depth:
        for index, entry in enumerate(value):
            _search(entry, f"{place}[{index}]", candidates, optimizers, depth - 1)
    if not isinstance(value, Mapping):
        return
    if "state" in value and "param_groups" in value:
        optimizers.append(value)
        return
    tensors = {str(key): entry for key, entry in value.items() if isinstance(entry, Tensor)}
    if tensors:
        candidates.append((place or "the top level", tensors))
    if depth:
        for key, entry in value.items():
            _search(entry, f"{place}.{key}" if place else str(key), candidates, optimizers, depth - 1)
