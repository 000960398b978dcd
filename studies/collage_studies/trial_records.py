"""Records of finished trials, one JSON line each, appended as they end: an interrupted study goes on from there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from collage_studies.study import Curve, Record, Trial

__all__ = ["RecordFile", "compact"]

_DIGITS = 6
_VALUE_DIGITS = 9
"""A gap between two losses may be a hundred-thousandth of them."""


class RecordFile:
    """The records of one study in a file; a last line that a kill cut short is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = _read(path) if path.exists() else []

    def of(self, trials: Sequence[Trial]) -> list[Record]:
        """The records of these trials, in their order; a trial that has none is left out."""
        known = {_key(record.trial): record for record in self._records}
        return [known[key] for trial in trials if (key := _key(trial)) in known]

    def missing(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that have no record."""
        known = {_key(record.trial) for record in self._records}
        return [trial for trial in trials if _key(trial) not in known]

    def add(self, record: Record) -> None:
        """Append a record; when this returns it is on disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = b"".join(msgspec.json.encode(entry) + b"\n" for entry in self._records)
        if not self.path.exists() or self.path.stat().st_size != len(kept):
            self.path.write_bytes(kept)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._records.append(record)


def compact(record: Record) -> Record:
    """The record with numbers of six digits, values of nine: pages show fewer."""
    curves = {
        name: Curve(curve.steps, [_rounded(v) for v in curve.values]) for name, curve in record.curves.items()
    }
    values = {name: _rounded(value, _VALUE_DIGITS) for name, value in record.values.items()}
    merged = {name: _rounded(value) for name, value in record.merged.items()}
    return msgspec.structs.replace(record, values=values, merged=merged, curves=curves)


def _key(trial: Trial) -> bytes:
    # What was read lacks a recipe's field that has been added since, and msgspec writes it without the default.
    recipe = None if trial.recipe is None else replace(trial.recipe)
    return msgspec.json.encode(msgspec.structs.replace(trial, recipe=recipe), order="sorted")


def _rounded(value: float | None, digits: int = _DIGITS) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _read(path: Path) -> list[Record]:
    lines = path.read_bytes().split(b"\n")
    try:
        return [msgspec.json.decode(line, type=Record) for line in lines[:-1]]
    except msgspec.DecodeError as error:
        raise click.ClickException(
            f"{path} holds a line that is no record ({error}); move the file away, and the study starts over"
        ) from error
