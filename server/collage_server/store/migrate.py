"""Bringing a database to this server's schema, forward only; a newer schema is refused."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from collage_server.errors import StoreUnusable

__all__ = ["current_revision", "head_revision", "known_revisions", "migrate"]

_SCRIPTS = Path(__file__).parent / "migrations"


def migrate(connection: Connection, revision: str = "head") -> None:
    """Upgrade the schema behind `connection` to this server's, or to an earlier revision (tests).

    Raises:
        StoreUnusable: the schema's revision is unknown here, so a newer server made it.
    """
    current = current_revision(connection)
    if current == head_revision():
        return
    if current is not None and current not in known_revisions():
        raise StoreUnusable(
            f"the database has schema revision {current!r}, which this server does not know: a newer "
            "server made it; start that version or a later one"
        )
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def current_revision(connection: Connection) -> str | None:
    """The revision of the schema behind `connection`, None for an empty database."""
    return MigrationContext.configure(connection).get_current_revision()


def known_revisions() -> set[str]:
    """Every revision that this server knows."""
    return {entry.revision for entry in _scripts().walk_revisions()}


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
