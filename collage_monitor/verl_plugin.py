"""What verl loads in each of its processes, by the entry-point group `verl.plugins`.

Where nobody has asked to be watched it costs one look into the environment: no module of the agent is imported.
"""

import importlib
import os

from collage_monitor.environment import ATTACH

__all__: list[str] = []

if os.environ.get(ATTACH) == "1":
    importlib.import_module("collage_agent.integrations.verl").begin()
