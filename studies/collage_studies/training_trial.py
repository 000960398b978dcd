"""Trials that are trainings: run as any user's, their losses and metrics read back from the server."""

from __future__ import annotations

from collage_agent.watch_options import WatchArguments
from collage_demo.corpus import Corpus, standard_library
from collage_demo.training import Build, train

from collage_studies.study import Record, ReportTarget, Trial

__all__ = ["run_training"]


def run_training(
    trial: Trial,
    reporting: ReportTarget,
    *,
    corpus: Corpus | None = None,
    build: Build | None = None,
    options: WatchArguments | None = None,
) -> Record:
    """Train the trial's recipe under its plan; the record names the run, and holds the speed.

    corpus: other text than the standard library's sources; build, options: see `train`.
    """
    assert trial.plan is not None
    assert trial.recipe is not None
    outcome = train(
        trial.plan,
        trial.recipe,
        corpus or standard_library(),
        lambda *_: None,
        project="studies",
        name=trial.name,
        group=reporting.group,
        server_url=reporting.server_url,
        folder=reporting.folder,
        build=build,
        settings=trial.settings,
        options=options,
    )
    values: dict[str, float | None] = {"tokens_per_cpu_second": outcome.tokens_per_cpu_second}
    return Record(trial=trial, versions={}, cpu_seconds=0.0, run_id=outcome.run_id, values=values)
