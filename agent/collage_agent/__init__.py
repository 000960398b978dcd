"""The agent's public names: measure what low precision does to the optimizer's updates, and report it.

import collage_agent as collage

collage.init(project="my-project")
handle = collage.watch(model, optimizer)
...                                   # the training loop, as it was
collage.log({"loss": loss})
collage.finish()
"""

import random
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collage_agent.expectations import ExpectationBroken
    from collage_agent.run import Run
    from collage_agent.run_settings import Mode, Resume
    from collage_agent.session import (
        AverageWatch,
        Watch,
        current_run,
        finish,
        init,
        log,
        on_alert,
        watch,
        watch_average,
        watch_tensor,
    )
    from collage_agent.transport import Transport
    from collage_agent.watch_options import Exclude
    from collage_agent.watching.tensor_watch import TensorWatch

__all__ = [
    "AverageWatch",
    "Exclude",
    "ExpectationBroken",
    "Mode",
    "Resume",
    "Run",
    "TensorWatch",
    "Transport",
    "Watch",
    "current_run",
    "finish",
    "init",
    "log",
    "on_alert",
    "watch",
    "watch_average",
    "watch_tensor",
]

_MODULES = {
    "Exclude": "watch_options",
    "ExpectationBroken": "expectations",
    "Run": "run",
    "Mode": "run_settings",
    "Resume": "run_settings",
    "TensorWatch": "watching.tensor_watch",
    "Transport": "transport",
}
"""Where a name is defined; the others are the session's."""


def _load_http_client() -> None:
    """Load httpx without moving Python's random numbers: what it imports draws from them once.

    A program that seeds first and imports the agent later must see the numbers that it would see without the agent.
    Its command line, with all that colours a terminal, is left out: each rank of a training would load it.
    """
    if "httpx" in sys.modules:
        return
    state = random.getstate()
    # Python's own way to say that a module is not there: httpx then goes without its command line.
    sys.modules["httpx._main"] = None  # type: ignore[assignment]
    try:
        import_module("httpx")
    finally:
        del sys.modules["httpx._main"]
        random.setstate(state)


_load_http_client()


def __getattr__(name: str) -> Any:
    """A public name, when it is first asked for: torch takes seconds, and a command's help does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'session')}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
