"""Converting a checkpoint to another strategy: gains, losses and bytes; then the files.

`collage-monitor convert` and `cure.py` call it. It writes new files only: a source is never changed. Which states a
strategy keeps is decided in `collage_optim`; a round trip is tested in `tests/audit/test_conversion.py`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from collage_optim import (
    CONVERTED_FROM,
    LOW_COMPONENT_SUFFIX,
    MASTER_PARAMETER,
    PARAMETER_LOW,
    RESIDUALS_FROM,
    Moment,
    StorageStrategy,
)
from collage_optim.integer_codes import stored_value, unpacked
from collage_optim.state_loading import convert, note_conversion
from collage_optim.strategies import SCALE_SUFFIX, check_dtype, check_packed, strategy_named
from collage_optim.tensor_step import component_names
from msgspec import Struct
from torch import Tensor

from collage_agent.audit.checkpoint_files import Checkpoint, CheckpointError, _StandIn
from collage_agent.audit.checkpoint_parameters import (
    SECOND_MOMENTS,
    CheckpointParameter,
    checkpoint_parameters,
    is_narrow,
    place_of,
)
from collage_agent.audit.split_layouts import read_checkpoint

__all__ = ["Conversion", "ConvertedCheckpoint", "check_output", "convert_checkpoint", "render_conversion"]

_Place = tuple[int, int, torch.Size]
_Optimizers = list[tuple[Mapping[str, Any], dict[str, Any]]]
_SUFFIXES: Final = (LOW_COMPONENT_SUFFIX, SCALE_SUFFIX)
_MASTERS: Final = "master-weights"
_BESIDE_WEIGHT: Final = (PARAMETER_LOW, MASTER_PARAMETER)


class ComponentChange(Struct, frozen=True):
    """The losses of one kind of value: the share of elements that change, and the largest relative change."""

    component: str
    changed_ratio: float
    largest_relative_change: float


class Conversion(Struct, frozen=True):
    """The report on a conversion. Bytes: of weights and states, without gradients; step: the last one taken."""

    path: str
    source: list[str]
    target: str
    parameters: int
    elements: int
    bytes_before: int
    bytes_after: int
    gained: list[str]
    lost: list[ComponentChange]
    never_kept: list[str]
    notes: list[str]
    step: int = 0


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A conversion that is made in memory: its report, and the way to write it."""

    report: Conversion
    path: Path
    checkpoint: Checkpoint
    weights: Mapping[_Place, Tensor]
    optimizers: _Optimizers

    def write(self, output: Path) -> None:
        """Write it in the layout of the old one, whole or not at all.

        Raises CheckpointError where `output` is there already, or an object in it was not loaded.
        """
        check_output(output)
        _write(self.path, output, self.checkpoint, self.weights, self.optimizers)


@dataclass
class _Tally:
    """Sums over all parameters."""

    sources: set[str] = field(default_factory=set)
    elements: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    gained: dict[str, None] = field(default_factory=dict)
    never_kept: dict[str, int] = field(default_factory=dict)
    changes: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def compare(self, component: str, before: Tensor, after: Tensor) -> None:
        changed, elements, largest = self.changes.get(component, (0, 0, 0.0))
        differs = after.ne(before) & ~(after.isnan() & before.isnan())
        relative = ((after - before).abs() / before.abs())[differs]
        found = float(relative.max()) if relative.numel() else 0.0
        changed, elements = changed + int(differs.sum()), elements + before.numel()
        self.changes[component] = changed, elements, max(largest, found)


def check_output(output: Path) -> None:
    """Raise CheckpointError for a path that is taken."""
    if output.exists():
        raise CheckpointError(f"{output}: exists already: remove it, or name another path with --output")


