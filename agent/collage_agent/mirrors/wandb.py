"""Weights & Biases: our numbers in the rows of the training's own run, or in a run of their own beside it.

`mirroring.py` makes the rows; names of metrics follow it. The library is imported when a run asks for this mirror
(`tests/agent_delivery/test_mirrors.py`).
"""

from __future__ import annotations

import sys
import time
from typing import Any, ClassVar, Final

from collage_agent.mirrors.mirroring import MirroredRun, MirrorEvent, MirrorRow

__all__ = ["WandbMirror"]

_PATIENCE_SECONDS: Final = 0.5
_PAUSE_SECONDS: Final = 0.01


class WandbMirror:
    """`wandb`: the run that the training has begun, else one of our own in its group; `wandb:own`: always that.

    In the training's run it neither commits nor passes a step: its values join the row that the training commits
    next, and are plotted over `collage/step`. A row waits for one of the training's, but not for long: where the
    training commits less often than steps are measured, the newest measured step of each row is kept.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self, run: MirroredRun) -> None:
        self._run = run
        self._into: Any = None
        self._is_own = False
        self._filled: int | None = None
        """The step of the row in which the last of ours stands."""

    def find(self) -> None:
        """Nothing to find here: W&B's own run is any thread's."""

    def write(self, row: MirrorRow) -> None:
        """One row: the series, `collage/step`, and the worst layers as text."""
        values: dict[str, Any] = {f"collage/{name}": value for name, value in row.values.items()}
        self._log({**values, "collage/step": row.step, "collage/worst_layers": row.worst_in_words})

    def tell(self, event: MirrorEvent) -> None:
        """A text in the row, and in the summary as the last one."""
        text = f"{event.kind} at step {event.step}: {event.text}"
        self._log({"collage/event": text})
        self._into.summary["collage/last_event"] = text

    def close(self) -> None:
        """End the run if it is ours."""
        if self._is_own and self._into is not None:
            self._into.finish()

    def _log(self, values: dict[str, Any]) -> None:
        if self._into is None:
            self._open()
        if self._is_own:
            self._into.log(values)
            return
        self._wait_for_the_next_row()
        # A step, or a commit, would close the row that the training is still filling.
        self._into.log(values, commit=False)
        self._filled = self._into.step

    def _wait_for_the_next_row(self) -> None:
        """Wait until the training has committed the row that has our last numbers, or for _PATIENCE_SECONDS."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while self._into.step == self._filled and time.monotonic() < until:
            if self._run.ending.wait(_PAUSE_SECONDS):
                return

    def _open(self) -> None:
        module = sys.modules.get("wandb")
        theirs = getattr(module, "run", None)
        if theirs is not None and self._run.where != "own":
            self._into = theirs
        else:
            import wandb

            self._is_own = True
            self._into = wandb.init(
                project=getattr(theirs, "project", None) or self._run.project,
                name=f"{self._run.name} (collage)",
                group=getattr(theirs, "group", None) or self._run.group or self._run.name,
                dir=getattr(getattr(theirs, "settings", None), "root_dir", None),
                reinit="create_new",
            )
        self._into.define_metric("collage/step", hidden=True)
        self._into.define_metric("collage/*", step_metric="collage/step")
        self._into.config.update({"collage_address": self._run.address()}, allow_val_change=True)
