"""Loss curves from CSV files and TensorBoard event files, as logged scalars.

A CSV file has one column of steps, perhaps one of times, and every other one is a curve. Event files need the extra
`tensorboard`.
"""

from __future__ import annotations

import csv
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from collage_monitor import wire
from collage_monitor.importing.imported_run import ImportRefusal, Source

__all__ = ["read_curves", "read_events"]

_TIMES: Final = frozenset({"time", "wall time", "wall_time", "timestamp", "_timestamp"})
_EVENT_FILES: Final = "*tfevents*"
_EXPORTED: Final = ["step", "first_step", "time", "ranks", "layer"]


def read_curves(path: Path, *, step_column: str = "step", rename: Mapping[str, str] | None = None) -> Source:
    """The curves in the file; empty cells are left out, `rename` gives columns another name.

    Times are Unix seconds; without a column of times, every point gets the moment of the import.

    Raises:
        ImportRefusal: no text in UTF-8, no column of steps, no other one, columns of one name or without one, a
            name in `rename` that no column has, or a cell that is no number.
    """
    with _rows(path) as rows:
        header: list[str] = next(rows, [])
    if header[: len(_EXPORTED)] == _EXPORTED:
        raise ImportRefusal(
            f"{path} is an export of a whole run in CSV; export it with --format jsonl to import it"
        )
    step = _column(path, header, step_column)
    chosen = {
        index: (rename or {}).get(name, name)
        for index, name in enumerate(header)
        if index != step and name.strip().lower() not in _TIMES
    }
    _check_names(path, chosen.values())
    if absent := sorted({*(rename or {})} - {*header}):
        raise ImportRefusal(f"{path} has no column {absent[0]!r} to rename, only {_quoted(header)}")
    return Source(name=path.stem, notes=f"Imported from {path.name}.", reports=_reports(path, header, step, chosen))


@contextmanager
def _rows(path: Path) -> Iterator[Any]:
    """A reader of the file, header first."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            yield csv.reader(file)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ImportRefusal(f"{path} is no CSV file in UTF-8 ({error}); save it as one") from error


def _check_names(path: Path, names: Iterable[str]) -> None:
    if not (counts := Counter(names)):
        raise ImportRefusal(f"{path} has no column beside steps and times; there is nothing to import")
    for name, times in counts.items():
        if times > 1:
            raise ImportRefusal(f"{path} has {times} columns {name!r}; rename or remove all but one of them")
        if not 0 < len(name) <= wire.LIMITS["name_characters"]:
            raise ImportRefusal(
                f"{path} has a column of the name {name[:40]!r}; name it in the header, or remove it"
            )


def _quoted(header: Sequence[str]) -> str:
    return ", ".join(map(repr, header[:20]))


def _column(path: Path, header: Sequence[str], wanted: str) -> int:
    for index, name in enumerate(header):
        if name.strip().lower() == wanted.lower():
            return index
    raise ImportRefusal(f"{path} has no column {wanted!r}, only {_quoted(header)}; name it with --step-column")


def _reports(path: Path, header: Sequence[str], step: int, chosen: Mapping[int, str]) -> Iterator[wire.Report]:
    now = time.time()
    times = next((i for i, name in enumerate(header) if i != step and name.strip().lower() in _TIMES), None)
    with _rows(path) as rows:
        next(rows, None)
        for seq, row in enumerate(row for row in rows if row):
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(header):
                raise ImportRefusal(f"{where} has {len(row)} cells, the header has {len(header)}; repair the line")
            number = _number(where, header[step], row[step])
            if not number.is_integer() or not 0 <= number <= 2**53:
                raise ImportRefusal(f"{where}: {row[step]!r} is no step; steps are whole numbers from 0")
            yield wire.Report(
                seq=seq,
                step=int(number),
                time=now if times is None else _number(where, header[times], row[times]),
                scalars={name: _number(where, name, row[i]) for i, name in chosen.items() if row[i].strip()},
            )


def _number(where: str, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ImportRefusal(
            f"{where}, column {name!r}: {text!r} is not a number; empty the cell, or remove the column"
        ) from error


def read_events(path: Path) -> Source:
    """The scalars in an event file, or in all event files directly in a folder, oldest first.

    A tag's last value at a step counts, as in TensorBoard; tags become logged scalars under their names.

    Raises:
        ImportRefusal: no event file, nothing scalar in them, or the reader of event files is not installed.
    """
    files = sorted(path.glob(_EVENT_FILES)) if path.is_dir() else [path]
    if not files:
        raise ImportRefusal(f"{path} has no file called {_EVENT_FILES}; name the folder of one run")
    steps: dict[int, tuple[float, dict[str, float]]] = {}
    for tag, step, moment, value in _scalars(files):
        known = steps.setdefault(step, (moment, {}))
        known[1][tag] = value
    if not steps:
        raise ImportRefusal(f"{path} has no scalars; only those can be imported")
    reports = (
        wire.Report(seq=seq, step=step, time=steps[step][0], scalars=steps[step][1])
        for seq, step in enumerate(sorted(steps))
    )
    name = path.name if path.is_dir() else path.parent.name or path.name
    return Source(name=name, notes=f"Imported from {path.name}.", reports=reports, reports_expected=len(steps))


def _scalars(files: list[Path]) -> Iterator[tuple[str, int, float, float]]:
    """(tag, step, Unix seconds, value) of every scalar."""
    loader, make_array = _reader()
    # Only the first value of a tag names its plugin.
    plugins: dict[str, str] = defaultdict(str)
    for file in files:
        for event in loader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name:
                    plugins[value.tag] = value.metadata.plugin_data.plugin_name
                if plugins[value.tag] == "scalars":
                    yield value.tag, int(event.step), float(event.wall_time), float(make_array(value.tensor))


def _reader() -> tuple[Any, Any]:
    try:
        loader: Any = import_module("tensorboard.backend.event_processing.event_file_loader")
        tensors: Any = import_module("tensorboard.util.tensor_util")
    except ModuleNotFoundError as error:
        raise ImportRefusal(
            "event files need the tensorboard package; pip install 'collage-monitor[tensorboard]', "
            "or download the curve as CSV and import that"
        ) from error
    return loader.EventFileLoader, tensors.make_ndarray