def convert_checkpoint(path: Path, strategy: str) -> ConvertedCheckpoint:
    """Convert a file or folder in memory.

    Values are compared before and after in fp64: what the new strategy can represent is equal. Weights in fp32
    become bfloat16, unless the strategy is plain. Raises CheckpointError for a checkpoint that cannot be read or
    paired, ValueError for a strategy that does not exist or cannot keep these weights.
    """
    target = strategy_named(strategy)
    checkpoint = read_checkpoint(path)
    if not checkpoint.optimizers:
        raise CheckpointError(f"{path}: no optimizer state was found, and nothing else is kept in a strategy's way")
    known, notes = checkpoint_parameters(checkpoint)
    entries = iter(known)
    tally, weights = _Tally(), dict[_Place, Tensor]()
    optimizers = [
        (optimizer, _converted_optimizer(optimizer, entries, target, weights, tally))
        for optimizer in checkpoint.optimizers
    ]
    if weights:
        notes.append("weights that the optimizer steps become bfloat16; other tensors keep their dtype")
    report = Conversion(
        path=str(path),
        source=sorted(tally.sources),
        target=target.name,
        parameters=sum(entry.has_state for entry in known),
        elements=tally.elements,
        bytes_before=tally.bytes_before,
        bytes_after=tally.bytes_after,
        gained=list(tally.gained),
        lost=[
            ComponentChange(name, changed / elements, largest)
            for name, (changed, elements, largest) in tally.changes.items()
            if changed
        ],
        never_kept=[f"{what}, of {count:,} weights" for what, count in tally.never_kept.items()],
        notes=[*checkpoint.notes, *notes],
        step=int(max((entry.step or 0 for entry in known), default=0)),
    )
    return ConvertedCheckpoint(report, path, checkpoint, weights, optimizers)


def render_conversion(conversion: Conversion) -> str:
    """The conversion in plain words."""
    before, after = conversion.bytes_before, conversion.bytes_after
    each = after / (conversion.elements or 1)
    lines = [
        f"{conversion.path}: {' and '.join(conversion.source)} to {conversion.target}, {conversion.parameters} "
        f"parameters, {conversion.elements:,} weights",
        f"  bytes of weights and states: {before:,} to {after:,}, {each:.4g} a weight",
    ]
    lines += [f"  gained: {line}" for line in conversion.gained]
    for loss in conversion.lost:
        lines.append(
            f"  lost: {loss.component}: {loss.changed_ratio:.1%} of the values change, by up to "
            f"{loss.largest_relative_change:.2g} of themselves"
        )
    if not conversion.lost:
        lines.append("  lost: nothing, every value is the same")
    lines += [f"  cannot be had: {line}" for line in conversion.never_kept]
    lines += [f"  note: {note}" for note in conversion.notes]
    return "\n".join(lines)


def _converted_optimizer(
    optimizer: Mapping[str, Any],
    entries: Iterator[CheckpointParameter],
    target: StorageStrategy,
    weights: dict[_Place, Tensor],
    tally: _Tally,
) -> dict[str, Any]:
    """The optimizer's state dict in the target's form; `weights` takes new weights by where the old ones lie."""
    state: dict[Any, Any] = dict(optimizer["state"])
    groups = []
    for group in optimizer["param_groups"]:
        was, sources = group.get("strategy"), list[Mapping[str, Any]]()
        for key in group["params"]:
            entry, place = next(entries), key if key in state else str(key)
            if entry.has_state:
                was = was or entry.strategy
                state[place] = _converted(entry, state[place], target, weights, tally, sources)
        if was == _MASTERS and not any(MASTER_PARAMETER in kept for kept in sources):
            was = None
        groups.append({**group, "strategy": target.name})
        note_conversion(groups[-1], was, sources)
    return {**optimizer, "state": state, "param_groups": groups}


def _converted(
    entry: CheckpointParameter,
    state: Mapping[str, Any],
    target: StorageStrategy,
    weights: dict[_Place, Tensor],
    tally: _Tally,
    sources: list[Mapping[str, Any]],
) -> dict[str, Any]:
    tensors = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    own = _in_our_words(entry, tensors)
    weight = _weight_of(entry, own)
    if entry.weight is not None and _adds_nothing(own.get(MASTER_PARAMETER), entry.weight):
        del own[MASTER_PARAMETER]
    wide = weight.dtype.itemsize >= 4
    visible = weight.to(torch.bfloat16) if wide and not target.is_plain else weight
    check_dtype(target, visible.dtype)
    if wide and visible is not weight:
        own[MASTER_PARAMETER] = weight.to(torch.float32)
        if entry.weight is not None:
            weights[place_of(entry.weight)] = visible
    sources.append({**own, **({"step": state["step"]} if "step" in state else {})})
    moments = {name: name in SECOND_MOMENTS for name in _averages(unpacked(own))}
    check_packed(target, "the checkpoint", sorted(moments))
    parameter = torch.nn.Parameter(visible, requires_grad=False)
    new = convert({"step": torch.zeros(()), **own}, moments, parameter, target)
    tally.sources.add(_name_of(entry, own, moments))
    _tell(own, weight, new, visible, moments, tally)
    del new["step"]
    return {**{key: value for key, value in state.items() if key not in tensors or key == "step"}, **new}


