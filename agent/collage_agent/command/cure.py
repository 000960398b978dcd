"""`cure`: audit, advice, conversion and the code for a checkpoint, and steps that prove it."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from collage_monitor.command.progress import progress

__all__ = ["cure"]


@click.command("cure")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--to", "strategy", help="Strategy to convert to; default: the advised one.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Path of the new checkpoint; default: beside CHECKPOINT."
)
@click.option("--check", is_flag=True, help="Run PROGRAM from the converted checkpoint, and judge its first steps.")
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=20,
    show_default=True,
    help="With --check: how many steps to run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print findings and actions as JSON.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def cure(
    context: click.Context,
    checkpoint: Path,
    strategy: str | None,
    output: Path | None,
    check: bool,
    steps: int,
    as_json: bool,
    program: tuple[str, ...],
) -> None:
    """Convert CHECKPOINT to a strategy that keeps its updates, and print the code to paste.

    With --check, PROGRAM proves it:

    collage-monitor cure last.pt --check -- python train.py --resume {checkpoint}

    The converted checkpoint stands for {checkpoint}, and is in COLLAGE_CHECKPOINT. PROGRAM is ended after its first
    steps; what it prints goes to standard error.
    Status 0: nothing was lacking, or it is cured; 1: it is not.
    """
    from collage_agent.audit.cure import check_cure, cure_checkpoint, render_cure

    if check != bool(program):
        raise click.UsageError("pass --check and a program together: --check -- python train.py {checkpoint}")
    try:
        with progress("audit and convert the checkpoint"):
            made = cure_checkpoint(checkpoint, strategy, output)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--to") from error
    if check and (made.strategy or made.code):
        made = check_cure(made, program, steps)
    click.echo(msgspec.json.encode(made).decode() if as_json else render_cure(made))
    if not made.cured:
        context.exit(1)
