"""Accelerate: watch a prepared optimizer, and a tracker for `Accelerator(log_with=...)`.

accelerator = Accelerator(log_with=CollageTracker("my-project"))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.init_trackers("my-project", config)
watch_accelerated(accelerator, model, optimizer)
...
accelerator.end_training()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn

from collage_agent import session
from collage_agent.handle import Watch
from collage_agent.integrations.attachment import Attachment, innermost, needs
from collage_agent.run import Run
from collage_agent.watch_options import WatchArguments

try:
    from accelerate import Accelerator, PartialState
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise needs("accelerate", error) from error

__all__ = ["CollageTracker", "watch_accelerated"]


def watch_accelerated(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, **watch_options: Unpack[WatchArguments]
) -> Watch:
    """Watch an optimizer that `accelerator.prepare` returned; `model` prepared or not.

    On ranks other than the first it begins the tracker's run, after `accelerator.init_trackers`.
    Steps are those of the optimizer: a gradient that is only accumulated makes none. Options are those of
    `collage_agent.watch`. Reports to the run of a CollageTracker or of `collage_agent.init`, if there is one.

    Raises:
        ValueError, TypeError: an argument that cannot be used.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator={type(accelerator).__name__}; pass the accelerate.Accelerator that prepared")
    if not accelerator.is_main_process:
        _begin_here_too(accelerator)
    return session.watch(model, innermost(optimizer), **watch_options).came_through("accelerate")


def _begin_here_too(accelerator: Accelerator) -> None:
    """Begin the tracker's run on a rank where `init_trackers` does nothing: its shards are reported there."""
    for tracker in accelerator.log_with:
        if isinstance(tracker, CollageTracker) and tracker not in accelerator.trackers:
            tracker.store_init_configuration({})
            accelerator.trackers.append(tracker)


class CollageTracker(GeneralTracker):
    """A tracker for `Accelerator(log_with=CollageTracker("my-project"))`: `accelerator.log` records into the run.

    project, name: of the run; run_options: further arguments of `collage_agent.init`. The run begins with
    `accelerator.init_trackers(project, config)`, else with the first `accelerator.log`, on the other ranks with
    `watch_accelerated`, and ends with `accelerator.end_training`. An existing run is used instead, and left to its
    owner. Only the first rank records scalars.
    """

    name = "collage"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self, project: str | None = None, name: str | None = None, *, run_options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._attachment = Attachment(project, name, run_options, {})

    @property
    def tracker(self) -> Run | None:
        """The run that records."""
        return session.current_run()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Begin the run with this configuration."""
        self._attachment.begin_run(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Record scalars; `step` None: the watched optimizer's."""
        self._attachment.begin_run()
        run = session.current_run()
        if run is not None and PartialState().is_main_process:
            run.log(values, step)

    def finish(self) -> None:
        """Finish the run if it was begun here."""
        self._attachment.end()
