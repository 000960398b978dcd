"""The SQL statements that requests make, without those of the threads that tidy up meanwhile."""

import threading
from contextlib import contextmanager

from sqlalchemy import event

__all__ = ["statements_on"]

_WRITER = "collage-writer"
"""The one thread of the server's own that works for a request."""


@contextmanager
def statements_on(engine):
    """What is asked of `engine` for requests within the block: a list of SQL that grows."""
    asked: list[str] = []

    def note(connection, cursor, statement, *_):
        name = threading.current_thread().name
        if name == _WRITER or not name.startswith("collage-"):
            asked.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(engine, "before_cursor_execute", note)
