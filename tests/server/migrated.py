"""A SQLite database of this server's schema, made once a process: a copy costs a tenth of the migrations.

Migrations are tested from an empty file in `tests/server/store`.
"""

import tempfile
from functools import cache
from pathlib import Path

from collage_server.store import SqliteStore

__all__ = ["put_migrated"]

_NAME = "collage.sqlite"


def put_migrated(folder):
    """The path of a fresh database in `folder`, under the name that the server gives it."""
    path = Path(folder) / _NAME
    path.write_bytes(_content())
    return path


@cache
def _content():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _NAME
        store = SqliteStore(path, stale_after_seconds=600.0)
        store.open()
        store.close()
        return path.read_bytes()
