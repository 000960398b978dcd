"""System programs that some tests need: skipped with a reason where absent, a failure under CI=true."""

import os
import shutil

import pytest

__all__ = ["chromium", "find_chromium", "lacking", "require"]


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


def lacking(reason):
    """A piece of the system is not there: the test is skipped, and fails where CI=true says that all must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true: nothing is skipped)")
    return pytest.skip(reason)
