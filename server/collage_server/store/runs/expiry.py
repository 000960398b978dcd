"""Deletes old records of what happened: ended incidents with their deliveries, events, silences, the audit log.

`background.py` calls this in each round of maintenance, with ages from the settings. What stays: open incidents and
what their runs told since, ended ones that are still owed a message, notes, and each run's newest event. Points of
runs are deleted by `store/sealing/retention.py`, and so are runs that somebody deleted.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, Table, exists, func, select

from collage_server.store import schema, server_tables
from collage_server.store.engine.database import Database
from collage_server.store.rows import delete_slice

__all__ = ["Expiry"]

_INCIDENT: Final = server_tables.incident
_EVENT: Final = schema.event
_SILENCE: Final = server_tables.silence
_SLICE_ROWS: Final = 500


class Expiry:
    """Deletes what is too old, in short transactions that may be cut off anywhere without harm."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def expire(self, before: float, owed_before: float) -> int:
        """Remove a slice of what ended before a moment (Unix seconds); how many rows went, 0 when nothing is left.

        What is open stays, with all that its run told since it began, and what ended and is owed a message until
        `owed_before`. Of a run stay the notes, which people wrote, and the newest event: they are numbered from it.
        """
        return next(filter(None, (self._remove(table, *old) for table, old in self._old(before, owed_before))), 0)

    def expire_audit_log(self, before: float) -> int:
        """Remove a slice of the audit log from before a moment (Unix seconds); how many entries went."""
        return self._remove(server_tables.act, server_tables.act.c.time < before)

    def _remove(self, table: Table, *old: ColumnElement[bool]) -> int:
        with self._database.freeing() as connection:
            return delete_slice(connection, table, *old, rows=_SLICE_ROWS)

    @staticmethod
    def _old(before: float, owed_before: float) -> list[tuple[Table, tuple[Any, ...]]]:
        done = _INCIDENT.c.settled | (_INCIDENT.c.resolved_at < owed_before)
        # The index is by when it began.
        ended = (_INCIDENT.c.started_at < before, _INCIDENT.c.resolved_at < before, done)
        firing = exists().where(
            _INCIDENT.c.run_id == _EVENT.c.run_id,
            _INCIDENT.c.open_key.is_not(None),
            _INCIDENT.c.started_at <= _EVENT.c.time,
        )
        later = _EVENT.alias()
        newest = select(func.max(later.c.event)).where(later.c.run_id == _EVENT.c.run_id).scalar_subquery()
        told = (
            _EVENT.c.time < before,
            _EVENT.c.kind != "note",
            _EVENT.c.event < newest,
            ~firing,
        )
        return [(_INCIDENT, ended), (_EVENT, told), (_SILENCE, (_SILENCE.c.ends_at < before,))]
