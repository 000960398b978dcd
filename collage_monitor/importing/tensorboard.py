"""Loss curves from TensorBoard event files. Needs the extra `tensorboard`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from collage_monitor import wire
from collage_monitor.importing.source import ImportRefusal, Source

__all__ = ["read_events"]

_PATTERN: Final = "*tfevents*"


def read_events(path: Path) -> Source:
    """The scalars in an event file, or in all event files right in a folder, oldest file first.

    A tag's last word on a step counts, as in TensorBoard; tags become logged scalars under their names.

    Raises:
        ImportRefusal: no event file, nothing scalar in them, or the reader of event files is not installed.
    """
    files = sorted(path.glob(_PATTERN)) if path.is_dir() else [path]
    if not files:
        raise ImportRefusal(f"{path} has no file called {_PATTERN}; name the folder of one run")
    steps: dict[int, tuple[float, dict[str, float]]] = {}
    for tag, step, time, value in _scalars(files):
        known = steps.setdefault(step, (time, {}))
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
    # The plugin of a tag stands with its first value only.
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
