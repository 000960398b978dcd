"""`demo`: start server and dashboard here, train five strategies on the standard library, compare them.

The result is a line for each training, as a table and as summary.json. One more training makes an alert fire.

`pool.py` runs the trainings, `worker.py` each one. Which five, and how long, is `recipe.py`'s
(`tests/demo/test_summary.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import click
import msgspec

from collage_demo.pool import WorkerPool
from collage_demo.recipe import PLANS, Plan, Recipe
from collage_demo.worker import DemoTask, FinalLine, ProgressLine
from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command import require
from collage_monitor.command.up import Services
from collage_monitor.local import DASHBOARD_PORT, SERVER_PORT

__all__ = ["ResultRow", "demo", "result_row", "summary_json", "summary_table"]

_TOGETHER = 2
_ALERT_SECONDS = 1
"""How often the demo's server evaluates its alerts: its trainings end within minutes."""
_GOES_WRONG: Final = Plan("light", "bfloat16")
"""Of the training that loses its residuals at a resume."""


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """A training's result. Ratios are of the whole model, all measured steps merged; None means undefined."""

    run_id: str
    strategy: str
    dtype: str
    steps: int
    train_loss: float | None
    validation_loss: float | None
    edq_ratio: float | None
    edq_oracle_ratio: float | None
    oracle_displacement_ratio: float | None
    state_decrement_ratio: float | None
    lost_update_ratio: float | None
    bytes_per_parameter: float | None
    tokens_per_cpu_second: float
    agent_overhead_ratio: float | None
    reports_sent: int
    reports_stored: int


def result_row(plan: Plan, done: FinalLine, compared: wire.ComparedRun) -> ResultRow:
    """A training's line, from what its process printed and what the server stored."""
    last = {name: logged.value for name, logged in compared.scalars.items()}
    return ResultRow(
        run_id=done.run_id,
        strategy=plan.strategy,
        dtype=plan.dtype,
        steps=done.steps,
        train_loss=_number(compared.mean_scalars, "loss"),
        validation_loss=_number(last, "validation_loss"),
        edq_ratio=_number(compared.merged, "edq_ratio"),
        edq_oracle_ratio=_number(compared.merged, "edq_oracle_ratio"),
        oracle_displacement_ratio=_number(compared.merged, "oracle_displacement_ratio"),
        state_decrement_ratio=_number(compared.merged, "state_decrement_ratio/exp_avg_sq"),
        lost_update_ratio=_number(compared.merged, "lost_update_ratio"),
        bytes_per_parameter=_number(last, "bytes_per_parameter"),
        tokens_per_cpu_second=done.tokens_per_cpu_second,
        agent_overhead_ratio=_number(last, "agent_overhead_ratio"),
        reports_sent=done.reports_sent,
        reports_stored=compared.reports,
    )


def summary_json(lines: Sequence[ResultRow]) -> bytes:
    """The lines as a JSON list; undefined numbers are null."""
    return msgspec.json.format(msgspec.json.encode(lines), indent=2) + b"\n"


def summary_table(lines: Sequence[ResultRow]) -> str:
    """The lines as a table for the terminal."""
    head = f"{'strategy':<17}{'dtype':<10}{'train':>8}{'valid.':>8}{'EDQ':>8}{'oracle':>8}{'decay':>8}{'lost':>8}"
    rows = [head + f"{'B/param':>9}{'tok/s':>8}{'agent':>8}{'reports':>9}"]
    for entry in lines:
        cells = (
            (entry.train_loss, 8, ".4f"),
            (entry.validation_loss, 8, ".4f"),
            (entry.edq_ratio, 8, ".3f"),
            (entry.edq_oracle_ratio, 8, ".3f"),
            (entry.state_decrement_ratio, 8, ".3f"),
            (entry.lost_update_ratio, 8, ".3f"),
            (entry.bytes_per_parameter, 9, ".2f"),
            (entry.tokens_per_cpu_second, 8, ".0f"),
            (entry.agent_overhead_ratio, 8, ".2%"),
        )
        text = "".join(f"{'-' if value is None else format(value, form):>{width}}" for value, width, form in cells)
        rows.append(f"{entry.strategy:<17}{entry.dtype:<10}{text}{entry.reports_stored:>9}")
    return "\n".join(rows)


def _number(values: Mapping[str, wire.Number | None], name: str) -> float | None:
    value = values.get(name)
    return value if isinstance(value, float) else None


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
    require("demo", "agent", "server")
    signal.signal(signal.SIGTERM, _interrupt)
    output.mkdir(parents=True, exist_ok=True)
    data = (folder or output / "data").resolve()
    defaults = {"COLLAGE_SERVER_ALERT_INTERVAL_SECONDS": str(_ALERT_SECONDS)}
    with Services(data, port, dashboard_port, defaults=defaults) as services:
        services.start_dashboard()
        click.echo(f"dashboard  {services.dashboard_url}\nserver     {services.server_url}", err=as_json)
        lines, incidents = _train_and_compare(Recipe(steps=steps), services, err=as_json)
        written = output / "summary.json"
        written.write_bytes(summary_json(lines))
        click.echo(summary_json(lines).decode() if as_json else summary_table(lines))
        compared = "&".join(f"run={entry.run_id}" for entry in lines)
        click.echo(f"\nwritten    {written}\ncompare    {services.dashboard_url}/compare?{compared}", err=as_json)
        for incident in incidents:
            click.echo(f"incident   {services.dashboard_url}/incident/{incident.incident_id}", err=as_json)
        if leave:
            return
        click.echo("Server and dashboard stay up; Ctrl-C stops them.", err=as_json)
        try:
            services.watch()
        except KeyboardInterrupt:
            click.echo("stopping", err=as_json)


def _train_and_compare(
    recipe: Recipe, services: Services, *, err: bool
) -> tuple[list[ResultRow], list[wire.Incident]]:
    """Train each plan, at most two at a time, and read the stored runs and alerts from the server."""

    def progress(job: DemoTask, line: ProgressLine | FinalLine) -> None:
        text = ""
        if isinstance(line, ProgressLine):
            text = f"step {line.step}/{recipe.steps}  loss {line.loss:.4f}  validation {line.validation_loss:.4f}"
        else:
            text = f"done  {line.tokens_per_cpu_second:.0f} tokens per CPU second, {line.reports_sent} reports sent"
        click.echo(f"{job.name:<26}{text}", err=err)

    group = f"demo {time.strftime('%Y-%m-%d %H:%M:%S')}"
    jobs = [DemoTask(plan, recipe, group, services.server_url, services.folder) for plan in PLANS]
    number = f"{len(jobs)} strategies for {recipe.steps} steps, and one run that goes wrong"
    click.echo(f"training {number}, {_TOGETHER} at a time", err=err)
    beside = f"{group}, incident"
    wrong = DemoTask(_GOES_WRONG, recipe, beside, services.server_url, services.folder, loses_residuals=True)
    with WorkerPool(FinalLine, progress, _TOGETHER, err=err) as team:
        *done, faulty = team.run([*jobs, wrong])
    with Client(services.server_url, services.token) as client:
        comparison = client.compare([entry.run_id for entry in done], "edq_ratio")
        incidents = client.incidents(run_id=faulty.run_id).events
    runs = {entry.run_id: entry for entry in comparison.runs}
    rows = [result_row(job.plan, entry, runs[entry.run_id]) for job, entry in zip(jobs, done, strict=True)]
    return rows, incidents


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
