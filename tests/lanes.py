"""Which tests `make quick` leaves out: those that start processes, browsers or databases, and those marked `slow`.

The first kind is found, not listed: a test is slow if its module, or the module of a fixture that it uses, can
start a process, itself or through another module of the tests.
"""

import ast
import inspect
from functools import cache
from pathlib import Path

__all__ = ["is_slow", "starts_processes"]

ROOT = Path(__file__).parents[1]
STARTERS = {"subprocess", "multiprocessing", "playwright"}


@cache
def starts_processes(path):
    """Whether the module at `path` imports what starts processes, or a module of the tests that does."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
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
    paths = {item.path, *(Path(inspect.getfile(inspect.unwrap(function))) for function in functions)}
    return any(starts_processes(path) for path in paths if path.is_relative_to(ROOT / "tests"))
