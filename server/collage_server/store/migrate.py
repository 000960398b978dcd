"""Bringing a database to this server's schema, forward only; a newer schema is refused.

`collage-monitor setup database` and each store at its start call it. A step of `migrations/versions/` that was
released never changes (`tests/server/store/test_migrations.py`).
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from collage_server.errors import StoreUnusable
from collage_server.store.server_tables import metadata

__all__ = ["check_revision", "current_revision", "head_revision", "migrate"]

_SCRIPTS = Path(__file__).parent / "migrations"


def migrate(connection: Connection) -> None:
    """Upgrade the schema behind `connection` to this server's; an empty database gets it at once.

    Raises:
        StoreUnusable: the schema's revision is unknown here.
    """
    current = current_revision(connection)
    if current == head_revision():
        return
    config = _config()
    config.attributes["connection"] = connection
    if current is None:
        metadata.create_all(connection, checkfirst=False)
        command.stamp(config, "head")
        return
    check_revision(current)
    command.upgrade(config, "head")


def check_revision(revision: str, what: str = "the database") -> None:
    """Refuse a schema that this server cannot bring up to date.

    Raises:
        StoreUnusable: a newer server made it, or a checkout of before the first release.
    """
    if revision not in {entry.revision for entry in _scripts().walk_revisions()}:
        raise StoreUnusable(
            f"{what} has schema revision {revision!r}, which this server does not know: a newer server made it, or "
            "a checkout of before the first release; start that version"
        )


def current_revision(connection: Connection) -> str | None:
    """The revision of the schema behind `connection`, None for an empty database."""
    return MigrationContext.configure(connection).get_current_revision()


def head_revision() -> str | None:
    """The newest revision that this server knows."""
    return _scripts().get_current_head()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
