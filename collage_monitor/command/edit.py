"""`edit` and `delete`: change a run by hand.

They use `client.Client`; the server keeps a deletion in its audit log. Verbs and options are fixed,
because scripts call them (`docs/command.md`, `tests/server/test_run_verbs.py`).
"""

from __future__ import annotations

import click

from collage_monitor import wire
from collage_monitor.command.server import find_run, open_client, server_options
from collage_monitor.command.terminal import clock, printable

__all__ = ["delete", "edit"]


@click.command("edit")
@click.argument("run")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Add this tag; may be repeated.")
@click.option("--remove-tag", "removed", multiple=True, metavar="TAG", help="Remove this tag; may be repeated.")
@click.option("--note", metavar="TEXT", help="Write TEXT into the timeline.")
@click.option("--step", type=click.IntRange(min=0), help="With --note: the step that it is about.")
@server_options
def edit(
    server_url: str,
    token: str | None,
    as_json: bool,
    run: str,
    tags: tuple[str, ...],
    removed: tuple[str, ...],
    note: str | None,
    step: int | None,
) -> None:
    """Change the tags of RUN, write a note into its timeline, and print the tags that it then has.

    RUN is an id, the beginning of one, or a name.
    """
    if note is not None and not note.strip():
        raise click.UsageError("the note is empty: write what happened")
    if step is not None and note is None:
        raise click.UsageError("--step says what a note is about: add --note TEXT, or leave it out")
    with open_client(server_url, token) as client:
        found = find_run(client, run)
        absent = [name for name in removed if name not in found.tags]
        if absent:
            has = ", ".join(found.tags) or "none"
            raise click.UsageError(
                printable(f"--remove-tag {absent[0]}: {found.name} has no such tag; it has {has}")
            )
        wanted = [name for name in dict.fromkeys([*found.tags, *tags]) if name not in removed]
        if wanted != found.tags:
            found = client.update_run(found.run_id, wire.RunUpdate(tags=wanted))
        if note is not None:
            client.note(found.run_id, wire.NoteCreate(text=note, step=step))
    if as_json:
        click.echo(wire.encode_json(found).decode())
        return
    click.echo(printable(f"{found.name}: {', '.join(found.tags) or 'no tags'}"))
    if note is not None:
        click.echo(f"noted in the timeline of run {found.run_id}")


@click.command("delete")
@server_options
@click.argument("runs", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(server_url: str, token: str | None, as_json: bool, runs: tuple[str, ...], yes: bool) -> None:
    """Delete RUNS for good, with all their data; asks first.

    A run is an id, the beginning of one, or a name.
    """
    with open_client(server_url, token) as client:
        meant = {found.run_id: found for found in (find_run(client, run) for run in runs)}
        for found in meant.values():
            about = f"project {found.project}, {found.state}, started {clock(found.created_at)}"
            click.echo(printable(f"{found.run_id}  {found.name}, {about}"), err=True)
        if not yes:
            count = "this run" if len(meant) == 1 else f"these {len(meant)} runs"
            click.confirm(f"Delete {count} for good?", abort=True, err=True)
        gone = [client.delete_run(run_id) for run_id in meant]
    if as_json:
        click.echo(wire.encode_json(gone).decode())
    else:
        click.echo("\n".join(f"deleted {entry.run_id}" for entry in gone))
