"""System programs that some tests need: skipped with a reason where absent, a failure under CI=true."""

import os
import shutil
import subprocess

import pytest

from tests.waiting import PATIENCE_SECONDS

__all__ = ["chromium", "find_chromium", "is_content", "lacking", "require"]


def find_chromium() -> str | None:
    """The path of Chromium, None where it is absent.

    Where it is installed, its headless shell: the same engine without a window's parts, for a seventh less CPU.
    """
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


def chromium():
    """The path of Chromium; without it the test is skipped, or fails, as with `require`."""
    return find_chromium() or require("chromium")


def require(program):
    """The path of `program`; without it the test is skipped, and fails where CI=true says that all must run."""
    path = shutil.which(program)
    if path is not None:
        return path
    return lacking(f"{program} is not installed; install it with the system's package manager")


def is_content(program, *arguments, **options):
    """What the program says of these arguments; what it has to object is an error."""
    options = {"capture_output": True, "text": True, "timeout": PATIENCE_SECONDS, **options}
    done = subprocess.run([require(program), *arguments], check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def lacking(reason):
    """A piece of the system is not there: the test is skipped, and fails where CI=true says that all must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true: nothing is skipped)")
    return pytest.skip(reason)
