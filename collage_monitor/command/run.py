"""`run`: start a training program so that its optimizers are watched, without a change of its code.

It only sets variables (`environment.py`) and replaces itself by the program; what happens in the program is
`collage_agent.integrations.attach` (`tests/launching/test_launcher.py`).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import click

from collage_monitor.environment import VARIABLES, launch_variables

__all__ = ["run"]


@click.command("run", context_settings={"ignore_unknown_options": False})
@click.option("--project", help="Project of the run.")
@click.option("--name", help="Name of the run; default: the script's.")
@click.option("--run-id", help="Id of the run: resume it, or begin it under this id.")
@click.option("--group", help="Group of the run.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Tag of the run; may be repeated.")
@click.option("--mode", type=click.Choice(["online", "offline", "disabled"]))
@click.option("--server-url", help="Address of the server; default: a server on this machine.")
@click.option("--dir", type=click.Path(), help="Data folder: token, spool.")
@click.option("--every", type=click.IntRange(min=1), help="Measure steps divisible by this number; default: 10.")
@click.option("--sample", help="Elements to sample from each tensor, or 'all'; default: 4096.")
@click.option("--budget", help="The agent's share of CPU, or 'none'; default: 0.01.")
@click.option(
    "--expect", help="What the training must keep: a strategy, or weights=float32,states=float32,min_edq=0.95."
)
@click.option(
    "--on-breach",
    type=click.Choice(["warn", "raise", "exit"]),
    help="What to do if --expect is not met; default: warn.",
)
@click.option(
    "--print-environment",
    is_flag=True,
    help="Print the environment variables with the same effect, and start nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="With --print-environment: print them as JSON.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def run(
    print_environment: bool,
    as_json: bool,
    program: tuple[str, ...],
    tags: tuple[str, ...],
    **options: str | int | None,
) -> None:
    """Start PROGRAM and watch every torch optimizer in it: collage-monitor run -- python train.py

    Also: collage-monitor run -- torchrun --nproc-per-node 2 train.py. The program's output, exit status and
    signals are its own. A program without torch runs as usual.
    """
    options["tags"] = ",".join(tags) or None
    added = {VARIABLES[name]: str(value) for name, value in options.items() if value is not None}
    added |= launch_variables(os.environ)
    if print_environment:
        lines = (f"export {name}={shlex.quote(value)}" for name, value in added.items())
        click.echo(json.dumps(added) if as_json else "\n".join(lines))
        return
    if not program:
        raise click.UsageError("say what to run: collage-monitor run -- python train.py")
    _become(list(program), {**os.environ, **added})


def _become(program: list[str], environment: dict[str, str]) -> None:
    """Run the program in place of this process, so that signals and exit status need no forwarding."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if os.name == "posix":
            os.execvpe(program[0], program, environment)
        raise SystemExit(subprocess.run(program, env=environment, check=False).returncode)
    except FileNotFoundError:
        raise _NoProgram(f"{program[0]}: no such program; pass one that the shell finds") from None
    except PermissionError:
        hint = f"for a script: collage-monitor run -- python {program[0]}"
        raise _NotExecutable(f"{program[0]}: not executable; {hint}") from None


class _NoProgram(click.ClickException):
    """If there is no such program, ends as a shell does."""

    exit_code = 127


class _NotExecutable(click.ClickException):
    """If the program cannot be executed, ends as a shell does."""

    exit_code = 126
