"""The stations of docs/architecture.md, and the files whose functions are called: paths are held to what runs."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

__all__ = ["called_files", "passes", "stations_of"]

TEXT = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")


def stations_of(title):
    """The files that the path under the heading `title` … passes, in order."""
    (section,) = re.findall(rf"\n## {title}[^\n]*\n(.*?)(?=\n## )", TEXT, re.DOTALL)
    return re.findall(r"^\| \d+ \| `([^`]+)`", section, re.MULTILINE)


@contextmanager
def called_files(package):
    """The files of a package, by their path in it, whose functions this thread and those begun inside call."""
    called = []

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and f"/{package}/" in path:
            called.append(path.partition(f"/{package}/")[2])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def passes(called, stations):
    """Whether the calls lead through all stations, one after the other."""
    calls = iter(called)
    return all(station in calls for station in stations)
