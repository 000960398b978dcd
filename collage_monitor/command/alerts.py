"""`alerts`: what fires and what has ended, in the terminal; acknowledging and silencing."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from collage_monitor import wire
from collage_monitor.client import Client, quoted
from collage_monitor.command.show import printable, server_options
from collage_monitor.local import find_token, local_server

__all__ = ["alerts"]


def _local_dashboard() -> str | None:
    """The dashboard that `up` keeps running here."""
    found = local_server()
    return found.dashboard_url if found else None


@click.command("alerts")
@server_options
@click.option("--project", help="Only of runs of this project.")
@click.option("--run", "run_id", help="Only of this run.")
@click.option("--state", type=click.Choice(["firing", "resolved"]), help="Only what fires, or what has ended.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--dashboard-url", envvar="COLLAGE_DASHBOARD_URL", default=_local_dashboard, help="Where the dashboard is."
)
@click.option("--acknowledge", "incident_id", metavar="INCIDENT", help="Note that you take care of this one.")
@click.option(
    "--silence-hours",
    type=click.FloatRange(0, 8760, min_open=True),
    help="Send nothing for so long of what --project and --run choose.",
)
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
) -> None:
    """List alerts, newest first: when they fired and ended, on which run, and why."""
    with Client(server_url, token or find_token(server_url)) as client:
        if incident_id is not None:
            client.acknowledge(incident_id)
        if silence_hours is not None:
            client.silence(
                wire.SilenceCreate(seconds=3600 * silence_hours, project=project, run_id=run_id, comment="command")
            )
        page = client.incidents(project=project, run_id=run_id, state=state, limit=limit)
    if as_json:
        click.echo(wire.encode_json(page).decode())
        return
    if not page.events:
        click.echo("no alerts: none of the conditions that this server evaluates held")
    for incident in page.events:
        _print(incident, dashboard_url)


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
