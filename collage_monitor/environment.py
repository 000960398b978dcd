"""The environment variables that tell a training how to report, and those through which `run` makes it watched.

Names are fixed: users' scripts set them, and `docs/reference/watch-options.md` and `docs/command.md` list them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from collage_monitor.spelling import similar

__all__ = [
    "ATTACH",
    "CHECKPOINT",
    "CHECK_REPORT",
    "CHECK_STEPS",
    "EXIT_HOOKS",
    "VARIABLES",
    "launch_variables",
    "unknown_variables",
]

VARIABLES: Final = {
    "project": "COLLAGE_PROJECT",
    "name": "COLLAGE_RUN_NAME",
    "run_id": "COLLAGE_RUN_ID",
    "group": "COLLAGE_RUN_GROUP",
    "tags": "COLLAGE_TAGS",
    "mirrors": "COLLAGE_MIRRORS",
    "mode": "COLLAGE_MODE",
    "server_url": "COLLAGE_SERVER_URL",
    "token": "COLLAGE_TOKEN",
    "dir": "COLLAGE_DIR",
    "every": "COLLAGE_EVERY",
    "sample": "COLLAGE_SAMPLE",
    "budget": "COLLAGE_BUDGET",
    "expect": "COLLAGE_EXPECT",
    "on_breach": "COLLAGE_ON_BREACH",
}
"""The variable of each argument of the agent's `init` and `watch` that has one."""
ATTACH: Final = "COLLAGE_ATTACH"
"""Set to 1, it lets the bootstrap folder's `sitecustomize` watch the optimizers of a Python process."""
EXIT_HOOKS: Final = "COLLAGE_EXIT_HOOKS"
"""Set to off, it keeps the agent from taking SIGTERM and from looking at calls of `sys.exit`, `exit` and `quit`."""


CHECKPOINT: Final = "COLLAGE_CHECKPOINT"
"""Where `cure --check` tells a training its converted checkpoint; in the command `{checkpoint}` stands for it."""
CHECK_STEPS: Final = "COLLAGE_CHECK_STEPS"
"""Set by `cure --check` and `check -- PROGRAM`: the training ends after so many steps."""
CHECK_REPORT: Final = "COLLAGE_CHECK_REPORT"
"""Set by `cure --check` and `check -- PROGRAM`: the file to which their verdict is written."""

_OTHERS: Final = (ATTACH, EXIT_HOOKS, CHECKPOINT, CHECK_STEPS, CHECK_REPORT)
_OF_OTHERS: Final = ("COLLAGE_SERVER_", "COLLAGE_DASHBOARD_")


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that begin as ours and that neither a training nor a server reads, with what each may have meant:
    "did you mean 'COLLAGE_PROJECT'?", or ""."""
    known = {*VARIABLES.values(), *_OTHERS}
    ours = sorted(name for name in environment if name.startswith("COLLAGE_") and not name.startswith(_OF_OTHERS))
    return {name: similar(name, VARIABLES.values()) for name in ours if name not in known}


def launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make Python processes in an environment watched. Imports no torch."""
    agent = importlib.util.find_spec("collage_agent")
    origin = agent.origin if agent is not None else None
    assert origin is not None, "the agent's package is part of every installation"
    bootstrap = str(Path(origin).parent / "integrations" / "bootstrap")
    others = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {ATTACH: "1", "PYTHONPATH": os.pathsep.join([bootstrap, *(e for e in others if e != bootstrap)])}
