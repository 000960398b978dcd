"""MLflow: our numbers as metrics and tags of the training's active run, or of a run of their own.

`mirroring.py` makes the rows; names of metrics follow it. The library is imported when a run asks for this mirror
(`tests/agent_delivery/test_mirrors.py`).
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, Final

from collage_agent.mirrors.mirroring import MirroredRun, MirrorEvent, MirrorRow

__all__ = ["MlflowMirror"]

_MOST_EVENTS: Final = 200
_TAG_CHARACTERS: Final = 5_000


class MlflowMirror:
    """`mlflow`: the run that is active in the training's thread at `init` or its first step, else one of our own.

    Written through a client of our own, with the step of each number: active runs and the training's metrics stay
    as they are.
    """

    package: ClassVar[str] = "mlflow"

    def __init__(self, run: MirroredRun) -> None:
        self._run = run
        self._client: Any = None
        self._into: str | None = None
        self._is_own = False
        self._events: list[str] = []
        self._named: tuple[str, ...] = ()

    def find(self) -> None:
        """The run that is active in this thread; asked only where the training has imported mlflow."""
        module = sys.modules.get("mlflow")
        active = module.active_run() if module is not None and self._into is None else None
        if active is not None:
            self._into = active.info.run_id

    def write(self, row: MirrorRow) -> None:
        """A metric a series, in one request; the worst layers as a tag whenever they are others than before."""
        from mlflow.entities import Metric, RunTag

        client, into = self._opened()
        milliseconds = int(1000 * row.time)
        metrics = [Metric(f"collage/{name}", value, milliseconds, row.step) for name, value in row.values.items()]
        named = tuple(name for name, _ in row.worst)
        tags = (
            [RunTag("collage.worst_layers", row.worst_in_words[:_TAG_CHARACTERS])] if named != self._named else []
        )
        client.log_batch(into, metrics=metrics, tags=tags)
        self._named = named

    def tell(self, event: MirrorEvent) -> None:
        """A line of the artifact `collage_events.txt`, and the tag `collage.last_event`."""
        client, into = self._opened()
        self._events = [*self._events, f"{event.kind} at step {event.step}: {event.text}"][-_MOST_EVENTS:]
        client.log_text(into, "\n".join([*self._events, ""]), "collage_events.txt")
        client.set_tag(into, "collage.last_event", self._events[-1][:_TAG_CHARACTERS])

    def close(self) -> None:
        """End the run if it is ours."""
        if self._is_own:
            self._client.set_terminated(self._into)

    def _opened(self) -> tuple[Any, str]:
        if self._client is None:
            from mlflow import MlflowClient

            client = MlflowClient()
            if self._into is None:
                name = self._run.project
                found = client.get_experiment_by_name(name)
                experiment = client.create_experiment(name) if found is None else found.experiment_id
                self._into = client.create_run(experiment, run_name=f"{self._run.name} (collage)").info.run_id
                self._is_own = True
            client.set_tag(self._into, "collage.address", self._run.address())
            self._client = client
        assert self._into is not None
        return self._client, self._into
