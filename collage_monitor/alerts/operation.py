"""Alerts on what carries the measurements: silent runs, the agent's cost, the server's intake, disk, archive and
evaluation of alerts.

Names of alerts are fixed: stored incidents, silences and Prometheus rules go by them. A bound that changes needs
its case in `tests/alerts/traces.py`, and the generated rules and runbook.
"""

from __future__ import annotations

from typing import Final

from collage_monitor.diagnosis.alert import Condition, about_runs, about_the_server
from collage_monitor.diagnosis.causes import CauseVerdict, IncidentEvidence, left_open, ruled_out, supported

__all__ = ["ALERTS"]

_STALLED_SECONDS: Final = 300.0


def _paused(evidence: IncidentEvidence) -> CauseVerdict:
    run = evidence.run
    if run is None:
        return left_open("the run is gone")
    if evidence.step is not None and (run.last_step or 0) > evidence.step:
        begun = [attempt for attempt in run.attempts if attempt.created_at > evidence.incident.started_at]
        if begun:
            return ruled_out(f"the run went on only as attempt {begun[0].attempt}")
        return supported(f"the same attempt went on, up to step {run.last_step:,}")
    return left_open("nothing has come since; an evaluation may still go on")


def _long_steps(evidence: IncidentEvidence) -> CauseVerdict:
    run = evidence.run
    if run is None or run.last_step is None or run.first_step is None or run.last_step <= run.first_step:
        return left_open("too few steps were reported")
    until = evidence.incident.started_at if evidence.step == run.last_step else run.updated_at
    seconds = max(until - run.created_at, 0.0) / (run.last_step - run.first_step)
    between = seconds * (run.watch.every if run.watch else 1)
    clause = f"measured steps are about {between:.3g} s apart"
    return supported(clause) if between > _STALLED_SECONDS else ruled_out(clause)


def _only_logs(evidence: IncidentEvidence) -> CauseVerdict:
    if evidence.watch is not None:
        return ruled_out(f"{evidence.watch.optimizer} is watched")
    return left_open("no optimizer is watched; whether on purpose is not reported")


def _slow_first_step(evidence: IncidentEvidence) -> CauseVerdict:
    if evidence.run is not None and evidence.run.latest:
        return supported("steps were measured since")
    return left_open("no step was measured since")


def _not_governed(evidence: IncidentEvidence) -> CauseVerdict:
    if evidence.watch is None:
        return left_open("the agent did not say how it measures")
    if evidence.watch.sample == "all":
        return supported('the agent measures with sample="all"')
    return left_open(f"the agent measures {evidence.watch.sample:,} elements a tensor; its budget is not reported")


def _spool_overflowed(evidence: IncidentEvidence) -> CauseVerdict:
    gaps = [event for event in evidence.events if event.kind in {"gap", "reports_dropped"}]
    return left_open(gaps[-1].text if gaps else "the reason of each dropped report stays with the agent")


