"""`tag`, `note` and `delete`: change a run by hand.

Each is one request of `client.Client`; the server keeps a deletion in its audit log. Verbs and options are fixed,
because scripts call them (`docs/command.md`, `tests/server/test_run_verbs.py`).
"""

from __future__ import annotations

import click

from collage_monitor import wire
from collage_monitor.command.server import find_run, open_client, server_options
from collage_monitor.command.terminal import clock, printable

__all__ = ["delete", "note", "tag"]


@click.command("tag")
@server_options
@click.argument("run")
@click.argument("tags", nargs=-1)
@click.option("--remove", multiple=True, metavar="TAG", help="Remove this tag; may be repeated.")
def tag(
    server_url: str, token: str | None, as_json: bool, run: str, tags: tuple[str, ...], remove: tuple[str, ...]
) -> None:
    """Add TAGS to RUN or remove some, and print the tags that it then has."""
    with open_client(server_url, token) as client:
        found = find_run(client, run)
        absent = [name for name in remove if name not in found.tags]
        if absent:
            has = ", ".join(found.tags) or "none"
            raise click.UsageError(printable(f"--remove {absent[0]}: {found.name} has no such tag; it has {has}"))
        wanted = [name for name in dict.fromkeys([*found.tags, *tags]) if name not in remove]
        if wanted != found.tags:
            found = client.update_run(found.run_id, wire.RunUpdate(tags=wanted))
    if as_json:
        click.echo(wire.encode_json(found).decode())
    else:
        click.echo(printable(f"{found.name}: {', '.join(found.tags) or 'no tags'}"))


@click.command("note")
@server_options
@click.argument("run")
@click.argument("text")
@click.option("--step", type=click.IntRange(min=0), help="Step that the note is about.")
def note(server_url: str, token: str | None, as_json: bool, run: str, text: str, step: int | None) -> None:
    """Write TEXT into the timeline of RUN."""
    if not text.strip():
        raise click.UsageError("the note is empty: write what happened")
    with open_client(server_url, token) as client:
        run_id = find_run(client, run).run_id
        written = client.note(run_id, wire.NoteCreate(text=text, step=step))
    click.echo(wire.encode_json(written).decode() if as_json else f"noted in the timeline of run {run_id}")


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
