"""`check`: end with status 0 or 1 by the judgement of a run, or of a program's first steps, for continuous
integration.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from collage_monitor.command import require, root
from collage_monitor.command.conditions import Condition, Facts, Outcome, fail_if, schedule_option, write_junit
from collage_monitor.command.offline import runs_left_in, served_from_disk
from collage_monitor.command.server import find_run, open_client, server_options
from collage_monitor.command.terminal import printable
from collage_monitor.environment import CHECK_REPORT, CHECK_STEPS, VARIABLES, launch_variables
from collage_monitor.forecast import ForecastError
from collage_monitor.local import data_folder
from collage_monitor.run_history import read_forecast
from collage_monitor.schedule import RateSchedule

__all__ = ["check"]

_MOST_RUNS: Final = 8
_STOP_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 0.05
_MEASURED_STEPS: Final = 64
_PROGRAM: Final = "collage_monitor.check.program"
_OF_RUN: Final = frozenset({"folder", "offline", "server_url", "token"})
_OF_PROGRAM: Final = frozenset({"every", "html", "name", "steps", "timeout"})
"""Options that count for one of the two things that `check` judges."""


class _Check(click.Command):
    """Divides its words at the first `--`: RUN stands before it, PROGRAM behind it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[_PROGRAM], args = tuple(args[place + 1 :]), args[:place]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] RUN | [OPTIONS] -- PROGRAM..."]


@click.command("check", cls=_Check)
@click.argument("run", required=False)
@fail_if
@schedule_option
@click.option(
    "--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write a JUnit XML file to this path."
)
@click.option("--offline", is_flag=True, help="Ask no server: read the reports that the run has left on disk.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Data folder that --offline reads. Default: COLLAGE_DIR, otherwise the user's data folder.",
)
@server_options
@click.option(
    "--steps",
    type=click.IntRange(min=8),
    default=200,
    show_default=True,
    help="End PROGRAM after this many steps.",
)
@click.option("--name", help="Name of PROGRAM's run; default: the script's.")
@click.option(
    "--every",
    type=click.IntRange(min=1),
    help="Measure steps of PROGRAM divisible by this number.  [default: depends on --steps]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="Seconds after which PROGRAM is ended.",
)
@click.option(
    "--report",
    "html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write an HTML report on PROGRAM's run to this path.",
)
@click.pass_context
def check(
    context: click.Context,
    /,
    run: str | None,
    conditions: list[Condition],
    schedule: RateSchedule | None,
    junit: Path | None,
    offline: bool,
    folder: Path | None,
    server_url: str,
    token: str | None,
    as_json: bool,
    **trial: Any,
) -> None:
    """Judge RUN, or train PROGRAM for some steps; status 1 if a condition of --fail-if is met, else 0.

    RUN is an id, the beginning of one, or a name; with --offline, an id. A condition on an unknown number counts as
    met.

    collage-monitor check --steps 200 --schedule cosine:3e-4:100:10000 -- python train.py

    PROGRAM runs as under `run`, and is ended after its steps as by sys.exit(0). It reports to no server; what it
    prints goes to standard error. The status is also 1 if PROGRAM fails or takes no optimizer step.
    """
    began = time.monotonic()
    program: tuple[str, ...] | None = context.meta.get(_PROGRAM)
    _check_options(context, conditions, schedule)
    if program is not None:
        told, outcomes = _judged_program(program, conditions, schedule, **trial)
    else:
        assert run is not None, "`_check_options` refuses a call with neither"
        left = data_folder(folder) if offline else None
        told = [_judged_run(run, left, server_url, token, schedule)]
        outcomes = [condition.held_against(told[0][0]) for condition in conditions]
    _tell(told, outcomes, junit, began, as_json=as_json)
    context.exit(int(any(own.status != "passed" for own in outcomes)))


def _judged_run(
    run: str, left: Path | None, server_url: str, token: str | None, schedule: RateSchedule | None
) -> tuple[Facts, str]:
    """What the server says of the run, or what the reports say that it left in the folder `left`."""
    if left is not None:
        with served_from_disk("check --offline", left, (run,), 1) as (services, (run_id,)):
            return _facts(services.server_url, services.token, run_id, schedule)
    with open_client(server_url, token) as client:
        run_id = find_run(client, run).run_id
    return _facts(server_url, token, run_id, schedule)


