"""Incidents: alerts from when they fire until they end, each stored once whoever noticed; silences; leases.

`alerts/` fires and ends them, `api/incidents.py` shows and acknowledges them (`tests/server/store/incidents.py`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, delete, insert, select, tuple_, update

from collage_monitor import wire
from collage_server.errors import NotFound, Unprocessable
from collage_server.memory_budget import held_rows
from collage_server.store import schema, server_tables
from collage_server.store.engine.database import Database
from collage_server.store.records import CLOCK_SLACK_SECONDS, IncidentQuery, NewEvent, NewIncident
from collage_server.store.row_checks import require_row, update_rows, whole_of
from collage_server.store.row_helpers import from_json, insert_into, to_json
from collage_server.store.runs.events import add_events

__all__ = ["IncidentStore", "alert_key", "incident_id_of"]

_LOG: Final = logging.getLogger(__name__)
_INCIDENT: Final = server_tables.incident
_SILENCED: Final = "CollageSilenced"
"""The incident of a silence, open while it holds: of the server, so that no training takes it for its own."""
_SILENCE_ID: Final = "silence_id"
_TELLING: Final = frozenset({"run_id", "alert", "key", "state", "worst", "window", "outcome"})
_MOST_UNSETTLED: Final = 1000
_MOST_SILENCES: Final = 500
"""That hold at a time: each incident that is listed is held against all of them."""
_ROWS_AT_ONCE: Final = 100
_INCIDENT_BYTES: Final = 4096
"""What an incident takes as a row, as an object and in an answer, beside its text and its labels."""
_COPIES: Final = 4


def alert_key(alert: str, labels: Mapping[str, str]) -> str:
    """The labels that identify an alert's series: without names that may change, and without a scraper's labels.

    A run has one finding that is the alert, whatever its key is at the time.
    """
    telling = _TELLING - {"alert", "key"} if labels.get("alert") == alert else _TELLING
    text = repr((alert, sorted((name, value) for name, value in labels.items() if name in telling))).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def incident_id_of(new: NewIncident) -> str:
    """The id that an incident gets; ids sort by time."""
    return f"{int(1000 * new.started_at):013d}-{alert_key(new.alert, new.labels)[:16]}"


class IncidentStore:
    """Fires, resolves and reads incidents; every method is one transaction, from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def is_open(self, alert: str, labels: Mapping[str, str], source: wire.IncidentSource) -> bool:
        """Whether an incident that this source opened is open for these labels."""
        mine = and_(_INCIDENT.c.open_key == alert_key(alert, labels), _INCIDENT.c.source == source)
        with self._database.reading() as connection:
            return connection.execute(select(_INCIDENT.c.incident_id).where(mine)).first() is not None

    def fire(self, new: NewIncident, now: float, *, told: bool = False) -> bool:
        """Open an incident. Adds an event to the run's timeline unless it was `told` there already.

        False where the same fires already, or the run is not there any more.
        """
        key, incident_id = alert_key(new.alert, new.labels), incident_id_of(new)
        row = {
            "incident_id": incident_id,
            "open_key": key,
            "run_id": new.run_id,
            "project": new.project,
            "alert": new.alert,
            "severity": new.severity,
            "source": new.source,
            "labels": to_json(dict(new.labels)),
            "text": new.text,
            "value": new.value,
            "step": new.step,
            "started_at": new.started_at,
            "sent": "[]",
            "settled": False,
        }
        with self._database.writing() as connection:
            if new.run_id and not _is_there(connection, new.run_id):
                return False
            statement = insert_into(connection, _INCIDENT).values(row).on_conflict_do_nothing()
            if connection.execute(statement.returning(_INCIDENT.c.incident_id)).first() is None:
                return False
            text = f"{new.alert} firing ({new.severity}): {new.text}"
            if not told:
                self._tell(connection, new.run_id, incident_id, "alert", text, new.step, now)
        return True

    def resolve(self, alert: str, labels: Mapping[str, str], source: wire.IncidentSource, now: float) -> bool:
        """End the incident that this source opened for these labels; False where there is none."""
        with self._database.writing() as connection:
            mine = and_(_INCIDENT.c.open_key == alert_key(alert, labels), _INCIDENT.c.source == source)
            row = connection.execute(select(_INCIDENT).where(mine).with_for_update()).first()
            if row is None:
                return False
            changed = {"open_key": None, "resolved_at": now, "settled": False}
            update_rows(connection, _INCIDENT, changed, mine)
            if row.source == "server":
                text = f"{alert} resolved ({row.severity})"
                self._tell(connection, row.run_id, row.incident_id, "alert_resolved", text, None, now)
        return True

    @staticmethod
    def _tell(
        connection: Connection,
        run_id: str,
        incident_id: str,
        kind: wire.EventKind,
        text: str,
        step: int | None,
        now: float,
    ) -> None:
        if run_id and _is_there(connection, run_id):
            event = NewEvent(origin=f"incident/{incident_id}/{kind}", kind=kind, text=text[:1000], step=step)
            add_events(connection, run_id, [event], now)

    def read(self, query: IncidentQuery, now: float) -> list[wire.Incident]:
        """Incidents that match, newest first."""
        statement = select(_INCIDENT).where(*_filters(query))
        order = (_INCIDENT.c.started_at.desc(), _INCIDENT.c.incident_id.desc())
        with self._database.reading() as connection:
            silences = _silences(connection, now)
            return _incidents(connection, statement.order_by(*order).limit(query.limit), silences)

    def get(self, incident_id: str, now: float, projects: Collection[str] | None = None) -> wire.Incident:
        """An incident by its id.

        Raises:
            NotFound: there is no such incident in these projects (None: in any).
        """
        with self._database.reading() as connection:
            row = connection.execute(select(_INCIDENT).where(_INCIDENT.c.incident_id == incident_id)).first()
            if row is None or (projects is not None and row.project not in projects):
                raise _unknown(incident_id)
            require_row(_INCIDENT, row)
            return _incident(row, _silences(connection, now))

    def acknowledge(
        self, incident_id: str, by: str | None, now: float, projects: Collection[str] | None = None
    ) -> wire.Incident:
        """Note that somebody takes care of it; the first one stays. None takes that back.

        Raises:
            NotFound: there is no such incident in these projects (None: in any).
        """
        mine = _INCIDENT.c.incident_id == incident_id
        with self._database.writing() as connection:
            row = connection.execute(select(_INCIDENT).where(mine).with_for_update()).first()
            if row is None or (projects is not None and row.project not in projects):
                raise _unknown(incident_id)
            if by is None or row.acknowledged_at is None:
                taken = {"acknowledged_at": None if by is None else now, "acknowledged_by": by}
                update_rows(connection, _INCIDENT, taken, mine)
                row = connection.execute(select(_INCIDENT).where(mine)).one()
            return _incident(row, _silences(connection, now))

    def silence(self, silence: wire.Silence) -> None:
        """Keep matching incidents from being sent until it ends. It is an incident itself: targets are told.

        Raises:
            Unprocessable: as many as may hold at a time hold already.
        """
        until = datetime.fromtimestamp(silence.ends_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        named = (("alert", silence.alert), ("project", silence.project), ("run", silence.run_id))
        covered = ", ".join(f"{kind} {name}" for kind, name in named if name is not None)
        with self._database.writing() as connection:
            if len(_silences(connection, silence.made_at)) >= _MOST_SILENCES:
                raise Unprocessable(
                    f"{_MOST_SILENCES} silences hold already, the most at a time; wait until some end, or make one "
                    "that covers more",
                    limit=_MOST_SILENCES,
                )
            connection.execute(insert(server_tables.silence).values(msgspec.structs.asdict(silence)))
        told = NewIncident(
            alert=_SILENCED,
            severity="info",
            source="server",
            labels={_SILENCE_ID: silence.silence_id},
            text=f"No messages until {until} about {covered}. By {silence.made_by}: {silence.comment or '-'}",
            started_at=silence.made_at,
            project=silence.project or "",
        )
        self.fire(told, silence.made_at)

    def end_silences(self, now: float) -> None:
        """End the incidents of silences that hold no more."""
        holding = {silence.silence_id for silence in self.silences(now)}
        told = (_INCIDENT.c.alert == _SILENCED, _INCIDENT.c.open_key.is_not(None))
        with self._database.reading() as connection:
            open_ones, _ = whole_of(connection, select(_INCIDENT).where(*told), _INCIDENT)
        for labels in (from_json(row.labels) for row in open_ones):
            if labels.get(_SILENCE_ID) not in holding:
                self.resolve(_SILENCED, labels, "server", now)

    def silences(self, now: float) -> list[wire.Silence]:
        """Those that have not ended, newest first; none that a clock which was ahead has made in the future."""
        with self._database.reading() as connection:
            return _silences(connection, now)

    def unsettled(self, now: float) -> Iterator[tuple[wire.Incident, list[str]]]:
        """Incidents of which a message may be owed, oldest first, and which TARGET/STATE were delivered.

        They are read some at a time, each time in a transaction of its own.
        """
        place = (_INCIDENT.c.started_at, _INCIDENT.c.incident_id)
        statement = select(_INCIDENT).where(_INCIDENT.c.settled.is_(False)).order_by(*place).limit(_ROWS_AT_ONCE)
        after = (-math.inf, "")
        for _ in range(0, _MOST_UNSETTLED, _ROWS_AT_ONCE):
            with self._database.reading() as connection:
                silences = _silences(connection, now)
                rows, damaged = whole_of(connection, statement.where(tuple_(*place) > after), _INCIDENT)
            for row in rows:
                yield _incident(row, silences), from_json(row.sent)
            if not rows or len(rows) + len(damaged) < _ROWS_AT_ONCE:
                return
            after = (rows[-1].started_at, rows[-1].incident_id)

    def open_of_server(self) -> Iterator[tuple[str, dict[str, str], float, float | None]]:
        """Alert, labels, begin and value of this server's own incidents that have not ended."""
        mine = (_INCIDENT.c.open_key.is_not(None), _INCIDENT.c.source == "server", _INCIDENT.c.alert != _SILENCED)
        with self._database.reading() as connection:
            for row in whole_of(connection, select(_INCIDENT).where(*mine), _INCIDENT)[0]:
                yield row.alert, from_json(row.labels), row.started_at, row.value

    def mark_sent(self, incident: wire.Incident, sent: Sequence[str], *, settled: bool) -> None:
        """Record deliveries; `settled` only if the state is still the delivered one."""
        table = _INCIDENT
        ended = table.c.resolved_at.is_(None) if incident.resolved_at is None else table.c.resolved_at.is_not(None)
        mine = table.c.incident_id == incident.incident_id
        with self._database.writing() as connection:
            update_rows(connection, table, {"sent": to_json(list(sent))}, mine)
            update_rows(connection, table, {"settled": settled}, mine, ended)

    def take_lease(self, name: str, holder: str, now: float, seconds: float) -> bool:
        """Take the work called `name` for this holder, if nobody has it or its time is over.

        On PostgreSQL the time is the database's, the same for all servers; on SQLite it is `now`. A lease that ends
        further away than it was taken for is void: whoever took it had a clock that was ahead.
        """
        table = server_tables.lease
        with self._database.writing() as connection:
            now = self._database.time(connection, now)
            mine = {"holder": holder, "ends_at": now + seconds, "seconds": seconds}
            row = insert_into(connection, table).values(name=name, **mine)
            if connection.execute(row.on_conflict_do_nothing().returning(table.c.name)).first() is not None:
                return True
            known = connection.execute(select(table).where(table.c.name == name).with_for_update()).first()
            void = known is not None and known.ends_at > now + known.seconds + CLOCK_SLACK_SECONDS
            if known is not None and known.holder != holder and known.ends_at >= now and not void:
                return False
            if void:
                _LOG.warning("the lease %r of another server ends too late: its clock was ahead; taken over", name)
            return connection.execute(update(table).where(table.c.name == name).values(mine)).rowcount > 0

    def lease_taken_at(self, name: str) -> float | None:
        """When whoever holds the work called `name` last took it, by the clock of leases; None: nobody has."""
        table = server_tables.lease
        with self._database.reading() as connection:
            row = connection.execute(select(table).where(table.c.name == name)).first()
        return None if row is None else float(row.ends_at - row.seconds)

    def give_up_lease(self, name: str, holder: str) -> None:
        """Let another server take the work at once."""
        table = server_tables.lease
        with self._database.writing() as connection:
            connection.execute(delete(table).where(table.c.name == name, table.c.holder == holder))


def _unknown(incident_id: str) -> NotFound:
    return NotFound(f"no incident {incident_id!r}; GET /api/v1/events lists them", field="incident_id")


def _is_there(connection: Connection, run_id: str) -> bool:
    """Whether the run is there; it then stays until the transaction ends."""
    known = select(schema.run.c.run_id).where(schema.run.c.run_id == run_id).with_for_update()
    return connection.execute(known).first() is not None


def _filters(query: IncidentQuery) -> list[ColumnElement[bool]]:
    asked = ("project", "run_id", "alert", "severity")
    columns = [(_INCIDENT.c[name], getattr(query, name)) for name in asked]
    filters: list[ColumnElement[bool]] = [column == value for column, value in columns if value is not None]
    if query.projects is not None:
        filters.append(_INCIDENT.c.project.in_(sorted(query.projects)))
    if query.state is not None:
        ended = _INCIDENT.c.resolved_at.is_not(None)
        filters.append(ended if query.state == "resolved" else ~ended)
    if query.cursor is not None:
        started_at, _, incident_id = query.cursor.partition("~")
        try:
            place = (float.fromhex(started_at), incident_id)
        except (ValueError, OverflowError) as error:
            raise Unprocessable(
                f"cursor {query.cursor!r} is not one of this server's; start again without it", field="cursor"
            ) from error
        filters.append(tuple_(_INCIDENT.c.started_at, _INCIDENT.c.incident_id) < place)
    return filters


def _silences(connection: Connection, now: float) -> list[wire.Silence]:
    table = server_tables.silence
    holds = (table.c.ends_at > now, table.c.made_at <= now + CLOCK_SLACK_SECONDS)
    rows, _ = whole_of(connection, select(table).where(*holds).order_by(table.c.made_at.desc()), table)
    return [wire.Silence(**{name: getattr(row, name) for name in wire.Silence.__struct_fields__}) for row in rows]


def _incidents(
    connection: Connection, statement: Select[Any], silences: Sequence[wire.Silence]
) -> list[wire.Incident]:
    found, _ = whole_of(connection, statement, _INCIDENT)
    rows = held_rows((row, _INCIDENT_BYTES + _COPIES * (len(row.text) + len(row.labels))) for row in found)
    return [_incident(row, silences) for row in rows]


def _incident(row: Row[Any], silences: Sequence[wire.Silence]) -> wire.Incident:
    stored = {name: getattr(row, name) for name in _STORED}
    return wire.Incident(
        **stored,
        run_id=row.run_id or None,
        project=row.project or None,
        value=None if row.value is None else wire.to_number(row.value),
        labels=from_json(row.labels),
        state="firing" if row.resolved_at is None else "resolved",
        silenced=any(_covers(silence, row) for silence in silences),
    )


def _covers(silence: wire.Silence, row: Row[Any]) -> bool:
    if row.alert == _SILENCED:
        return False
    asked = ((silence.alert, row.alert), (silence.project, row.project), (silence.run_id, row.run_id))
    return all(wanted is None or wanted == own for wanted, own in asked)


_STORED: Final = (
    "incident_id",
    "alert",
    "severity",
    "source",
    "text",
    "step",
    "started_at",
    "resolved_at",
    "acknowledged_at",
    "acknowledged_by",
)
