"""`list`, `show` and `compare`: judgements of runs and their numbers, in the terminal.

A judgement and the numbers beside it cover the same steps, which are named. `list` and `compare` quote the server's
stored judgements, which may be some seconds old; `show` judges one run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command.server import find_run, open_client, server_options
from collage_monitor.command.terminal import clock, number, printable, table
from collage_monitor.metrics import METRICS, split_key

__all__ = ["compare", "list_runs", "show"]

_DECAY: Final = "state_decrement_ratio/exp_avg_sq"
_NUMBERS: Final = {"EDQ": "edq_ratio", "lost": "lost_update_ratio", "decay": _DECAY}
_BASIS: Final = (
    "Health, EDQ, lost and decay cover the steps under `judged over`, the most recent ones at that time."
)
_LABEL: Final = 24
"""Characters that a table shows of a name."""
_WORST: Final = 3
_LOSSES: Final = ("validation_loss", "loss")


@click.command("list")
@server_options
@click.option("--project", help="Only runs of this project.")
@click.option("--strategy", help="Only runs of this strategy.")
@click.option("--tag", help="Only runs with this tag.")
@click.option("--health", help="Only runs with this health, such as 'losing updates' or healthy.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 500))
def list_runs(
    server_url: str,
    token: str | None,
    as_json: bool,
    project: str | None,
    strategy: str | None,
    tag: str | None,
    health: str | None,
    limit: int,
) -> None:
    """List runs, newest first, with the judgement of each."""
    # `check --fail-if` writes the same words with hyphens.
    word = health and health.replace("-", " ")
    filters: dict[str, Any] = {"project": project, "strategy": strategy, "tag": tag, "health": word}
    with open_client(server_url, token) as client:
        page = client.run_table(sort="created_at", limit=limit, **filters)
    if as_json:
        click.echo(wire.encode_json(page).decode())
        return
    for run in page.damaged:
        click.echo(f"left out: {printable(run.message)}", err=True)
    if page.rows or page.damaged:
        names = (
            "run_id",
            "name",
            "project",
            "strategy",
            "health",
            "state",
            "last step",
            "judged over",
            *_NUMBERS,
            "started",
        )
        click.echo(table(names, [_row(row) for row in page.rows]))
        click.echo(_BASIS)
        if (more := page.total - len(page.rows) - len(page.damaged)) > 0:
            click.echo(f"{more} more; --limit shows more of them")
    elif any(filters.values()):
        asked = ", ".join(f"{name} {value}" for name, value in filters.items() if value)
        click.echo(f"no run has {printable(asked)}")
    else:
        click.echo("no runs yet; `collage-monitor demo` trains some, or call collage_agent.init() in your training")


def _row(row: wire.RunRow) -> tuple[Any, ...]:
    strategy = row.shown_strategy or "-"
    labels = (row.run_id, row.name[:_LABEL], row.project[:_LABEL], strategy, _health(row), row.state)
    return (*labels, row.last_step, _judged_over(row), *_numbers(row), clock(row.created_at))


def _judged_over(row: wire.RunRow) -> str:
    said = row.overview
    return "-" if said is None or said.last_step is None else f"{said.first_step} to {said.last_step}"


def _health(row: wire.RunRow) -> str:
    return row.overview.health if row.overview is not None else "not judged yet"


def _numbers(row: wire.RunRow) -> Iterator[float | None]:
    for key in _NUMBERS.values():
        value = row.overview.numbers.get(key) if row.overview is not None else None
        yield None if value is None else float(f"{wire.from_number(value):.4g}")


@click.command("show")
@server_options
@click.argument("run")
def show(server_url: str, token: str | None, as_json: bool, run: str) -> None:
    """Say what is wrong with RUN, if anything, then show its numbers and its worst layers.

    RUN is an id, the beginning of one, or a name.
    """
    with open_client(server_url, token) as client:
        found = find_run(client, run)
        run_id = found.run_id
        latest, judged = client.latest(run_id), client.overview(run_id, fresh=True)
    if as_json:
        told = {"name": found.name, "project": found.project, "state": found.state}
        answers = {
            **told,
            **msgspec.structs.asdict(judged),
            "since": judged.since,
            "advice": judged.advised,
            **msgspec.structs.asdict(latest),
        }
        click.echo(wire.encode_json(answers).decode())
        return
    click.echo(printable(f"{found.name}: {judged.health}"))
    for text in (judged.headline if judged.against else "", judged.text, judged.advised):
        if text:
            click.echo(f"  {printable(text)}")
    label = found.watch.shown_strategy if found.watch else None
    about = [f"run {run_id}", f"project {found.project}", *([f"strategy {label}"] if label else []), found.state]
    click.echo(printable(", ".join([*about, f"started {clock(found.created_at)}"])))
    _print_numbers(judged, latest)


def _print_numbers(judged: wire.Overview, latest: wire.Latest) -> None:
    one = judged.first_step == judged.last_step
    steps = f"at step {judged.last_step}" if one else f"over the steps {judged.first_step} to {judged.last_step}"
    shown = [(key, value) for key, value in judged.numbers.items() if split_key(key)[0] in METRICS]
    if shown:
        click.echo(f"{steps.capitalize()}{'' if one else ' that were judged'}:")
    for key, value in shown:
        click.echo(f"  {key:<44}{_shown(value):>14}  {METRICS[split_key(key)[0]].unit}")
    if latest.scalars:
        click.echo("Logged last:")
    for name, logged in latest.scalars.items():
        click.echo(f"  {printable(name):<44}{_shown(logged.value):>14}  at step {logged.step}")
    if judged.worst:
        click.echo(f"Layers that lose the most {steps}, with their EDQ:")
    for layer in judged.worst[:_WORST]:
        click.echo(f"  {printable(layer.layer):<44}{_shown(layer.edq_ratio):>14}")


def _shown(value: wire.Number | None) -> str:
    return number(None if value is None else wire.from_number(value))


@click.command("compare")
@server_options
@click.argument("runs", nargs=-1, required=True)
def compare(server_url: str, token: str | None, as_json: bool, runs: tuple[str, ...]) -> None:
    """Compare RUNS: health, losses, and the settings in which they differ.

    A run is an id, the beginning of one, or a name.
    """
    if len(runs) < 2:
        raise click.UsageError("name two runs or more; `collage-monitor show RUN` is for one")
    with open_client(server_url, token) as client:
        page = _compared(client, [find_run(client, run).run_id for run in runs])
    if as_json:
        click.echo(wire.encode_json(page).decode())
        return
    losses = [name for name in _LOSSES if any(name in row.scalars for row in page.rows)]
    settings = list(dict.fromkeys(key for row in page.rows for key in row.config))
    names = (
        "name",
        "strategy",
        "dtype",
        "health",
        "judged over",
        *_NUMBERS,
        *(f"last {name}" for name in losses),
        *settings,
    )
    rows = [
        (
            row.name[:_LABEL],
            row.shown_strategy or "-",
            row.dtype or "-",
            _health(row),
            _judged_over(row),
            *_numbers(row),
            *(_last(row, name) for name in losses),
            *(_setting(row, key) for key in settings),
        )
        for row in page.rows
    ]
    click.echo(table(names, rows))
    click.echo(_BASIS)
    if settings:
        click.echo(printable(f"The configurations differ in {', '.join(settings)}."))


def _compared(client: Client, run_ids: list[str]) -> wire.RunTable:
    """Rows in the order in which the runs were named."""
    page = client.run_table(run_ids=run_ids, limit=len(run_ids), differing=True)
    return msgspec.structs.replace(page, rows=sorted(page.rows, key=lambda row: run_ids.index(row.run_id)))


def _setting(row: wire.RunRow, key: str) -> Any:
    value = row.config.get(key, "-")
    return value if isinstance(value, int | float) else str(value)[:_LABEL]


def _last(row: wire.RunRow, name: str) -> float | None:
    logged = row.scalars.get(name)
    return wire.from_number(logged.value) if logged is not None else None