def _judged_program(
    program: Sequence[str],
    conditions: Sequence[Condition],
    schedule: RateSchedule | None,
    *,
    steps: int,
    name: str | None,
    every: int | None,
    timeout: float,
    html: Path | None,
) -> tuple[list[tuple[Facts, str]], list[Outcome]]:
    """Run the program for some steps, and judge each run that it made."""
    require("check -- PROGRAM", "agent", "server")
    with tempfile.TemporaryDirectory(prefix="collage-check-") as temporary:
        folder = Path(temporary)
        options = {"name": name, "every": every or max(1, steps // _MEASURED_STEPS)}
        status = _train(program, folder, steps, timeout, options)
        told: list[tuple[Facts, str]] = []
        if runs_left_in(folder):
            with served_from_disk("check", folder, (), _MOST_RUNS) as (services, run_ids):
                told = [_facts(services.server_url, services.token, run_id, schedule) for run_id in run_ids]
                if html is not None and any(facts.judged.numbers for facts, _ in told):
                    _write_report(services.server_url, services.token, run_ids, html, schedule)
    outcomes = [_of_program(program, status, steps, timeout, [facts for facts, _ in told])]
    return told, outcomes + [condition.held_against(facts) for facts, _ in told for condition in conditions]


def _check_options(context: click.Context, conditions: Sequence[Condition], schedule: RateSchedule | None) -> None:
    """Refuse options that contradict each other, or that count only for the other thing that is judged."""
    run, program = context.params["run"], context.meta.get(_PROGRAM)
    if (run is None) != (program is not None) or program == ():
        raise click.UsageError("give one RUN, or a program behind --: collage-monitor check -- python train.py")
    kind, other = ("a RUN", _OF_PROGRAM) if program is None else ("a PROGRAM", _OF_RUN)
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if option.name in other and given:
            raise click.UsageError(f"{option.opts[0]} says nothing about {kind}: leave it out")
    unfounded = [condition.text for condition in conditions if condition.needs_forecast]
    if unfounded and schedule is None:
        raise click.UsageError(f"--fail-if {unfounded[0]} needs --schedule, such as cosine:3e-4:100:10000")
    if context.params["folder"] is not None and not context.params["offline"]:
        raise click.UsageError("--dir says where the run left its reports: add --offline, or leave it out")


def _facts(server_url: str, token: str | None, run_id: str, schedule: RateSchedule | None) -> tuple[Facts, str]:
    """The facts about a run, and the reason if a requested forecast is impossible."""
    with open_client(server_url, token) as client:
        run = client.run(run_id)
        judged = client.overview(run_id, fresh=True)
        forecast, unforeseen = None, ""
        if schedule is not None and judged.numbers:
            try:
                forecast = read_forecast(client, run_id, schedule)
            except ForecastError as error:
                unforeseen = f"no forecast: {error}"
    return Facts(run, judged, forecast), unforeseen


def _train(program: Sequence[str], folder: Path, steps: int, timeout: float, options: dict[str, Any]) -> int | None:
    """Run the program until its steps are taken, it ends by itself, or time is up: its exit status, None for the
    last.

    The agent ends it from within, after the step, as by sys.exit(0): each rank at the same step, its own handlers
    called. Whatever is alive after `timeout` seconds is asked to end by SIGTERM, and later by SIGKILL.
    """
    settings = {"mode": "offline", "dir": str(folder), "budget": "none", **options}
    added = {VARIABLES[key]: str(value) for key, value in settings.items() if value is not None}
    added |= {CHECK_STEPS: str(steps), CHECK_REPORT: str(folder / "steps.json")}
    environment = {**os.environ, **launch_variables(os.environ), **added}
    try:
        # Its output goes to stderr, since readers of JSON read stdout. A process group ends a shell's children.
        process = subprocess.Popen(program, env=environment, stdout=2, start_new_session=True)
    except OSError as error:
        raise click.ClickException(
            f"{program[0]}: {error.strerror}; pass a program that the shell finds"
        ) from error
    with _ended_with_us(process):
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Nothing of the program's group is left behind when the context ends."""
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # The group outlives its leader as long as it has a process: killpg still finds it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
                until = time.monotonic() + _STOP_SECONDS
                while time.monotonic() < until:
                    process.poll()
                    os.killpg(process.pid, 0)
                    time.sleep(_LOOK_SECONDS)


def _of_program(
    program: Sequence[str], status: int | None, steps: int, timeout: float, found: Sequence[Facts]
) -> Outcome:
    """Whether the program trained: it ended well, and took a step."""
    last = max((facts.judged.last_step or 0 for facts in found), default=0)
    name = " ".join(program)
    took = f"its last measured step is {last}" if last else "no step of a torch optimizer was measured"
    if status is None:
        return Outcome(name, "program", "error", f"it ran for {timeout:.0f} seconds without {steps} steps; {took}")
    if status != 0:
        return Outcome(name, "program", "error", f"it ended with status {status}; {took}")
    return Outcome(name, "program", "passed" if last else "error", f"it ended well; {took}")


def _write_report(
    server_url: str, token: str, run_ids: Sequence[str], output: Path, schedule: RateSchedule | None
) -> None:
    """By the dashboard's verb, which the command finds by its name."""
    arguments = [*run_ids, "--output", str(output), "--server-url", server_url, "--token", token]
    arguments += ["--schedule", schedule.text] if schedule is not None else []
    with click.Context(root) as context:
        verb = root.get_command(context, "report")
    assert verb is not None, "the dashboard's package is installed"
    with redirect_stdout(sys.stderr):
        verb.main(arguments, standalone_mode=False, parent=click.get_current_context())


def _tell(
    told: Sequence[tuple[Facts, str]],
    outcomes: Sequence[Outcome],
    junit: Path | None,
    began: float,
    *,
    as_json: bool,
) -> None:
    lines = []
    for facts, unforeseen in told:
        lines += [f"{facts.run.name}: {facts.judged.headline}", f"  {facts.judged.text}"]
        lines += [f"  {facts.judged.advised}"] if facts.judged.advised else []
        lines += [f"  {line}" for line in (str(facts.forecast).splitlines() if facts.forecast else [])]
        lines += [f"  {unforeseen}"] if unforeseen else []
    if junit is not None:
        write_junit(junit, outcomes, "\n".join(lines), time.monotonic() - began)
    if as_json:
        runs = [
            {
                "name": facts.run.name,
                "health": facts.judged.health,
                "verdict": facts.judged.text,
                "forecast": asdict(facts.forecast) if facts.forecast is not None else None,
            }
            for facts, _ in told
        ]
        click.echo(json.dumps({"runs": runs, "outcomes": [asdict(own) for own in outcomes]}))
        return
    lines += [f"{own.status:<7}{own.condition}: {own.text}" for own in outcomes]
    click.echo("\n".join(map(printable, lines)))