def _replayed(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("who sent what was refused is in the server's log")


def _clock_set(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("how clocks were set is not reported")


def _credentials_ended(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("what the archive answered stands in the server's log alone")


def _other_programs(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("what else is on the disk is not reported")


def _moved_by_hand(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("what is changed by hand is not reported")


def _other_backups(_evidence: IncidentEvidence) -> CauseVerdict:
    return left_open("back-ups made in another way are not reported")


ALERTS: Final = (
    about_runs(
        "CollageRunStalled",
        Condition("collage_last_report_timestamp_seconds", ">", _STALLED_SECONDS, "age"),
        for_seconds=0.0,
        warm_up_steps=0,
        settle_steps=0,
        keep_firing_seconds=1800.0,
        severity="warning",
        on_by_default=True,
        summary="a run that says it is running has sent nothing for five minutes",
        meaning=(
            "The training hangs, its process was killed, or the network between it and the server is down. "
            "After ten minutes the run counts as stale and leaves `/metrics`."
        ),
        other_causes=(
            "a long evaluation or checkpoint, during which no step is taken",
            "steps so long that the next measured one is more than five minutes away: log the loss at each step",
        ),
        checks=(_paused, _long_steps),
        first_step=(
            "Find in the run's streams which rank reported last. Check that its process is alive and reaches "
            "the server's address. Reports that were not sent wait in its spool."
        ),
    ),
    about_runs(
        "CollageRunWithoutData",
        Condition("collage_unmeasured_seconds", ">", 900.0),
        for_seconds=60.0,
        warm_up_steps=0,
        settle_steps=0,
        severity="info",
        summary="a run goes on for a quarter of an hour, and no step of it was measured",
        meaning="The run logs values, but no optimizer is watched, or none of its steps is a measured one.",
        other_causes=(
            "a run that only logs, on purpose",
            "a first step that takes very long, such as compilation",
        ),
        checks=(_only_logs, _slow_first_step),
        first_step=(
            "Check that watch was called with the optimizer that trains this model, and that its interval is "
            "not longer than the run. `collage-monitor doctor` shows what the agent can measure."
        ),
    ),
    about_runs(
        "CollageAgentOverBudget",
        Condition("collage_agent_overhead_ratio", ">", 0.03),
        for_seconds=1800.0,
        settle_steps=0,
        severity="info",
        summary="the agent takes more than 3 % of the training's CPU",
        meaning=(
            "The governor could not bring the agent's cost within its budget: every step is short, or whole "
            "tensors are measured."
        ),
        other_causes=('budget=None or sample="all": these switch the governor off',),
        checks=(_not_governed,),
        first_step=(
            "Look at agent_overhead_ratio and agent_interval. Raise the interval between measured steps, or lower "
            "the sample."
        ),
    ),
    about_runs(
        "CollageReportsDropped",
        Condition("collage_reports_dropped", ">", 0.0, "growth"),
        window_seconds=900.0,
        for_seconds=0.0,
        warm_up_steps=0,
        settle_steps=0,
        severity="info",
        summary="the agent dropped reports",
        meaning=(
            "Reports were dropped because the queue or the spool was full, or the server refused them. The "
            "training is not harmed; its curves have gaps."
        ),
        other_causes=("the server was away for longer than the spool holds",),
        checks=(_spool_overflowed,),
        first_step="Look at reports_dropped and the run's timeline for the reason, and at the server's log.",
    ),
    about_the_server(
        "CollageIngestFailing",
        Condition("collage_server_reports_total", ">", 0.0, "growth", labels=(("outcome", "=~", "rejected|late"),)),
        window_seconds=600.0,
        for_seconds=60.0,
        severity="warning",
        summary="the server refuses reports",
        meaning=(
            "Reports arrive that cannot be stored: they are malformed (rejected), or of steps that retention "
            "has closed (late). The runs that sent them lose these reports."
        ),
        other_causes=("an agent of another version that replays an old spool",),
        checks=(_replayed,),
        first_step="Look at the server's log for the reason, and at the timelines of the runs that send now.",
    ),
    about_the_server(
        "CollageAlertsNotEvaluated",
        Condition("collage_server_alerts_evaluated_timestamp_seconds", ">", 300.0, "age"),
        for_seconds=0.0,
        severity="critical",
        summary="no server has evaluated the alerts for five minutes",
        meaning=(
            "The thread that judges the runs does not complete a round, or the server that has the lease "
            "hangs. Until it completes one, no alert fires except from Prometheus, which evaluates these "
            "rules itself."
        ),
        other_causes=("a clock that was set forward",),
        checks=(_clock_set,),
        first_step=(
            "Look in the server's log for the thread called alerts. Restart the server that has the lease; "
            "another one takes over after four rounds."
        ),
    ),
    about_the_server(
        "CollageDiskNearlyFull",
        Condition("collage_server_disk_left_ratio", "<", 0.1),
        for_seconds=300.0,
        severity="critical",
        on_by_default=True,
        summary="less than a tenth of the space for data is left",
        meaning=(
            "The disk or its budget is nearly full. Once it is full, the server only reads, and agents keep "
            "their reports in spools until those are full, too."
        ),
        other_causes=("other programs on the same disk",),
        checks=(_other_programs,),
        first_step=(
            "Delete runs, shorten the retention (COLLAGE_SERVER_RETENTION_RAW_DAYS), or free space; "
            "`/readyz` shows whether the server only reads."
        ),
    ),
    about_the_server(
        "CollageArchiveAway",
        Condition("collage_server_archive_away_seconds", ">", 1800.0),
        for_seconds=300.0,
        severity="warning",
        summary="the archive has taken no files for half an hour",
        meaning=(
            "Older points cannot be written to, or read from, the folder or bucket of COLLAGE_SERVER_ARCHIVE. "
            "Nothing is lost: the data stays in the database, which grows until the archive answers."
        ),
        other_causes=("credentials of the bucket that have expired",),
        checks=(_credentials_ended,),
        first_step="Look in the server's log for the archive's answers, and check whether other clients reach it.",
    ),
    about_the_server(
        "CollageArchiveDamaged",
        Condition("collage_server_archive_damaged_files", ">", 0.0),
        for_seconds=300.0,
        severity="critical",
        summary="archived files are missing or damaged, and no back-up has them",
        meaning=(
            "A file of older points differs from what was written, or is gone. Questions about its steps are "
            "answered 503, `damaged`; all other steps answer. The newest back-up's folder has no good copy."
        ),
        other_causes=("files that were moved or deleted by hand",),
        checks=(_moved_by_hand,),
        first_step=(
            "`collage-monitor archive verify` names the files. Put them back from a copy under the same paths and "
            "verify again, and check the disk. If there is no copy, delete the runs."
        ),
    ),
    about_the_server(
        "CollageDatabaseDamaged",
        Condition("collage_server_database_damaged_rows", ">", 0.0),
        for_seconds=300.0,
        severity="critical",
        summary="rows of the database are damaged, and no back-up has them",
        meaning=(
            "Rows differ from what was written, or an index of the SQLite file does. Questions that read such a "
            "row are answered 503, `damaged`. What a damaged index no longer leads to is missing from answers."
        ),
        other_causes=("rows that were changed by hand",),
        checks=(_moved_by_hand,),
        first_step=(
            "`collage-monitor archive verify` names the rows. Check the disk, and restore a back-up into another "
            "folder. If one run alone is damaged, it may be deleted instead."
        ),
    ),
    about_the_server(
        "CollageBackupOld",
        Condition("collage_server_backup_age_seconds", ">", 8 * 86_400.0),
        for_seconds=300.0,
        severity="warning",
        summary="the newest good back-up is more than eight days old",
        meaning=(
            "`collage-monitor backup make` was run here before, and has not ended well for eight days. A lost disk "
            "would take all that came since. Servers that never made a back-up do not alert."
        ),
        other_causes=("back-ups that are made in another way now",),
        checks=(_other_backups,),
        first_step=(
            "Run `collage-monitor backup make FILE` and read what it says, then check the timer that should have "
            "run it."
        ),
    ),
)
