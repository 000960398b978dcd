"""A forked program is spoken to as `subprocess.Popen` is."""

from __future__ import annotations

import os

from tests.forking import Program

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
