"""`audit`: how a run keeps its weights and states, as its checkpoint shows."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from collage_monitor.command.progress import progress

__all__ = ["audit"]


@click.command("audit")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--learning-rate", type=float, help="Learning rate to check; default: the checkpoint's own.")
@click.option(
    "--adapter",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A LoRA adapter's folder: say what merging it into CHECKPOINT would lose.",
)
@click.option("--strict", is_flag=True, help="End with status 1 when a problem is found.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def audit(
    context: click.Context,
    checkpoint: Path,
    learning_rate: float | None,
    adapter: Path | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Report what the run behind CHECKPOINT really keeps, what was dropped, and what a learning rate would lose.

    CHECKPOINT is a torch file, a safetensors file, a folder of them, or a distributed checkpoint. Nothing in it is
    executed.
    """
    from collage_agent.audit import audit_checkpoint, render
    from collage_agent.audit.adapter_merge import audit_merge, merge_text
    from collage_agent.audit.checkpoint_audit import check_learning_rate

    if adapter is not None:
        with progress("merge the adapter"):
            merge = audit_merge(checkpoint, adapter)
        click.echo(msgspec.json.encode(merge).decode() if as_json else merge_text(merge))
        if strict and not merge.is_kept:
            context.exit(1)
        return
    try:
        check_learning_rate(learning_rate)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--learning-rate") from error
    with progress("read the checkpoint"):
        result = audit_checkpoint(checkpoint, learning_rate)
    click.echo(msgspec.json.encode(result).decode() if as_json else render(result))
    if strict and any(finding.severity == "problem" for finding in result.findings):
        context.exit(1)
