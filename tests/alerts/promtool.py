"""Prometheus's own judge of rules, of pages and of what rules make of series."""

from __future__ import annotations

import subprocess

from tests.system import require
from tests.waiting import PATIENCE_SECONDS

__all__ = ["promtool"]


def promtool(*arguments, folder=None, page=None):
    """Run it in `folder` on the `page`; what it has to say is an error."""
    done = subprocess.run(
        [require("promtool"), *arguments],
        cwd=folder,
        input=page,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
