"""What a training loop imports: measure what low precision does to the optimizer's updates, and report it.

import collage_agent as collage

collage.init(project="my-project")
handle = collage.watch(model, optimizer)
...                                   # the training loop, as it was
collage.log({"loss": loss})
collage.finish()
"""

from collage_agent import _unmoved as _unmoved  # first: see there
from collage_agent.options import Exclude
from collage_agent.run import Run
from collage_agent.session import Watch, current_run, finish, init, log, on_alert, watch
from collage_agent.settings import Mode, Resume
from collage_agent.transport import Transport

__all__ = [
    "Exclude",
    "Mode",
    "Resume",
    "Run",
    "Transport",
    "Watch",
    "current_run",
    "finish",
    "init",
    "log",
    "on_alert",
    "watch",
]
