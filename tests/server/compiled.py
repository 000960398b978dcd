"""What SQLAlchemy compiles for one engine serves the engines of all tests: each test opens its own."""

from __future__ import annotations

from typing import Any

from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

__all__ = ["share_compiled_statements"]

_STATEMENTS = 2000


def share_compiled_statements():
    """One cache for all engines of this process; a dialect is the key that another one of its kind and version is.

    Compiling anew took a third of a test of a server.
    """
    cache: LRUCache[Any, Any] = LRUCache(_STATEMENTS)
    made = Engine.__init__

    def with_shared_cache(engine, *arguments, **more):
        made(engine, *arguments, **more)
        engine._compiled_cache = cache

    Engine.__init__ = with_shared_cache  # type: ignore[assignment, method-assign]
    DefaultDialect.__hash__ = lambda dialect: hash(type(dialect))  # type: ignore[assignment, method-assign]
    DefaultDialect.__eq__ = lambda one, other: _kind(one) == _kind(other)  # type: ignore[method-assign]


def _kind(dialect):
    return type(dialect), getattr(dialect, "server_version_info", None)
