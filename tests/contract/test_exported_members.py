"""Public names are listed, sorted and real; importing the contract starts nothing and loads nothing heavy."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import collage_monitor

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
