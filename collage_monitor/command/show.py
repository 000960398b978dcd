"""`list`, `show` and `compare`: which runs are sick, where, since when, and what to use, in 25 lines.

`list` and `compare` quote the server's stored judgements, which may be seconds old; `show` judges one run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import click
import msgspec

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command.server import find_run, open_client, server_options
from collage_monitor.command.terminal import clock, coloured, cut, printable, table
from collage_monitor.diagnosis import NO_PROBLEM
from collage_monitor.metrics import METRICS, preferred_state, split_key
from collage_monitor.number_text import UNDEFINED, value_text
from collage_monitor.recommendation import recommendation
from collage_monitor.strategies import strategy_title
from collage_monitor.strategy_results import loss_name, results_by_strategy, run_results

__all__ = ["compare", "list_runs", "show"]

_MARKS: Final = {"healthy": "✓", "unknown": "?"}
_NUMBERS: Final = {"lost": "lost_update_ratio", "EDQ": "edq_ratio"}
_LOSSES: Final = ("validation_loss", "loss")
_ROWS: Final = 20
"""Runs that a table shows unless more are asked for: with what stands around them 25 lines."""
_CURVE_POINTS: Final = 200


@click.command("list")
@server_options
@click.option("--project", help="Only runs of this project.")
@click.option("--strategy", help="Only runs of this strategy.")
@click.option("--tag", help="Only runs with this tag.")
@click.option("--health", help="Only runs with this health, such as 'losing updates' or healthy.")
@click.option("--limit", default=_ROWS, show_default=True, type=click.IntRange(1, 500))
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
    """List runs, those with a problem first: what is wrong, in which layer, since when."""
    # `check --fail-if` writes the same words with hyphens.
    word = health and health.replace("-", " ")
    filters: dict[str, Any] = {"project": project, "strategy": strategy, "tag": tag, "health": word}
    with open_client(server_url, token) as client:
        page = client.run_table(sort="health", descending=True, limit=limit, **filters)
    if as_json:
        click.echo(wire.encode_json(page).decode())
        return
    for run in page.damaged:
        click.echo(f"left out: {printable(run.message)}", err=True)
    if page.rows or page.damaged:
        sick = sum(count for word, count in page.healths.items() if word and word not in NO_PROBLEM)
        click.echo(f"{sick} of {page.total} {'run is' if page.total == 1 else 'runs are'} sick.")
        _echo_table(
            ("name", "strategy", "verdict", "worst layer", "since", *_NUMBERS, "step", "run"), page.rows, _row
        )
        if (more := page.total - len(page.rows) - len(page.damaged)) > 0:
            click.echo(f"{more} more; --limit shows more of them")
        if page.worst is not None:
            click.echo(
                printable(f"`collage-monitor show {page.worst.run_id}` says what to try in {page.worst.name}.")
            )
    elif any(filters.values()):
        asked = ", ".join(f"{name} {value}" for name, value in filters.items() if value)
        click.echo(f"no run has {printable(asked)}")
    else:
        click.echo("no runs yet; `collage-monitor demo` trains some, or call collage_agent.init() in your training")


def _row(row: wire.RunRow) -> tuple[Any, ...]:
    said = row.overview or wire.Overview(run_id=row.run_id, short="not judged yet")
    decided = said.deciding
    since = decided.since_words.removeprefix(", ").removeprefix("since ") if decided and said.against else ""
    worst = said.worst[0].layer if said.worst and said.against else ""
    return (*_named(row), said.short, cut(worst), since, *_numbers(said), row.last_step or UNDEFINED, row.run_id)


def _named(row: wire.RunRow) -> tuple[str, str]:
    return cut(row.name), strategy_title(row.shown_strategy, row.dtype)


def _numbers(said: wire.Overview) -> Iterator[str]:
    """The newest values, else those of the recent past."""
    for key in _NUMBERS.values():
        yield value_text(key, said.now.get(key) if said.now.get(key) is not None else said.numbers.get(key))


def _echo_table(names: Sequence[str], rows: Sequence[wire.RunRow], cells: Any) -> None:
    """A row a run, each behind the sign of its health."""
    head, *lines = table(names, [cells(row) for row in rows]).splitlines()
    click.echo(f"  {head}")
    for row, line in zip(rows, lines, strict=True):
        health = row.overview.health if row.overview else "unknown"
        click.echo(f"{coloured(_MARKS.get(health, '!'), health)} {line}")


@click.command("show")
@server_options
@click.argument("run")
@click.option("--all", "shows_all", is_flag=True, help="The whole judgement, and all numbers under their keys.")
def show(server_url: str, token: str | None, as_json: bool, run: str, shows_all: bool) -> None:
    """Say what is wrong with RUN, where and since when, and what to try.

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
    click.echo(f"{printable(found.name)}: {coloured(judged.health, judged.health)}")
    further = judged.text if shows_all or not judged.against else ""
    for text in (judged.headline if judged.against else "", further, judged.advised):
        if text:
            click.echo(f"  {printable(text)}")
    kept = strategy_title(found.watch.shown_strategy, found.watch.dtype) if found.watch else "not watched"
    about = [f"run {run_id}", f"project {found.project}", kept, found.state, f"started {clock(found.created_at)}"]
    click.echo(printable(", ".join(about)))
    if shows_all:
        _print_all(judged, latest)
    else:
        _print_numbers(judged, latest)


