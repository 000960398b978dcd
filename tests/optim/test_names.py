"""Where the optimizers are found: a package that stands on torch, offered by the agent under its own name too."""

import importlib

import pytest

from tests.forking import TORCH, run_forked

pytestmark = pytest.mark.slow

NAMES = {"collage_agent.optim": "collage_optim", "collage_agent.numerics": "collage_optim.numerics"}
LOADED = """
import sys, {package}
print(*sorted(name for name in sys.modules if name.partition(".")[0] in {watched!r}))
"""
WATCHED = ("collage_agent", "collage_monitor", "collage_server", "httpx", "msgspec")


@pytest.mark.parametrize("name", NAMES)
def test_the_agent_offers_the_same_objects(name):
    offered, own = importlib.import_module(name), importlib.import_module(NAMES[name])
    assert offered.__all__ == own.__all__
    assert all(getattr(offered, member) is getattr(own, member) for member in own.__all__)


def test_the_optimizers_load_nothing_else_of_the_project():
    code = LOADED.format(package="collage_optim", watched=WATCHED)
    done = run_forked(TORCH, "-c", code)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
