"""Trials that are trainings: run as any user's, their losses and metrics read back from the server."""

from __future__ import annotations

from collage_studies.corpus import standard_library
from collage_studies.study import Record, Reporting, Trial
from collage_studies.training import train

__all__ = ["run_training"]


def run_training(trial: Trial, reporting: Reporting) -> Record:
    """Train the trial's recipe under its plan; the record names the run, and holds the speed."""
    assert trial.plan is not None
    assert trial.recipe is not None
    outcome = train(
        trial.plan,
        trial.recipe,
        standard_library(),
        lambda *_: None,
        project="studies",
        name=trial.name,
        group=reporting.group,
        server_url=reporting.server_url,
        folder=reporting.folder,
    )
    values: dict[str, float | None] = {"tokens_per_cpu_second": outcome.tokens_per_cpu_second}
    return Record(trial=trial, versions={}, cpu_seconds=0.0, run_id=outcome.run_id, values=values)