def _print_numbers(judged: wire.Overview, latest: wire.Latest) -> None:
    """The four numbers that the page has, and the worst layers."""
    keys = (*_NUMBERS.values(), preferred_state(judged.numbers) or "")
    rows = [
        (_title(key), value_text(key, judged.numbers[key]), value_text(key, judged.now.get(key)))
        for key in keys
        if key in judged.numbers
    ]
    if rows:
        first, last = judged.first_step, judged.last_step
        click.echo(table(("", f"step {last}" if first == last else f"steps {first} to {last}", "now"), rows))
    for name in _LOSSES:
        if (logged := latest.scalars.get(name)) is not None:
            click.echo(f"{name.replace('_', ' ')} {value_text(name, logged.value)} at step {logged.step}")
    if judged.worst:
        layers = [
            (one.layer, f"{100 * one.share:.1f} %", *map(value_text, _NUMBERS.values(), _of(one)))
            for one in judged.worst
        ]
        click.echo(table(("worst layers", "share of the loss", *_NUMBERS), layers))


def _title(key: str) -> str:
    name, label = split_key(key)
    return f"{METRICS[name].title}{f', {label}' if label else ''}"


def _of(layer: wire.LayerLoss) -> tuple[wire.Number | None, wire.Number | None]:
    return layer.lost_update_ratio, layer.edq_ratio


def _print_all(judged: wire.Overview, latest: wire.Latest) -> None:
    for key, value in judged.numbers.items():
        if split_key(key)[0] in METRICS:
            click.echo(f"  {key:<44}{value_text(key, value):>14}  {METRICS[split_key(key)[0]].unit}")
    for name, logged in latest.scalars.items():
        click.echo(f"  {printable(name):<44}{value_text(name, logged.value):>14}  at step {logged.step}")


@click.command("compare")
@server_options
@click.argument("runs", nargs=-1, required=True)
def compare(server_url: str, token: str | None, as_json: bool, runs: tuple[str, ...]) -> None:
    """Compare RUNS: which strategy to use, then verdicts, losses, and the settings in which they differ.

    A run is an id, the beginning of one, or a name.
    """
    if len(runs) < 2:
        raise click.UsageError("name two runs or more; `collage-monitor show RUN` is for one")
    with open_client(server_url, token) as client:
        page = _compared(client, [find_run(client, run).run_id for run in runs])
        ids, loss = [row.run_id for row in page.rows], loss_name(page.rows)
        curves = [] if as_json else client.compare(ids, loss, points=_CURVE_POINTS).runs
    if as_json:
        click.echo(wire.encode_json(page).decode())
        return
    said = recommendation(results_by_strategy(run_results(page.rows, curves)))
    click.echo(printable(said.brief or said.text))
    settings = list(dict.fromkeys(key for row in page.rows for key in row.config))

    def cells(row: wire.RunRow) -> tuple[Any, ...]:
        judged = row.overview or wire.Overview(run_id=row.run_id, short="not judged yet")
        logged = [
            row.scalars[name].value if name in row.scalars else None for name in ("bytes_per_parameter", loss)
        ]
        size, last = map(value_text, ("bytes_per_parameter", loss), logged)
        return (
            *_named(row),
            judged.short,
            size,
            last,
            *_numbers(judged),
            *(_setting(row, key) for key in settings),
        )

    _echo_table(("name", "strategy", "verdict", "bytes", loss, *_NUMBERS, *settings), page.rows[:_ROWS], cells)
    if len(page.rows) > _ROWS:
        click.echo(f"{len(page.rows) - _ROWS} more; --json has all of them")
    if said.brief and said.text != said.brief:
        click.echo(printable(said.text))


def _compared(client: Client, run_ids: list[str]) -> wire.RunTable:
    """Rows in the order in which the runs were named."""
    page = client.run_table(run_ids=run_ids, limit=len(run_ids), differing=True)
    return msgspec.structs.replace(page, rows=sorted(page.rows, key=lambda row: run_ids.index(row.run_id)))


def _setting(row: wire.RunRow, key: str) -> Any:
    value = row.config.get(key, UNDEFINED)
    return value if isinstance(value, int | float) else cut(str(value))
