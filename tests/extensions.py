"""Makes an example package importable, entry points and all, as installing it would: no installer, no network."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

from tests.forking import TORCH, run_forked

__all__ = ["install", "run_with"]

_ROOT = Path(__file__).parents[1]


def install(example: Path, target: Path) -> None:
    """Copy the modules beside `example`'s pyproject.toml to `target`, with the metadata that names its entries."""
    project = tomllib.loads((example / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target.mkdir(parents=True, exist_ok=True)
    for module in example.glob("*.py"):
        shutil.copy(module, target)
    metadata = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_with(examples: list[str], script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a process of its own that finds `examples/NAME` installed; warnings are errors there.

    folder: an empty one, where the examples are put. The process starts in the repository's root, so that the
    script may import `tests.…`.
    """
    for name in examples:
        install(_ROOT / "examples" / name, folder / "packages")
    packages = str(folder / "packages")
    return run_forked(
        TORCH,
        "-W",
        "error",
        "-c",
        f"import sys; sys.path.insert(1, {packages!r})\n{script}",
        environment={**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"},
        folder=_ROOT,
    )
