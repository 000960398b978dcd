"""Reading checkpoints without running their code: torch files, safetensors, folders of both, distributed ones.

Torch files are read with weights_only. A class that is not in torch's own list (the model's, if the whole model was
saved; argparse.Namespace) is replaced by a stand-in that only holds its saved data.
"""

from __future__ import annotations

import collections
import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from collage_monitor.errors import CollageError

__all__ = ["BESIDE_DISTRIBUTED", "Checkpoint", "CheckpointError", "read_files"]

_TORCH_ENDINGS: Final = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NOT_WEIGHTS: Final = ("rng_state", "random_states", "scheduler", "scaler", "training_args", "trainer_state")
_TORCH_STARTS: Final = (b"PK\x03\x04", b"\x80")
"""A zip file, or a pickle, as torch saved before 1.6."""
_HEAD_BYTES: Final = 262
_DEPTH: Final = 5
_UNSAFE: Final = (
    "holds Python objects beyond tensors and plain values{named}, and loading those could run code; save state "
    "dicts: torch.save({{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}}, PATH)"
)
_NAMES_NEWEST: Final = {"latest": "", "latest_checkpointed_iteration.txt": "iter_"}
"""Files that name the newest checkpoint's folder, and what stands before a number there."""
BESIDE_DISTRIBUTED: Final = "common.pt"
"""Where Megatron keeps, beside a distributed checkpoint, what is the same on all ranks."""
_CONTAINERS: Final[list[Any]] = [collections.defaultdict, dict]
_STOOD_IN_FOR: Final = ("torch.nn.", "torch._C._nn.", "deepspeed.utils.tensor_fragment.fragment_address")
"""Functions of torch, and a class that is spelled as a function."""
_INDEX_OF_DISTRIBUTED: Final = {
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    # Megatron keeps the plan of its save in the index.
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
}
"""All that the index of a distributed checkpoint is made of."""


class CheckpointError(CollageError):
    """A checkpoint that cannot be read; the message names the file and what to do."""


@dataclass
class Checkpoint:
    """The content of a checkpoint: the model's tensors by name, the optimizers' state dicts, and the skipped
    entries.

    ordered: the tensors stand in the model's order. Those of safetensors and of a distributed checkpoint do not.
    contents: what each file holds, or a distributed checkpoint's folder, as it was read. layout: the name of a
    layout that keeps states apart from their weights, "" if there is none; understood: whether they were put
    together.
    """

    files: list[str] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ordered: bool = True
    contents: dict[str, Any] = field(default_factory=dict)
    layout: str = ""
    understood: bool = True


class _StandIn:
    """Holds the saved content of an object whose class is not loaded; no code of that class runs."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def read_files(path: Path) -> Checkpoint:
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
    return checkpoint


def _newest_in(folder: Path) -> Path:
    """The folder of the newest checkpoint, if this one only names it, as DeepSpeed's and Megatron's do."""
    for file, prefix in _NAMES_NEWEST.items():
        if (folder / file).is_file():
            tag = (folder / file).read_text(encoding="utf-8").strip()
            named = folder / (f"{prefix}{int(tag):07d}" if prefix and tag.isdigit() else tag)
            if named.is_dir() and named.parent == folder:
                return named
    return folder


def _read_folder(folder: Path, checkpoint: Checkpoint) -> None:
    folder = _newest_in(folder)
    if (folder / ".metadata").exists():
        checkpoint.files.append(folder.name)
        checkpoint.ordered = False
        checkpoint.contents[folder.name] = _load_distributed(folder)
        _take(checkpoint.contents[folder.name], folder.name, checkpoint)
        if (beside := folder / BESIDE_DISTRIBUTED).is_file():
            checkpoint.contents[BESIDE_DISTRIBUTED] = _load_torch(beside)
        return
    for file in _files_of(folder):
        try:
            _read_file(file, checkpoint)
        except CheckpointError as error:
            checkpoint.notes.append(f"not read: {error}")


def _files_of(folder: Path) -> Iterator[Path]:
    """The folder's tensor files; safetensors if weights are stored twice."""
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
        checkpoint.ordered = False
        checkpoint.contents[path.name] = _read_safetensors(path)
        checkpoint.weights.update(checkpoint.contents[path.name])
        return
    checkpoint.contents[path.name] = _load_torch(path)
    _take(checkpoint.contents[path.name], path.name, checkpoint)


def _take(found: Any, name: str, checkpoint: Checkpoint) -> None:
    """Add what is the model and what are optimizers."""
    candidates: list[tuple[str, dict[str, Tensor]]] = []
    _search(found, "", candidates, checkpoint.optimizers, _DEPTH)
    candidates.sort(key=lambda entry: -sum(tensor.numel() for tensor in entry[1].values()))
    for place, _ in candidates[1:]:
        checkpoint.notes.append(
            f"{name}: the tensors under {place!r} were not looked at, a larger part is the model"
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
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.startswith(_TORCH_STARTS) and head[257:262] != b"ustar":
        found = f"it begins with {head[:8]!r}" if head else "it is empty"
        raise CheckpointError(f"{path}: is no checkpoint ({found}); pass a .safetensors file, or one of torch.save")
    try:
        with warnings.catch_warnings():
            # torch's warnings repeat the errors below.
            warnings.simplefilter("ignore")
            with torch.serialization.safe_globals([*_CONTAINERS, *_stand_ins(path)]):
                try:
                    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError:
                    # Files of the format before torch 1.6 cannot be mapped.
                    return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_refusal(error)}") from error
    except (RuntimeError, EOFError, OSError, ValueError, AttributeError, KeyError) as error:
        first = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{path}: cannot be read as a torch file ({first}); is it whole?") from error


