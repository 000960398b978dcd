"""A process in which Triton is found: it lies apart from the other packages."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_SECONDS

PUBLISHED = (platform.system(), platform.machine()) == ("Linux", "x86_64")
only_where_published = pytest.mark.skipif(not PUBLISHED, reason="Triton is published for Linux on x86-64")


def run_with_triton(module, *arguments, interpreted=False):
    """What `python -m MODULE ARGUMENTS` prints; raises AssertionError with its errors if it fails."""
    apart = Path(sys.prefix, "triton")
    assert apart.is_dir(), "Triton lies apart from the other packages: make .venv/.stamp-dev puts it there"
    paths = os.pathsep.join(filter(None, (str(apart), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
