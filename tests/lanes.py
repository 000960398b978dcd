"""Which tests `make quick` leaves out, beside the costly: those that start processes, browsers or databases.

They are found, not listed: a test is slow if its module, or the module of a fixture that it uses, can start a
process, itself or through another module of the tests. Others are marked `slow` by hand, or by what they cost.
"""

import inspect
import re
from functools import cache
from pathlib import Path

__all__ = ["is_slow", "starts_processes"]

ROOT = Path(__file__).parents[1]
STARTERS = {"subprocess", "multiprocessing", "playwright"}
_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+([\w., \t]+)|from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n(]+))", re.MULTILINE
)


@cache
def starts_processes(path):
    """Whether the module at `path` imports what starts processes, or a module of the tests that does."""
    names = set()
    for modules, package, members in _IMPORT.findall(path.read_text()):
        found = [name.split()[0] for name in (modules or members.strip("()")).split(",") if name.strip()]
        names |= {package, *(f"{package}.{name}" for name in found)} if package else set(found)
    if any(name.partition(".")[0] in STARTERS for name in names):
        return True
    own = (
        ROOT / f"{name.replace('.', '/')}.py"
        for name in sorted(names)
        if name.startswith(("tests.", "benchmarks."))
    )
    return any(starts_processes(module) for module in own if module.exists() and module != path)


def is_slow(item):
    """Whether a collected test can start processes, itself or by a fixture of ours."""
    fixtures = getattr(item, "_fixtureinfo", None)
    functions = [entry.func for known in fixtures.name2fixturedefs.values() for entry in known] if fixtures else []
    return starts_processes(item.path) or any(_can_start_processes(function) for function in functions)


@cache
def _can_start_processes(fixture):
    path = Path(inspect.getfile(inspect.unwrap(fixture)))
    return path.is_relative_to(ROOT / "tests") and starts_processes(path)
