"""A forked program is spoken to as `subprocess.Popen` is."""

from __future__ import annotations

import os

import pytest

from tests.forking import FORKED_FROM, TORCH, TRAINING, Program, run_forked

BEYOND_PID_MAX = 2**22 + 1
"""The id of no process, as that of one that has just ended."""


def test_a_signal_to_one_that_has_ended_before_its_status_came_is_nothing():
    read, write = os.pipe()
    with os.fdopen(write, "w") as status:
        status.write(f"{BEYOND_PID_MAX}\n")
        status.flush()
        program = Program(os.fdopen(read), None, None)
        program.kill()
        assert program.poll() is None
        status.write("0\n")
    assert program.wait() == 0


@pytest.mark.slow
def test_what_one_imports_beyond_another_the_other_has_not():
    """Though the former is forked from the latter, which imports what both do once."""
    code = "import sys; print(*(name in sys.modules for name in ('torch', 'collage_optim')))"
    more = run_forked(TRAINING, "-c", code)
    few = run_forked(TORCH, "-c", code)
    assert (more.stdout, few.stdout) == ("True True\n", "True False\n")
    assert len(FORKED_FROM) >= 2
