"""`demo`: start server and dashboard here, train five strategies on the standard library, compare them."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

import click

from collage_monitor.client import Client
from collage_monitor.command import require
from collage_monitor.command.up import Services
from collage_monitor.local import DASHBOARD_PORT, SERVER_PORT
from collage_studies import summary
from collage_studies.recipe import PLANS, Recipe
from collage_studies.team import Team
from collage_studies.worker import Done, Job, Step

__all__ = ["demo"]

_TOGETHER = 2


@click.command("demo")
@click.option("--exit", "leave", is_flag=True, help="End after the comparison; do not stay up.")
@click.option(
    "--output", default="demo-output", show_default=True, type=click.Path(path_type=Path, file_okay=False)
)
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Data folder.  [default: OUTPUT/data]")
@click.option("--steps", default=Recipe.steps, show_default=True, type=click.IntRange(1))
@click.option("--port", default=SERVER_PORT, show_default=True, help="Port of the server.")
@click.option("--dashboard-port", default=DASHBOARD_PORT, show_default=True, help="Port of the dashboard.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def demo(
    leave: bool, output: Path, folder: Path | None, steps: int, port: int, dashboard_port: int, as_json: bool
) -> None:
    """Train a small model under five storage strategies, watch each, and compare them."""
    require("demo", "dashboard", "server", "studies")
    signal.signal(signal.SIGTERM, _interrupt)
    output.mkdir(parents=True, exist_ok=True)
    data = (folder or output / "data").resolve()
    with Services(data, port, dashboard_port) as services:
        click.echo(f"dashboard  {services.dashboard_url}\nserver     {services.server_url}", err=as_json)
        lines = _train_and_compare(Recipe(steps=steps), services, err=as_json)
        written = output / "summary.json"
        written.write_bytes(summary.as_json(lines))
        click.echo(summary.as_json(lines).decode() if as_json else summary.as_table(lines))
        compared = "&".join(f"run={entry.run_id}" for entry in lines)
        click.echo(f"\nwritten    {written}\ncompare    {services.dashboard_url}/compare?{compared}", err=as_json)
        if leave:
            return
        click.echo("Server and dashboard stay up; Ctrl-C stops them.", err=as_json)
        try:
            services.watch()
        except KeyboardInterrupt:
            click.echo("stopping", err=as_json)


def _train_and_compare(recipe: Recipe, services: Services, *, err: bool) -> list[summary.Line]:
    """Train each plan, at most two at a time, and read from the server what it stored."""

    def progress(job: Job, line: Step | Done) -> None:
        if isinstance(line, Step):
            text = f"step {line.step}/{recipe.steps}  loss {line.loss:.4f}  validation {line.validation_loss:.4f}"
        else:
            text = f"done  {line.tokens_per_cpu_second:.0f} tokens per CPU second, {line.reports_sent} reports sent"
        click.echo(f"{job.plan.name:<26}{text}", err=err)

    group = f"demo {time.strftime('%Y-%m-%d %H:%M:%S')}"
    jobs = [Job(plan, recipe, group, services.server_url, services.folder) for plan in PLANS]
    click.echo(f"training {len(jobs)} strategies for {recipe.steps} steps, {_TOGETHER} at a time", err=err)
    with Team(progress, _TOGETHER, err=err) as team:
        done = team.run(jobs)
    with Client(services.server_url, services.token) as client:
        comparison = client.compare([entry.run_id for entry in done], "edq_ratio")
    runs = {entry.run_id: entry for entry in comparison.runs}
    return [summary.line(job.plan, entry, runs[entry.run_id]) for job, entry in zip(jobs, done, strict=True)]


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
