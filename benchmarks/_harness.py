"""What the benchmarks share: the command line, a line a figure as it is known, machine and versions, the gate."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["Figure", "Measuring", "Options", "main", "parse_options", "print_figures", "versions"]


@dataclass(frozen=True)
class Figure:
    """One measured quantity: a value a round. The median may not exceed `limit` nor fall below `floor`."""

    name: str
    unit: str
    values: tuple[float, ...]
    limit: float | None = None
    floor: float | None = None

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.values)

    @property
    def missed(self) -> bool:
        """Whether the stated ratio is missed."""
        over = self.limit is not None and self.median > self.limit
        return over or (self.floor is not None and self.median < self.floor)

    @property
    def bound(self) -> str:
        """The limit of the median, as text."""
        bounds = (("≤", self.limit), ("≥", self.floor))
        return " ".join(f"{sign} {value:.4g}" for sign, value in bounds if value is not None)


Measuring = Generator[Figure, None, list[str]]
"""Figures as they are known, and at the end notes about the run."""


@dataclass(frozen=True)
class Options:
    """Command line of a benchmark: `gate` runs only the gated pairs and makes a miss an error."""

    gate: bool
    json: Path | None
    seed: int
    rounds: int | None


@dataclass
class Outcome:
    """The stored results of a run, beside the machine and the versions."""

    benchmark: str
    seed: int
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def parse_options(description: str, arguments: Sequence[str] | None = None) -> Options:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gate", action="store_true", help="end with 1 when a stated ratio is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, seed and figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=None, help="rounds of each alternative")
    return Options(**vars(parser.parse_args(arguments)))


def main(
    name: str,
    description: str,
    measure: Callable[[Options], Measuring],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a benchmark: measure, print each figure, write the file; the exit status, 1 for a gate that is missed."""
    options = parse_options(description, arguments)
    info = machine()
    print(f"{name} on {info['processor']} ({info['cores']} cores, load {info['load']:.1f}), {info['python']}")
    notes, figures = print_figures(measure(options))
    if options.json is not None:
        outcome = asdict(Outcome(name, options.seed, notes, figures))
        options.json.write_text(json.dumps({**outcome, "machine": machine(), "versions": versions()}, indent=2))
    missed = [figure for figure in figures if figure.missed]
    for figure in missed:
        print(f"missed: {figure.name}: {figure.median:.4g} {figure.unit}, not {figure.bound}", file=sys.stderr)
    return 1 if options.gate and missed else 0


def print_figures(measuring: Measuring) -> tuple[list[str], list[Figure]]:
    """Print medians and ranges, a line a figure as it is known, then the notes; both are returned."""
    print(f"{'median':>10}  {'lowest':>10}  {'highest':>10}  {'gate':>9}", flush=True)
    figures: list[Figure] = []
    while True:
        try:
            figure = next(measuring)
        except StopIteration as end:
            print(*(f"  {note}" for note in end.value), sep="\n", flush=True)
            return end.value, figures
        figures.append(figure)
        numbers = "  ".join(f"{x:10.4g}" for x in (figure.median, min(figure.values), max(figure.values)))
        mark = " MISSED" if figure.missed else ""
        print(f"{numbers}  {figure.bound:>9}  {figure.unit}  {figure.name}{mark}", flush=True)


def machine() -> dict[str, Any]:
    """Processor, cores, how busy they are (over the last minute), system and interpreter."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": f"Python {platform.python_version()}",
    }


def versions() -> dict[str, str]:
    """Versions of the installed libraries whose speed can show in a figure."""
    names = ("collage-monitor", "fastapi", "msgspec", "numpy", "sqlalchemy", "torch", "uvicorn")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
