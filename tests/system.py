"""System programs that some tests need: skipped with a reason where absent, a failure under CI=true."""

import os
import shutil

import pytest

__all__ = ["lacking", "require"]


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
