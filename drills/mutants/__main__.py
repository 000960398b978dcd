"""`python -m drills.mutants [ROOM ...]`: how many of the kept faults the tests of each room catch.

Each fault is planted in a copy of the tree, and the tests that its table names run there until one is red
(`session.py`). Before, all of the room's tests must be green without a fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from drills.mutants.faults import ROOMS

_ROOT = Path(__file__).parents[2]
_SOURCES = ("", "agent", "server", "dashboard", "studies")


def main(arguments: Sequence[str]) -> int:
    """1 if fewer faults than should be are caught in a room, or its tests are red without one."""
    parser = argparse.ArgumentParser(prog="python -m drills.mutants")
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all by default")
    parser.add_argument("--fault", action="append", default=[], help="this one alone, or several")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.rooms) - set(ROOMS):
        parser.error(f"no room {sorted(unknown)[0]!r}; choose of {', '.join(ROOMS)}")
    with _copy() as tree:
        paths = os.pathsep.join(str(tree / source) for source in _SOURCES)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        lane = [sys.executable, "-m", "drills.mutants.session"]
        ended = [
            subprocess.run([*lane, room, *chosen.fault], cwd=tree, env=environment).returncode
            for room in chosen.rooms or ROOMS
        ]
    return int(any(ended))


@contextmanager
def _copy() -> Iterator[Path]:
    """What git knows of the tree, with changes that are not committed."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=_ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (source := _ROOT / name).exists():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