def _in_our_words(entry: CheckpointParameter, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states under our keys; other libraries' masters are known, their residuals are not."""
    own = {key: value for key, value in tensors.items() if key != "step" and value is not entry.master}
    if entry.master is not None:
        own[MASTER_PARAMETER] = entry.master
    foreign = [key for key, value in own.items() if value is entry.low and key != PARAMETER_LOW]
    foreign += [key for key in entry.state if key not in unpacked(tensors)]
    foreign += [
        key
        for key, value in tensors.items()
        if entry.weight is not None
        and key != "step"
        and value.shape != entry.weight.shape
        and not key.endswith(SCALE_SUFFIX)
    ]
    foreign += [entry.remainder_key] if entry.remainder_key not in ("", PARAMETER_LOW) else []
    if foreign:
        raise CheckpointError(
            f"{entry.name}: {foreign[0]} is kept beside the weight by another library, whose form is not "
            "converted; save fp32 weights from there"
        )
    return own


def _adds_nothing(master: Tensor | None, weight: Tensor) -> bool:
    """Whether a master weight only repeats its 16-bit weight, so that it keeps nothing extra."""
    return master is not None and is_narrow(weight.dtype) and torch.equal(master.to(torch.float32), weight.float())


def _weight_of(entry: CheckpointParameter, own: Mapping[str, Tensor]) -> Tensor:
    """The weight of these states; without a label, the one that the master weight rounds to."""
    if entry.weight is not None and entry.paired:
        return entry.weight
    master = own.get(MASTER_PARAMETER)
    if master is not None and (entry.weight is None or is_narrow(entry.weight.dtype)):
        return master.to(torch.bfloat16 if entry.weight is None else entry.weight.dtype)
    raise CheckpointError(
        f"{entry.name}: nothing says which weight its states belong to; build the optimizer from "
        "model.named_parameters(), then the checkpoint keeps the names"
    )


def _averages(own: Mapping[str, Tensor]) -> list[str]:
    parts = {name + suffix for name in own for suffix in _SUFFIXES}
    return [name for name in own if name not in parts and name not in _BESIDE_WEIGHT]


def _name_of(entry: CheckpointParameter, own: Mapping[str, Tensor], moments: Mapping[str, bool]) -> str:
    """The strategy that the checkpoint names, if these are its components; otherwise the one that is seen."""
    named = tuple(Moment(name, second) for name, second in moments.items())
    if entry.declared is not None and set(component_names(entry.declared, named)) == own.keys():
        return entry.declared.name
    return entry.strategy


def _stored(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    master = state.get(MASTER_PARAMETER)
    return master.to(torch.float64) if master is not None else stored_value(state, "parameter", weight)


def _tell(
    own: Mapping[str, Tensor],
    weight: Tensor,
    new: Mapping[str, Tensor],
    visible: Tensor,
    moments: Mapping[str, bool],
    tally: _Tally,
) -> None:
    """Count bytes, and compare values before and after."""
    held = {key: value for key, value in own.items() if key != MASTER_PARAMETER or value.dtype != weight.dtype}
    tally.elements += weight.numel()
    tally.bytes_before += _bytes([weight, *held.values()])
    tally.bytes_after += _bytes([visible, *(value for key, value in new.items() if key != "step")])
    tally.compare("weight", _stored(weight, own), _stored(visible, new))
    for name in moments:
        tally.compare(name, stored_value(own, name), stored_value(new, name))
    for key in (*_BESIDE_WEIGHT, *(name + LOW_COMPONENT_SUFFIX for name in moments)):
        if key in new and key not in held:
            whole = "weight" if key in _BESIDE_WEIGHT else key.removesuffix(LOW_COMPONENT_SUFFIX)
            kept_more = (
                bool(own.keys() & set(_BESIDE_WEIGHT))
                if whole == "weight"
                else unpacked(own)[whole].dtype.itemsize >= 4
            )
            what = "master weight" if key == MASTER_PARAMETER else f"residual of {whole}"
            tally.gained[f"a {what}{'' if kept_more else ', which begins at zero'}"] = None
            if not kept_more:
                lost = f"what rounding has taken from {whole} so far: it was never kept"
                tally.never_kept[lost] = tally.never_kept.get(lost, 0) + weight.numel()


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _write(
    path: Path,
    output: Path,
    checkpoint: Checkpoint,
    weights: Mapping[_Place, Tensor],
    optimizers: _Optimizers,
) -> None:
    """Write everything to a new path beside `output`, and rename it when it is whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        draft = Path(folder) / output.name
        if path.is_file():
            torch.save(_rebuilt(checkpoint.contents[path.name], weights, optimizers), draft)
        elif (path / ".metadata").exists():
            import torch.distributed.checkpoint as dcp

            content = _rebuilt(checkpoint.contents[path.name], weights, optimizers)
            dcp.save(content, checkpoint_id=draft, no_dist=True)
        else:
            shutil.copytree(path, draft)
            for name, content in checkpoint.contents.items():
                _write_file(draft / name, _rebuilt(content, weights, optimizers))
            _recount(draft)
        draft.rename(output)


def _write_file(file: Path, content: Any) -> None:
    if file.suffix != ".safetensors":
        torch.save(content, file)
        return
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as old:
        metadata = old.metadata()
    save_file({name: tensor.contiguous() for name, tensor in content.items()}, file, metadata=metadata)


def _recount(folder: Path) -> None:
    """The sizes in the index of sharded safetensors, which narrower weights change."""
    for index in folder.glob("*.safetensors.index.json"):
        told = json.loads(index.read_text(encoding="utf-8"))
        weights = read_checkpoint(folder).weights
        told.setdefault("metadata", {})["total_size"] = _bytes([weights[name] for name in told["weight_map"]])
        index.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _rebuilt(value: Any, weights: Mapping[_Place, Tensor], optimizers: _Optimizers) -> Any:
    """The same content with converted weights and optimizers in the place of the old ones."""
    for old, new in optimizers:
        if value is old:
            return new
    if isinstance(value, Tensor):
        return weights.get(place_of(value), value)
    if isinstance(value, Mapping):
        rebuilt = {key: _rebuilt(entry, weights, optimizers) for key, entry in value.items()}
        if any(str(key).startswith("param_groups.") for key in value):
            return _flattened(value, rebuilt, optimizers)
        return rebuilt
    if isinstance(value, list | tuple):
        entries = [_rebuilt(entry, weights, optimizers) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    if type(value).__module__ == _StandIn.__module__:
        raise CheckpointError(
            f"an object of class {type(value).__name__} is in it, which is not loaded and so cannot be written; "
            "save state dicts: torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, PATH)"
        )
    return value


def _flattened(value: Mapping[str, Any], rebuilt: dict[str, Any], optimizers: _Optimizers) -> dict[str, Any]:
    """An optimizer of one entry a state, by path, in which the states are replaced."""
    for old, new in optimizers:
        if all(f"state.{owner}.{name}" in value for owner, state in old["state"].items() for name in state):
            kept = {key: entry for key, entry in rebuilt.items() if not key.startswith("state.")}
            states = {
                f"state.{own}.{name}": entry for own, state in new["state"].items() for name, entry in state.items()
            }
            options = {
                f"param_groups.{own}.{option}": group[option]
                for group in new["param_groups"]
                for own in group["params"]
                for option in ("strategy", RESIDUALS_FROM, CONVERTED_FROM)
                if option in group
            }
            return {**kept, **states, **options}
    return rebuilt
