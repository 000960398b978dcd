"""`list` and `show`: runs and their newest numbers in the terminal, through the HTTP API."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.judgement import judge
from collage_monitor.local import find_token, server_address
from collage_monitor.metrics import METRICS, split_key
from collage_monitor.run_evidence import read_edq_since, read_evidence

__all__ = ["list_runs", "printable", "server_options", "show"]

_Function = TypeVar("_Function", bound=Callable[..., None])
_COLUMNS = ("edq_ratio", "state_decrement_ratio/exp_avg_sq", "lost_update_ratio")
_WIDTHS = (11, 11, 11)


def server_options(function: _Function) -> _Function:
    """The options that every verb which reads from a server takes."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON."),
        click.option("--token", envvar="COLLAGE_TOKEN", help="Token; default for a local server: its own."),
        click.option(
            "--server-url",
            envvar="COLLAGE_SERVER_URL",
            default=server_address,
            show_default="the local server's",
        ),
    ):
        function = option(function)
    return function


@click.command("list")
@server_options
@click.option("--project", help="Only runs of this project.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 1000))
def list_runs(server_url: str, token: str | None, as_json: bool, project: str | None, limit: int) -> None:
    """List runs, newest first."""
    with Client(server_url, token or find_token(server_url)) as client:
        page = client.runs(project=project, limit=limit)
    if as_json:
        click.echo(wire.encode_json(page).decode())
        return
    if not page.runs:
        click.echo("no runs yet; `make demo` trains some, or call collage_agent.init() in your training")
        return
    click.echo(
        f"{'run_id':<27}{'name':<24}{'strategy':<18}{'state':<10}{'step':>8}{'EDQ':>11}{'decay':>11}{'lost':>11}"
    )
    for run in page.runs:
        values = "".join(_cell(run.latest.get(key), width) for key, width in zip(_COLUMNS, _WIDTHS, strict=True))
        label = (run.watch.strategy or run.watch.observed_strategy) if run.watch else "-"
        step = "-" if run.last_step is None else run.last_step
        name, label = printable(run.name[:22]), printable(label)
        click.echo(f"{run.run_id:<27}{name:<24}{label:<18}{run.state:<10}{step:>8}{values}")


@click.command("show")
@server_options
@click.argument("run_id")
def show(server_url: str, token: str | None, as_json: bool, run_id: str) -> None:
    """Show a run's verdict, its newest numbers and its worst layers."""
    with Client(server_url, token or find_token(server_url)) as client:
        latest = client.latest(run_id)
        worst = client.worst(run_id, k=3)
        if not as_json:
            found, since = judge(read_evidence(client, run_id)), read_edq_since(client, run_id)
    if as_json:
        click.echo(wire.encode_json(latest).decode())
        return
    click.echo(f"run {run_id}, step {latest.step}: {found.health}")
    click.echo(f"  {printable(found.text)}")
    if found.advised:
        click.echo(f"  {printable(found.advised)}")
    if since is not None:
        click.echo(f"  since when: {printable(since)}")
    for key, value in latest.model.items():
        name = split_key(key)[0]
        if name in METRICS:
            click.echo(f"  {key:<44}{_cell(value, 14)}  {METRICS[name].unit}")
    for name, logged in latest.scalars.items():
        click.echo(f"  {printable(name):<44}{_cell(logged.value, 14)}  at step {logged.step}")
    for entry in worst:
        click.echo(f"  worst by {entry.metric}: {printable(entry.layer)} {_cell(entry.value, 0)}")


def printable(text: str) -> str:
    """A name for the terminal: whoever may send runs may not steer it, nor start a line of their own."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _cell(value: wire.Number | None, width: int) -> str:
    text = "-" if value is None else f"{wire.from_number(value):.4g}"
    return f"{text:>{width}}"
