"""The kept faults: a table of file, text before, text after, kind and tests for each room, in `faults/`."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["ROOMS", "Fault", "faults_of", "planted"]

_ROOT = Path(__file__).parents[2]
_TABLES = Path(__file__).parent / "faults"
ROOMS = tuple(sorted(path.stem for path in _TABLES.glob("*.toml")))


@dataclass(frozen=True)
class Fault:
    """One change of one place.

    kind: what sort of slip it is, such as "second operand" or "first step". tests: files or ids that a maintainer
    of this module would run first.
    """

    name: str
    file: str
    before: str
    after: str
    kind: str
    tests: tuple[str, ...]


def faults_of(room: str) -> list[Fault]:
    """A room's faults. Raises ValueError for one whose text does not stand in its file exactly once, or whose tests
    are not there."""
    table = tomllib.loads((_TABLES / f"{room}.toml").read_text(encoding="utf-8"))
    shared = tuple(table.get("tests", ()))
    found = []
    for entry in table["fault"]:
        tests = tuple(entry.pop("tests", shared))
        if unknown := entry.keys() - {field.name for field in fields(Fault)}:
            raise ValueError(f"{room}: {sorted(unknown)[0]!r} is no field of a fault")
        fault = Fault(**entry, tests=tests)
        count = (_ROOT / fault.file).read_text(encoding="utf-8").count(fault.before)
        if count != 1 or fault.before == fault.after:
            raise ValueError(
                f"{room}: {fault.name}: {fault.before!r} stands {count} times in {fault.file}, not once"
            )
        if missing := [test for test in tests if not (_ROOT / test.partition("::")[0]).exists()]:
            raise ValueError(f"{room}: {fault.name}: there is no {missing[0]}")
        found.append(fault)
    if len({fault.name for fault in found}) < len(found):
        raise ValueError(f"{room}: two faults have one name")
    return found


class planted:  # noqa: N801 - it is used as a context
    """Plants a fault in a copy of the tree; afterwards the copy is as it was."""

    def __init__(self, fault: Fault, tree: Path) -> None:
        self._fault, self._path = fault, tree / fault.file

    def __enter__(self) -> None:
        self._text = self._path.read_text(encoding="utf-8")
        self._write(self._text.replace(self._fault.before, self._fault.after))

    def __exit__(self, *_: object) -> None:
        self._write(self._text)

    def _write(self, text: str) -> None:
        self._path.write_text(text, encoding="utf-8")
        # Its compiled form would be taken for the new one if both were written within a second at one length.
        shutil.rmtree(self._path.parent / "__pycache__", ignore_errors=True)
