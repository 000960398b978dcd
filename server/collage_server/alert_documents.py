"""Make the Prometheus rules and the runbook from the alert catalogue.

`python -m collage_server.alert_documents rules` (or `runbook`) prints one; the committed files are these outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from collage_monitor.alerts import ALERTS, RECORDED, Alert, duration
from collage_monitor.local import DASHBOARD_PORT

__all__ = ["rules", "runbook"]

_SERVER = "this server"
_RUN = "run {{ $labels.run }} ({{ $labels.run_id }}) of project {{ $labels.project }}"
_RUNBOOK = "docs/alerts.md"
_DASHBOARD = f"http://127.0.0.1:{DASHBOARD_PORT}"


def rules(time_scale: float = 1.0, dashboard_url: str = _DASHBOARD) -> str:
    """The Prometheus rule file as YAML. `time_scale` < 1 shortens every window and waiting time alike.

    dashboard_url: where people reach the dashboard; the annotation `page` leads there.
    """
    lines = [
        "# Generated from the alert catalogue (`python -m collage_server.alert_documents rules`): change that.",
        "groups:",
        "  - name: collage",
        "    rules:",
    ]
    for name, sources in RECORDED.items():
        lines += [f"      - record: {name}", f"        expr: {json.dumps(' or '.join(sources))}"]
    for entry in ALERTS.values():
        lines += _rule(entry, time_scale, dashboard_url.rstrip("/"))
    return "\n".join(lines) + "\n"


def runbook() -> str:
    """The runbook as Markdown: a section for each alert."""
    head = [
        "# Alerts",
        "",
        "`python -m collage_server.alert_documents runbook` makes this page from the alert catalogue.",
        "The rules for Prometheus are in `server/prometheus/collage.rules.yml`. Their label `by_default` marks",
        "the alerts that are on by default.",
        "",
        "Silence does not prove health: `edq_ratio` cannot see errors that already sit in the optimizer's state.",
        "Read it beside `state_decrement_ratio` or the oracle ([metrics](metrics.md)).",
    ]
    for entry in ALERTS.values():
        head += _section(entry)
    return "\n".join(head) + "\n"


def _rule(entry: Alert, time_scale: float, dashboard_url: str) -> Iterator[str]:
    subject = _RUN if entry.scope == "run" else _SERVER
    summary = f"{subject}: {entry.summary}"
    description = f'{entry.meaning} Now: {{{{ $value | printf "%.3f" }}}}. First: {entry.first_step}'
    yield f"      - alert: {entry.name}"
    yield f"        expr: {json.dumps(entry.condition(time_scale), ensure_ascii=False)}"
    yield f"        for: {duration(entry.for_seconds * time_scale)}"
    if entry.keep_firing_seconds:
        yield f"        keep_firing_for: {duration(entry.keep_firing_seconds * time_scale)}"
    yield "        labels:"
    yield f"          severity: {entry.severity}"
    yield f"          by_default: {json.dumps('yes' if entry.on_by_default else 'no')}"
    yield "        annotations:"
    yield f"          summary: {json.dumps(summary, ensure_ascii=False)}"
    yield f"          description: {json.dumps(description, ensure_ascii=False)}"
    yield f"          runbook: {_RUNBOOK}#{entry.name.lower()}"
    run = "&run={{ $labels.run_id | urlquery }}" if entry.scope == "run" else ""
    yield f"          page: {json.dumps(f'{dashboard_url}/incident?alert={entry.name}{run}')}"


def _section(entry: Alert) -> Iterator[str]:
    yield from ("", f"## {entry.name}", "")
    default = (
        "on by default"
        if entry.on_by_default
        else f"off by default, on with `COLLAGE_SERVER_ALERTS={entry.severity}`"
    )
    yield f"**{entry.summary[0].upper()}{entry.summary[1:]}** ({entry.severity}; {default})"
    yield from ("", entry.meaning, "")
    minutes = f"{entry.for_seconds / 60:g} minute{'' if entry.for_seconds == 60 else 's'}"
    held = f"once this has held for {minutes}" if entry.for_seconds else "as soon as this holds"
    yield f"- The alert fires {held}: `{entry.condition()}`"
    if entry.keep_firing_seconds:
        yield f"- It ends when the condition has not held for {entry.keep_firing_seconds / 60:g} minutes."
    if entry.warm_up_steps:
        settling = f", nor in the {entry.settle_steps} steps after a resume" if entry.settle_steps else ""
        yield f"- A run is not judged in its first {entry.warm_up_steps} steps{settling}."
    elif entry.settle_steps:
        yield f"- A run is not judged in the {entry.settle_steps} steps after a resume."
    if entry.least_intended_share:
        share = f"{100 * entry.least_intended_share:g} %"
        yield f"- Nor is it judged while its intended updates are below {share} of what is usual in its last fifth."
    if not entry.conditions:
        yield "- Prometheus alone evaluates it; the server does not."
    yield from ("", "Other causes:", "")
    yield from (f"- {cause}" for cause in entry.other_causes)
    yield from ("", f"What to do first: {entry.first_step}")


@click.command()
@click.argument("document", type=click.Choice(["rules", "runbook"]))
@click.option("--time-scale", default=1.0, show_default=True, help="Shorten windows and waits by this factor.")
@click.option("--dashboard-url", default=_DASHBOARD, show_default=True, help="Where people reach the dashboard.")
def main(document: str, time_scale: float, dashboard_url: str) -> None:
    """Print the Prometheus rules or the runbook."""
    click.echo(rules(time_scale, dashboard_url) if document == "rules" else runbook(), nl=False)


if __name__ == "__main__":
    main()
