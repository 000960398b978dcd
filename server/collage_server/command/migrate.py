"""`collage-monitor setup database`: bring a PostgreSQL schema up to date; SQLite's is brought by `serve` itself."""

from __future__ import annotations

import json

import click

from collage_monitor.command.progress import progress
from collage_server.store import PostgresqlStore
from collage_server.store.migrate import head_revision

__all__ = ["migrate"]


@click.command("database")
@click.option(
    "--database",
    envvar="COLLAGE_SERVER_DATABASE",
    required=True,
    help="postgresql://USER@HOST/NAME; also from COLLAGE_SERVER_DATABASE.",
)
@click.option(
    "--lock-timeout", "seconds", default=5.0, show_default=True, help="Seconds to wait for a locked table."
)
@click.option("--json", "as_json", is_flag=True, help="Print the revision as JSON.")
def migrate(database: str, seconds: float, as_json: bool) -> None:
    """Bring the schema behind --database up to date; servers of the previous release go on serving."""
    if not database.startswith("postgresql"):
        raise click.ClickException(
            "only postgresql:// databases are set up here; `serve` migrates SQLite by itself"
        )
    store = PostgresqlStore(database, stale_after_seconds=600.0, unsafe=True, lock_timeout_seconds=seconds)
    with progress("bring the schema up to date"):
        store.migrate()
    revision = head_revision()
    click.echo(json.dumps({"revision": revision}) if as_json else f"schema revision {revision}")
