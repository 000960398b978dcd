"""What the integrations of frameworks do between their events: begin a run, watch, log, and end a run that they
began.

`attach.py`, behind `collage-monitor run`, knows no framework and does without.

Each integration translates its framework's events into these calls (`tests/integrations/test_attachment.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from collage_agent import session
from collage_agent.error_guard import Guard
from collage_agent.handle import Watch
from collage_agent.watch_options import WatchArguments, checked_options
from collage_monitor.wire import Door

__all__ = ["Attachment", "innermost", "needs"]


class Attachment:
    """Watches for one training, and the run if the training has none. Only the constructor raises.

    project, name: for `init`, as run_options, other arguments of it. watch_options: for each watch.
    door: the framework.

    Raises:
        ValueError, TypeError: a watch option that cannot be used.
    """

    def __init__(
        self,
        project: str | None,
        name: str | None,
        run_options: Mapping[str, Any] | None,
        watch_options: WatchArguments,
        door: Door = "torch",
    ) -> None:
        checked_options(**watch_options)
        self._run_options = {"project": project, "name": name, **(run_options or {})}
        self._watch_options = watch_options
        self._door = door
        self._guard = Guard()
        self._began_run = False
        self.handles: list[Watch] = []

    def begin_run(self, config: Mapping[str, Any] | None = None) -> None:
        """Begin a run, unless the training has begun one, which is then used and left to it."""
        try:
            if session.current_run() is None:
                session.init(**{"config": config, **self._run_options})
                self._began_run = True
        except Exception as error:
            self._guard.caught("beginning a run", error)

    def watch(self, model: nn.Module, optimizers: Iterable[Any], *, first_step: int | None = None) -> None:
        """Watch each optimizer, without its wrappers; one that cannot be watched is named in the log."""
        options: WatchArguments = {**self._watch_options}
        options.setdefault("first_step", first_step)
        for optimizer in optimizers:
            try:
                handle = session.watch(model, innermost(optimizer), **options)
                self.handles.append(handle.came_through(self._door))
            except Exception as error:
                self._guard.caught("watching", error)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record scalars at the watched optimizer's step."""
        session.log(values)

    def end(self) -> None:
        """Finish the run if it was begun here (the verdict is printed), and take the hooks off."""
        if self._began_run:
            session.finish()
            self._began_run = False
        for handle in self.handles:
            handle.remove()


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside the wrappers that frameworks put around it (each keeps it as `.optimizer`).

    Raises:
        TypeError: there is no torch optimizer inside.
    """
    inner = optimizer
    while (wrapped := getattr(inner, "optimizer", None)) is not None:
        inner = wrapped
    if not isinstance(inner, Optimizer):
        raise TypeError(f"optimizer={type(optimizer).__name__}; pass a torch.optim.Optimizer, or one that wraps it")
    return inner


def needs(library: str, error: ImportError) -> ImportError:
    """The error for an integration whose library is not installed."""
    return ImportError(
        f"collage_agent.integrations.{library} needs {library} ({error}); "
        f"pip install {library}, or pip install 'collage-monitor[integrations]'",
        name=library,
    )
