"""JSON lines of an export as a run again: its totals, its layers, its logged scalars, step by step.

The server's `export/file_formats.py` writes them: a change of either raises VERSION in both
(`tests/server/life/test_import.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from collage_monitor import wire
from collage_monitor.importing.imported_run import ImportRefusal, Source

__all__ = ["read_lines"]

_VERSION: Final = 1
_TAIL_BYTES: Final = 4096
_NO_STEPS: Final = (b'{"kind":"event"', b'{"kind": "event"', b'{"kind":"rank"', b'{"kind": "rank"')
"""How lines begin that an import leaves in the file."""


class _Step(msgspec.Struct, kw_only=True, frozen=True):
    step: int
    time: wire.Number
    scalars: dict[str, wire.Number] = msgspec.field(default_factory=dict)
    model: dict[str, wire.Number | None] | None = None
    layers: dict[str, list[wire.Number | None]] | None = None


class _Run(msgspec.Struct, kw_only=True, frozen=True):
    version: int
    run: wire.Run
    statistics: list[str]
    steps: int


_DECODE_STEP: Final = msgspec.json.Decoder(_Step).decode


def read_lines(path: Path) -> Source:
    """The run in the file. Points that merge several measured steps come back as points at their last step.

    Raises:
        ImportRefusal: not an export of JSON lines, of another version, or without its end.
    """
    _require_end(path)
    with path.open("rb") as file:
        head = _head(path, file.readline())
        layers, begin = _layers(path, file)
    run = head.run
    return Source(
        name=run.name,
        group=run.group,
        tags=run.tags,
        notes=run.notes,
        seed=run.seed,
        config=run.config,
        watch=run.watch,
        layers=layers,
        statistics=head.statistics,
        reports=_reports(path, begin, head.statistics, len(layers)),
        reports_expected=head.steps,
    )


def _require_end(path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - _TAIL_BYTES, 0))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    if b'"kind":"end"' not in last.replace(b" ", b""):
        raise ImportRefusal(f"{path} has no end line: it broke off, or is no export in JSON lines; export it again")


def _head(path: Path, line: bytes) -> _Run:
    try:
        head = msgspec.json.decode(line, type=_Run)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ImportRefusal(f"{path}: the first line does not describe a run ({error})") from error
    if head.version != _VERSION:
        raise ImportRefusal(
            f"{path} has version {head.version} of the format, this program reads {_VERSION}; use the program "
            "that wrote it, or a later one"
        )
    return head


def _layers(path: Path, file: BinaryIO) -> tuple[list[wire.Layer], int]:
    """The layers, and where the first line after them begins."""
    layers: list[wire.Layer] = []
    begin = file.tell()
    while line := file.readline():
        entry = _object(path, line)
        if entry["kind"] != "layer":
            break
        try:
            layers.append(msgspec.convert(entry.get("layer"), wire.Layer))
        except msgspec.MsgspecError as error:
            raise ImportRefusal(f"{path}: a layer cannot be read ({error}); export the run again") from error
        begin = file.tell()
    return layers, begin


def _object(path: Path, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ImportRefusal(f"{path}: a line is not JSON ({error}); export the run again") from error
    if not isinstance(entry, dict) or "kind" not in entry:
        raise ImportRefusal(f"{path}: a line has no kind: {line[:80]!r}; export the run again")
    return entry


def _reports(path: Path, begin: int, statistics: list[str], layer_count: int) -> Iterator[wire.Report]:
    seq = 0
    with path.open("rb") as file:
        file.seek(begin)
        while line := file.readline():
            if line.startswith((b'{"kind":"end"', b'{"kind": "end"')):
                _require_count(path, _object(path, line).get("steps"), seq)
                return
            if not line.startswith(_NO_STEPS):
                yield _report(path, line, seq, statistics, layer_count)
                seq += 1


def _require_count(path: Path, stated: object, found: int) -> None:
    if stated != found:
        raise ImportRefusal(f"{path} says that it has {stated} steps, but {found} are there; export it again")


def _report(path: Path, line: bytes, seq: int, statistics: list[str], layer_count: int) -> wire.Report:
    try:
        step = _DECODE_STEP(line)
        given: dict[str, Any] = {}
        if step.model is not None and statistics:
            model = np.array([_float(step.model.get(key)) for key in statistics])
            given = {"statistic_count": len(statistics), "model": wire.array_to_bytes(model)}
        if given and step.layers is not None:
            missing = [None] * layer_count
            rows = [[_float(value) for value in step.layers.get(key, missing)] for key in statistics]
            given |= {"layer_count": layer_count, "statistics": wire.array_to_bytes(np.array(rows))}
    except (msgspec.MsgspecError, ValueError) as error:
        raise ImportRefusal(f"{path}: step {seq + 1} of the file cannot be read ({error})") from error
    return wire.Report(
        seq=seq,
        step=step.step,
        time=wire.from_number(step.time),
        scalars={name: wire.from_number(value) for name, value in step.scalars.items()},
        **given,
    )


def _float(value: wire.Number | None) -> float:
    return float("nan") if value is None else wire.from_number(value)
