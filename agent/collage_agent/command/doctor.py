"""`doctor`: what the agent sees in this environment, and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from collage_monitor.command.progress import progress

__all__ = ["doctor"]

_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


@click.command("doctor")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Data folder. Default: COLLAGE_DIR, otherwise the user's data folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.pass_context
def doctor(context: click.Context, folder: Path | None, as_json: bool) -> None:
    """Say what the agent sees here: torch, devices, optimizers, server, waiting reports. Status 1 on a problem."""
    environment = {**os.environ, **({} if folder is None else {"COLLAGE_DIR": str(folder)})}
    with progress("look at this machine"):
        from collage_agent.doctor import delivery_checks, machine_checks

        checks = [*machine_checks(environment), *delivery_checks(environment)]
    problems = sum(check.status == "problem" for check in checks)
    if as_json:
        click.echo(msgspec.json.encode({"problems": problems, "checks": checks}).decode())
    else:
        for check in checks:
            click.echo(f"{_MARKS[check.status]}  {check.name}: {check.text}")
            if check.action:
                click.echo(f"         what to do: {check.action}")
        counted = f"{problems} problem{'s' * (problems > 1)}"
        click.echo(f"{counted}: see above" if problems else "ready to train")
    context.exit(int(problems > 0))
