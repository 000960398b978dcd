"""trackio: our numbers in a run of their own, beside the training's run in its project."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from collage_agent.mirrors.mirroring import MirroredRun, MirrorEvent, MirrorRow

__all__ = ["TrackioMirror"]


class TrackioMirror:
    """`trackio`, or `trackio:SPACE`: a run NAME-collage of the project that the training logs to, else of our own.

    trackio numbers rows by the last one logged, so a row of ours in the training's run would move its next ones.
    """

    package: ClassVar[str] = "trackio"

    def __init__(self, run: MirroredRun) -> None:
        self._run = run
        self._theirs: Any = None
        self._own: Any = None

    def find(self) -> None:
        """The run that is current in this thread; asked only where the training has imported trackio."""
        module = sys.modules.get("trackio.context_vars")
        self._theirs = self._theirs or (module.current_run.get() if module is not None else None)

    def write(self, row: MirrorRow) -> None:
        """One row at the step, the worst layers as text."""
        values: dict[str, Any] = {f"collage/{name}": value for name, value in row.values.items()}
        self._opened().log({**values, "collage/worst_layers": row.worst_in_words}, step=row.step)

    def tell(self, event: MirrorEvent) -> None:
        """An alert of trackio's."""
        self._opened().alert(title=f"collage: {event.kind} at step {event.step}", text=event.text)

    def close(self) -> None:
        """End the run, which is ours."""
        if self._own is not None:
            self._own.finish()

    def _opened(self) -> Any:
        if self._own is None:
            import trackio

            # trackio's current run is per thread, so the training keeps its own.
            self._own = trackio.init(
                project=getattr(self._theirs, "project", None) or self._run.project,
                name=f"{getattr(self._theirs, 'name', None) or self._run.name}-collage",
                group=getattr(self._theirs, "group", None) or self._run.group,
                space_id=self._run.where or None,
                config={"collage_address": self._run.address()},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return self._own
