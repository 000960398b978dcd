"""What a published figure must name: the machine and the versions it was measured with."""

import importlib.metadata
import platform
from pathlib import Path

__all__ = ["describe_machine"]

_PACKAGES = ("numpy", "torch")


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def describe_machine() -> dict[str, str]:
    """Processor, system and package versions; `summary` is all of it in one line."""
    described = {"processor": _processor(), "system": platform.system(), "python": platform.python_version()}
    for package in _PACKAGES:
        described[package] = importlib.metadata.version(package)
    versions = ", ".join(f"{name} {described[name]}" for name in ("python", *_PACKAGES))
    return {**described, "summary": f"{described['processor']}; {versions}"}