def _refusal(error: pickle.UnpicklingError) -> str:
    told = str(error)
    if "nsupported global" in told or "nsupported class" in told or "locklisted" in told or "trust" in told:
        name = told.partition("GLOBAL ")[2].split(" ", 1)[0]
        return _UNSAFE.format(named=f" ({name})" if name else "")
    return "is not a torch file, or is cut off"


def _stand_ins(file: Any) -> list[tuple[Callable[..., Any], str]]:
    """Stand-ins for the classes that a file names beyond torch's list, and for torch's own functions.

    By the spelling of classes; functions of others are refused when the file is read.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (ValueError, RuntimeError, OSError, pickle.UnpicklingError, KeyError):
        return []  # The format before torch 1.6, or no torch file: reading it raises the right error.
    known = [f"{entry.__module__}.{entry.__name__}" for entry in _CONTAINERS]
    return [
        (type(name.rpartition(".")[2], (_StandIn,), {}), name)
        for name in named
        if name not in known
        and (name.rpartition(".")[2].lstrip("_")[:1].isupper() or name.startswith(_STOOD_IN_FOR))
    ]


def _load_distributed(folder: Path) -> dict[str, Any]:
    """A distributed checkpoint as one dictionary, in memory. Its index and its objects are pickles: see above."""
    state: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = _SafeReader(folder, _index_of(folder / ".metadata"))
            planner: Any = _SafePlanner
            _load_state_dict(state, storage_reader=reader, planner=planner(), no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch's is no Exception, and holds the cause by rank
        cause: BaseException = error.failures[0][0] if isinstance(error, CheckpointException) else error
        if isinstance(cause, pickle.UnpicklingError):
            raise CheckpointError(f"{folder}: {_refusal(cause)}") from error
        first = str(cause).split("\n", 1)[0] or type(cause).__name__
        raise CheckpointError(f"{folder}: a distributed checkpoint that cannot be read ({first})") from error
    return state


class _IndexUnpickler(pickle.Unpickler):
    """Reads the index of a distributed checkpoint, and refuses every name that none is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_OF_DISTRIBUTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name} in the index")


def _index_of(file: Path) -> Metadata:
    try:
        index = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
    except (EOFError, OSError) as error:
        raise CheckpointError(f"{file}: is cut off; copy the folder again") from error
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{file}: is no index of a distributed checkpoint")
    return index


class _SafeReader(distributed_checkpoint.FileSystemReader):
    """torch's reader, but for the index, which torch's own unpickles whatever it names."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _SafePlanner(_EmptyStateDictLoadPlanner):
    """Rebuilds the dictionary from the index; values that are no tensors are read like torch files."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        stand_ins = _stand_ins(value)
        value.seek(0)
        with torch.serialization.safe_globals([*_CONTAINERS, *stand_ins]):
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict and name in self.mappings:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


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
    if isinstance(value, _StandIn):
        kept = vars(value)
        if "_modules" in kept:
            candidates.append((place or "the top level", dict(_tensors_of_module(kept, ""))))
            return
        value = kept
    if not isinstance(value, Mapping):
        return
    if "state" in value and "param_groups" in value:
        optimizers.append(value)
        return
    if any(str(key).startswith("param_groups.") for key in value):
        optimizers.append(_unflattened(value))
        value = {key: entry for key, entry in value.items() if not str(key).startswith(("state.", "param_groups."))}
    tensors = {str(key): entry for key, entry in value.items() if isinstance(entry, Tensor)}
    if tensors:
        candidates.append((place or "the top level", tensors))
    if depth:
        for key, entry in value.items():
            _search(entry, f"{place}.{key}" if place else str(key), candidates, optimizers, depth - 1)


def _unflattened(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """An optimizer's state of the form `flatten_optimizer_state_dict`: one entry a state or option, by path."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, entry in value.items():
        kind, _, path = str(key).partition(".")
        parameter, _, name = path.rpartition(".")
        if kind == "state":
            state.setdefault(parameter, {})[name] = entry
        elif kind == "param_groups":
            groups.setdefault(parameter, {"params": [parameter]})[name] = entry
    return {"state": state, "param_groups": list(groups.values())}


def _tensors_of_module(kept: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a module's attributes, under the names of its state dict."""
    for own in ("_parameters", "_buffers"):
        for name, tensor in kept.get(own, {}).items():
            if isinstance(tensor, Tensor):
                yield prefix + name, tensor.detach()
    for name, module in kept.get("_modules", {}).items():
        if isinstance(module, _StandIn):
            yield from _tensors_of_module(vars(module), f"{prefix}{name}.")
