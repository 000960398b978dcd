"""`alerts`: list, acknowledge and silence incidents in the terminal.

It asks `/events` and `/silences` through `client.Client`; what fires is decided by the server's `alerts/`. Options
are those of `docs/command.md`; the output is tested in `tests/alerts/test_listening.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime

import click

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command.progress import remark
from collage_monitor.command.server import dashboard_of, open_client, server_options
from collage_monitor.command.terminal import printable
from collage_monitor.connection import quoted

__all__ = ["alerts"]


@click.command("alerts")
@server_options
@click.option("--project", help="Only incidents of this project's runs.")
@click.option("--run", "run_id", help="Only incidents of this run.")
@click.option(
    "--state", type=click.Choice(["firing", "resolved"]), help="Only incidents that are firing, or that have ended."
)
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--dashboard-url",
    envvar="COLLAGE_DASHBOARD_URL",
    help="Address of the dashboard; default: the one that the server names.",
)
@click.option(
    "--acknowledge", "incident_id", metavar="INCIDENT", help="Acknowledge this incident: you take care of it."
)
@click.option(
    "--silence-hours",
    type=click.FloatRange(0, 8760, min_open=True),
    help="Send no messages for this many hours. Needs --alert, --project or --run to say about what.",
)
@click.option(
    "--test", "try_targets", is_flag=True, help="Only send one message to each target; needs an admin token."
)
@click.option("--alert", help="With --silence-hours: name of the one alert to silence.")
def alerts(
    server_url: str,
    token: str | None,
    as_json: bool,
    project: str | None,
    run_id: str | None,
    state: wire.IncidentState | None,
    limit: int,
    dashboard_url: str | None,
    incident_id: str | None,
    silence_hours: float | None,
    alert: str | None,
    try_targets: bool,
) -> None:
    """List alerts, newest first: when they fired and ended, on which run, and why."""
    if silence_hours is not None and alert is project is run_id is None:
        raise click.UsageError("--silence-hours needs --alert, --project or --run: name what is to be silent")
    if alert is not None and silence_hours is None:
        raise click.UsageError("--alert says what --silence-hours silences: give both, or neither")
    with open_client(server_url, token) as client:
        if try_targets:
            raise SystemExit(_try_targets(client, as_json))
        if incident_id is not None:
            client.acknowledge(incident_id)
        if silence_hours is not None:
            _silence(client, silence_hours, alert, project, run_id)
        page = client.incidents(project=project, run_id=run_id, state=state, limit=limit)
    if as_json:
        click.echo(wire.encode_json(page).decode())
        return
    if not page.events:
        click.echo("no alerts: none of the conditions that this server evaluates held")
        return
    dashboard = dashboard_url or dashboard_of(server_url)
    for incident in page.events:
        _print(incident, dashboard)


def _try_targets(client: Client, as_json: bool) -> int:
    """Print which targets took a message; 1 if one took none, or there are none."""
    tried = client.try_targets()
    if as_json:
        click.echo(wire.encode_json(wire.TriedTargetList(targets=tried)).decode())
    for target in () if as_json else tried:
        told = "took the message" if target.problem is None else f"took no message ({target.problem})"
        click.echo(printable(f"{target.target} {told}"))
    if not tried:
        click.echo(
            "this server tells nobody: set COLLAGE_SERVER_ALERT_SLACK, _WEBHOOK, or _SMTP and _EMAIL", err=True
        )
    return 0 if tried and not any(target.problem for target in tried) else 1


def _silence(client: Client, hours: float, alert: str | None, project: str | None, run_id: str | None) -> None:
    """Make the silence, and say on stderr what it covers and until when."""
    made = client.silence(
        wire.SilenceCreate(seconds=3600 * hours, alert=alert, project=project, run_id=run_id, comment="command")
    )
    named = (("alert", made.alert), ("project", made.project), ("run", made.run_id))
    covered = ", ".join(f"{kind} {name}" for kind, name in named if name is not None)
    remark(printable(f"silenced until {_clock(made.ends_at)}: {covered}"))


def _print(incident: wire.Incident, dashboard_url: str | None) -> None:
    since = _clock(incident.started_at)
    lasted = f"{since} to {_clock(incident.resolved_at)}" if incident.resolved_at is not None else f"since {since}"
    notes = [incident.state, incident.severity, lasted]
    if incident.acknowledged_by:
        notes.append(f"acknowledged by {incident.acknowledged_by}")
    if incident.silenced:
        notes.append("silenced")
    about = f"run {incident.run_id} of {incident.project}" if incident.run_id else "the server"
    click.echo(printable(f"{incident.incident_id}  {incident.alert}: {', '.join(notes)}; {about}"))
    click.echo(f"  {printable(incident.text)}")
    if dashboard_url is not None:
        click.echo(f"  {dashboard_url.rstrip('/')}/incident/{quoted(incident.incident_id)}")


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
