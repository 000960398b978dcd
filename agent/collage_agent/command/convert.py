"""`convert`: a checkpoint of one storage strategy, or of torch's optimizer, as one of another."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from collage_monitor.command.progress import progress

__all__ = ["convert"]


@click.command("convert")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--to", "strategy", required=True, help="Strategy to convert to.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Path of the new checkpoint; without it, nothing is written."
)
@click.option("--json", "as_json", is_flag=True, help="Print gains and losses as JSON.")
def convert(checkpoint: Path, strategy: str, output: Path | None, as_json: bool) -> None:
    """Report what CHECKPOINT gains and loses in another strategy, and its size; with --output, write it.

    CHECKPOINT is a torch file, a folder of safetensors and an optimizer, a Hugging Face Trainer's folder, or a
    distributed checkpoint. Nothing in it is executed. The new one has the same layout.
    """
    from collage_agent.audit.conversion import check_output, convert_checkpoint, render_conversion

    if output is not None:
        check_output(output)
    try:
        with progress("read and convert the checkpoint"):
            converted = convert_checkpoint(checkpoint, strategy)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--to") from error
    report = converted.report
    click.echo(msgspec.json.encode(report).decode() if as_json else render_conversion(report))
    if output is not None:
        with progress("write the new checkpoint"):
            converted.write(output)
    if not as_json:
        click.echo(f"written to {output}" if output else "nothing was written: pass --output PATH")
