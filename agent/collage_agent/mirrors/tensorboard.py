"""TensorBoard: event files of our own, in a folder beside the training's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from collage_agent.mirrors.mirroring import MirroredRun, MirrorEvent, MirrorRow

__all__ = ["TensorBoardMirror"]


class TensorBoardMirror:
    """`tensorboard`, or `tensorboard:FOLDER`; by default `runs/collage-RUN_ID`. Files of the training stay shut."""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, run: MirroredRun) -> None:
        self._run = run
        self._writer: Any = None
        self._named: tuple[str, ...] = ()

    def find(self) -> None:
        """Nothing to find: the folder is ours."""

    def write(self, row: MirrorRow) -> None:
        """A scalar a series; the worst layers as text whenever they are others than before."""
        writer = self._opened()
        for name, value in row.values.items():
            writer.add_scalar(f"collage/{name}", value, row.step, row.time)
        if self._named != (named := tuple(name for name, _ in row.worst)):
            self._named = named
            writer.add_text("collage/worst_layers", row.worst_in_words, row.step, row.time)

    def tell(self, event: MirrorEvent) -> None:
        """A text under `collage/events`."""
        self._opened().add_text("collage/events", f"{event.kind}: {event.text}", event.step, event.time)

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = self._run.where or str(Path("runs") / f"collage-{self._run.run_id}")
            self._writer = SummaryWriter(folder)
            self._writer.add_text("collage/run", self._run.address(), 0)
        return self._writer
