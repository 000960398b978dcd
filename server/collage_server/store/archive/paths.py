"""Where archived files lie within an archive: their paths, and what a path says.

A file's path is relative, `PROJECT/run=RUN/attempt=ATTEMPT/level=LEVEL/FIRST-LAST-UUID.parquet`; no two files ever
have the same one. Engines read run, attempt and level from it. Totals of the model have `model=LEVEL` in place of
the level, logged values `logged`. Other files in a project's folder belong to its published table.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import Final

from collage_server.errors import DamagedFile

__all__ = [
    "COPY",
    "MARK",
    "SUFFIX",
    "archived_path",
    "is_archived",
    "is_copy",
    "place_in",
    "project_folder",
    "run_of",
]

COPY: Final = "visible-"
"""Begins the name of a copy of what is visible of an archived file."""
MARK: Final = "_collage.json"
"""Says whose archive this is. No project's folder begins with an underscore."""
SUFFIX: Final = ".parquet"
_ARCHIVED: Final = re.compile(rf"\d+-\d+-[0-9a-f]{{32}}\{SUFFIX}")
_NOT_PLAIN: Final = re.compile(rb"^[_.]|[^A-Za-z0-9_.-]")
"""Engines skip what begins with an underscore or a dot."""
_LONGEST_FOLDER: Final = 128


def archived_path(project: str, run_id: str, attempt: int, level: int, name: str) -> str:
    """Where a file of a run lies. level: above 0 for layers, below 0 for totals of the model
    (`collage_server.store.archive.segments.model_level`), 0 for logged values."""
    what = f"level={level}" if level > 0 else f"model={-level}" if level else "logged"
    return f"{project_folder(project)}/run={run_id}/attempt={attempt}/{what}/{name}"


def place_in(folder: Path, path: str) -> Path:
    """Where a file of this path lies in a folder. Everything that opens a stored path goes through this.

    Raises:
        DamagedFile: the path leads out of the folder.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise DamagedFile(f"{path} leads out of the archive")
    return folder / path


def run_of(path: str) -> str:
    """The id of the run that an archived file belongs to."""
    return path.partition("/run=")[2].partition("/")[0]


def is_archived(path: str) -> bool:
    """Whether a file is an archived one, by its name; published tables have other files."""
    return _ARCHIVED.fullmatch(path.rpartition("/")[2]) is not None


def is_copy(path: str) -> bool:
    """Whether a file is a copy of what is visible of an archived one, by its name."""
    return path.rpartition("/")[2].startswith(COPY)


def project_folder(project: str) -> str:
    """The folder of a project's files: its name, with @XX for a byte that is not plain, a hash where it is long."""
    name = project.encode("utf-8", "surrogatepass")
    plain = _NOT_PLAIN.sub(lambda found: b"@%02X" % found[0][0], name).decode()
    if len(plain) <= _LONGEST_FOLDER:
        return plain
    return f"{plain[:_LONGEST_FOLDER]}@{hashlib.blake2b(name, digest_size=16).hexdigest()}"
