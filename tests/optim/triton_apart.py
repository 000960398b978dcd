"""A process in which Triton is found: it lies apart from the other packages."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forking import TORCH, run_forked
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PUBLISHED = (platform.system(), platform.machine()) == ("Linux", "x86_64")
only_where_published = pytest.mark.skipif(not PUBLISHED, reason="Triton is published for Linux on x86-64")
_INTERPRETED = (
    "tests.optim.triton_interpreted",
    *TORCH,
    "triton",
    "collage_agent.handle",
    "collage_optim",
    "pytest",
)


def run_with_triton(module, *arguments, interpreted=False):
    """What `python -m MODULE ARGUMENTS` prints; raises AssertionError with its errors if it fails.

    interpreted: kernels are interpreted, in a forked process; what compiles them really starts.
    """
    apart = Path(sys.prefix, "triton")
    assert apart.is_dir(), "Triton lies apart from the other packages: make .venv/.stamp-dev puts it there"
    program = ("-m", module, *arguments)
    if interpreted:
        done = run_forked(_INTERPRETED, *program, environment={**os.environ, "TRITON_INTERPRET": "1"}, folder=ROOT)
    else:
        paths = os.pathsep.join(filter(None, (str(apart), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, *program],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
