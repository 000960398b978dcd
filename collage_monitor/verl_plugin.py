"""The plugin that verl loads in each of its processes, by the entry-point group `verl.plugins`.

If watching is not requested, it costs one look into the environment and imports no module of the agent.
"""

import importlib
import os

from collage_monitor.environment import ATTACH

__all__: list[str] = []

if os.environ.get(ATTACH) == "1":
    importlib.import_module("collage_agent.integrations.verl").begin()
