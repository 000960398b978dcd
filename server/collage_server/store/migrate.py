"""Bringing a database to this server's schema, forward only; a newer schema is refused."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from collage_server.errors import StoreUnusable

__all__ = ["head_revision", "migrate"]

_SCRIPTS = Path(__file__).parent / "migrations"


def migrate(connection: Connection, revision: str = "head") -> None:
    """Upgrade the schema behind `connection` to this server's, or to an earlier revision (tests).

    Raises:
        StoreUnusable: the schema's revision is unknown here, so a newer server made it.
    """
    scripts = _scripts()
    current = MigrationContext.configure(connection).get_current_revision()
    if current == scripts.get_current_head():
        return
    if current is not None and current not in {entry.revision for entry in scripts.walk_revisions()}:
        raise StoreUnusable(
            f"the database has schema revision {current!r}, which this server does not know: a newer "
            "server made it; start that version or a later one"
        )
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


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
