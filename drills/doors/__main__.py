"""`python -m drills.doors [NAME…]`: each door's package is installed, trained with and without us, and compared."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

from drills.doors import door as doors

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "doors"
PATIENCE_SECONDS = 1200


def known() -> dict[str, doors.Door]:
    """The doors by the names of their files."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    modules = {name: import_module(f"drills.doors.{name}") for name in names if not name.startswith("__")}
    return {name: module.DOOR for name, module in modules.items() if hasattr(module, "DOOR")}


def environment_of(name: str, door: doors.Door) -> Path:
    """A Python with the door's package and, under it, all of the project's; made once for these requirements.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    folder = BUILD / name
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    if stamp.exists() and stamp.read_text() == "\n".join(door.requirements):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "project.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    # The project's torch, and no other one: what differs must be the door's package alone.
    pinned = folder / "constraints.txt"
    pinned.write_text(f"torch=={metadata.version('torch').partition('+')[0]}\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--constraint", str(pinned)]
    subprocess.run([*pip, *door.requirements], check=True)
    if metadata.version("torch").endswith("+cpu"):
        _without_cuda_libraries(folder, python)
    # Its metadata have the entry points that some packages load us by.
    subprocess.run([*pip, "--no-deps", "--force-reinstall", str(ROOT)], check=True)
    stamp.write_text("\n".join(door.requirements))
    return python


def _without_cuda_libraries(folder: Path, python: Path) -> None:
    """Take away what PyPI builds for CUDA alone: it cannot be loaded beside a torch without it.

    transformers imports torchvision wherever it is installed; torchaudio works without its libraries.
    """
    subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)
    for libraries in folder.glob("lib/python*/site-packages/torchaudio/lib"):
        shutil.rmtree(libraries)


def trained(python: Path, name: str, setting: doors.Setting, watched: bool) -> doors.Trained:
    """What one training in a process of its own left.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome.json")
        variables = {key: value for key, value in os.environ.items() if not key.startswith("COLLAGE_")}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": folder}
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "agent")])
        if watched:
            variables |= {"COLLAGE_MODE": "offline", "COLLAGE_DIR": folder, "COLLAGE_EVERY": "2"}
            variables |= {"COLLAGE_BUDGET": "none"}
        program = [str(python), "-m", f"drills.doors.{name}"]
        process = subprocess.run(
            [*program, setting, "watched" if watched else "alone", folder, str(outcome)],
            env=variables,
            cwd=folder,
            text=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
        )
        if not outcome.exists():
            raise RuntimeError(f"{setting}: {(process.stdout + process.stderr)[-3000:]}")
        return doors.Trained(**json.loads(outcome.read_text()))


def faults(python: Path, name: str) -> Iterator[str]:
    """What is wrong with a door, a line each."""
    for setting in doors.SETTINGS:
        alone, watched = (trained(python, name, setting, watching) for watching in (False, True))
        if alone.digest != watched.digest:
            yield f"{setting}: not bit-identical with us"
        if min(alone.steps, watched.steps) < 20:
            yield f"{setting}: {alone.steps} and {watched.steps} steps, fewer than 20"
        if not watched.health or set(watched.health) != {doors.EXPECTED[setting]}:
            yield f"{setting}: {watched.health}, expected {doors.EXPECTED[setting]}"


def main() -> int:
    """1 if a door has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="doors; all of them by default")
    chosen, failed = parser.parse_args().names, 0
    for name, door in known().items():
        if chosen and name not in chosen:
            continue
        if door.cannot:
            _say(f"{door.package} {door.version}: not installed here ({door.cannot}); replica: {door.held_by}")
            continue
        try:
            found = list(faults(environment_of(name, door), name))
        except (RuntimeError, subprocess.SubprocessError) as error:
            found = [str(error)]
        failed += bool(found)
        told = "; ".join(found) or "bit-identical, verdicts right"
        _say(f"{door.package} {door.version}: {told}")
    return int(failed > 0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
