"""Public names are listed, sorted and real; importing the contract starts nothing and loads nothing heavy.

The error tree that a docstring draws is the tree that exists, and messages may be decoded by several threads.
"""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import collage_monitor
from collage_monitor import errors

pytestmark = pytest.mark.slow

MODULES = [info.name for info in pkgutil.walk_packages(collage_monitor.__path__, "collage_monitor.")]
HEAVY = ("torch", "fastapi", "starlette", "dash", "plotly", "sqlalchemy", "httpx")


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_sorted_and_real(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert list(module.__all__) == sorted(module.__all__)
    assert all(hasattr(module, member) for member in module.__all__)


def test_the_contract_alone_loads_nothing_heavy():
    code = (
        "import sys, threading, collage_monitor.wire, collage_monitor.statistics, collage_monitor.strategies, "
        "collage_monitor.alerts, collage_monitor.local; assert threading.active_count() == 1; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_drawn_tree_is_the_real_one():
    drawn = [line.replace("│", " ") for line in (errors.__doc__ or "").splitlines()[2:] if line.strip()]
    ancestors: list[str] = []
    for line in drawn:
        own = line.lstrip(" ├└─")
        depth = (len(line) - len(own)) // 4
        ancestors[depth:] = [own.split()[0]]
        found = getattr(errors, ancestors[-1])
        assert issubclass(found, getattr(errors, ancestors[depth - 1]) if depth else Exception)
    assert {line.lstrip(" ├└─").split()[0] for line in drawn} == set(errors.__all__)


FIRST_USES = """
import contextlib, sys
import msgspec
import collage_agent, collage_server.app
import collage_agent.transport.envelope

def described(kind):
    for child in kind.__subclasses__():
        yield child
        yield from described(child)

kinds, gathered = [kind for kind in described(msgspec.Struct) if kind.__module__.startswith("collage_")], set()
for kind in kinds:
    def look(frame, event, _argument):
        if event == "call" and frame.f_code.co_name == "get_class_annotations":
            gathered.add(f"{kind.__module__}.{kind.__qualname__}")

    sys.setprofile(look)
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.json.decode(b"0", type=kind)
    sys.setprofile(None)
print(len(kinds), *sorted(gathered))
"""


def test_no_type_is_looked_at_for_the_first_time_by_the_thread_that_decodes():
    """msgspec takes a type for known before it has gathered its fields: a second thread reads a null pointer."""
    ended = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=True)
    count, *late = ended.stdout.split()
    assert int(count) > 50
    assert late == []
