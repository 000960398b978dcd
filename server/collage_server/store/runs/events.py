"""Events of runs: each stored once, numbered in the order of commits, so that a cursor skips nothing.

An event's text and `origin` are stored for good: the same origin is one event, so an origin's form is fixed; words
of new events are free. `api/streams.py` reads them by a cursor (`tests/server/store/events.py`,
`tests/server/test_events.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from sqlalchemy import ColumnElement, Connection, func, select

from collage_monitor import wire
from collage_server.errors import Damaged, Unprocessable
from collage_server.memory_budget import held_rows
from collage_server.store import schema
from collage_server.store.engine.database import Database
from collage_server.store.records import NewEvent
from collage_server.store.row_checks import update_rows, whole_rows
from collage_server.store.row_helpers import from_json, insert_into, require_run, to_json

__all__ = [
    "COUNTS_WITH_EVENTS",
    "EventStore",
    "MOST_LAYERS",
    "add_events",
    "attempt_event",
    "continuation_event",
    "conversion_event",
    "correct_event",
    "count_event",
    "count_events",
    "expectation_event",
    "kept_otherwise",
    "kept_otherwise_event",
    "rank_twice",
    "resume_loss_event",
    "second_writer_event",
    "unknown_statistics_event",
]

MOST_LAYERS: Final = 8
"""Layers that one event names."""
_MOST_NAMES: Final = 8
"""Statistics that one event names."""
_ROWS_AT_ONCE: Final = 200
_EVENT_BYTES: Final = 2048
"""What an event takes as a row, as an object and in an answer, beside its text."""
_TEXT_COPIES: Final = 12
"""Bytes of a character, at most: four in the text, four where it is encoded, four in the answer."""

_EVENT: Final = schema.event
_EVENT_OF_COUNT: Final[dict[str, tuple[wire.EventKind, str]]] = {
    "reports_dropped": ("reports_dropped", "rank {rank} has dropped {count} report{s} since it began"),
    "skipped_steps": ("skipped_steps", "the loss scaler of rank {rank} has skipped {count} step{s} since attach"),
}
_TRIES: Final = 100
"""For a number, which other servers may take meanwhile; in a damaged index the next one can be taken for ever."""
COUNTS_WITH_EVENTS: Final = frozenset(_EVENT_OF_COUNT)
"""Logged counts whose growth makes events."""


class EventStore:
    """Adds and reads events of runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, run_id: str, events: Sequence[NewEvent], now: float) -> int:
        """Add to what happened to a run; how many of these were new."""
        with self._database.writing() as connection:
            require_run(connection, run_id, lock=True)
            return add_events(connection, run_id, events, now)

    def add_one(self, run_id: str, event: NewEvent, now: float) -> wire.Event:
        """Add an event that is new, and return it as it is stored.

        Raises:
            Unprocessable: the run has as many events as it may.
        """
        mine = (_EVENT.c.run_id == run_id, _EVENT.c.origin == event.origin)
        with self._database.writing() as connection:
            require_run(connection, run_id, lock=True)
            if not add_events(connection, run_id, [event], now):
                limit = wire.LIMITS["events_per_run"]
                raise Unprocessable(
                    f"run {run_id!r} has {limit} events already, the most that are kept", limit=limit
                )
            number = connection.execute(select(_EVENT.c.event).where(*mine)).scalar_one()
            return read_events(connection, run_id, number - 1, 1)[0]

    def read(
        self, run_id: str, after: int, limit: int, *, newest: bool = False, until: float | None = None
    ) -> wire.EventPage:
        """What happened to a run, oldest first: of the events numbered above `after` the oldest, or the newest.

        `until`: only those up to the last one that is not later than this time.
        """
        with self._database.reading() as connection:
            last = None if until is None else _last_until(connection, run_id, until)
            found = read_events(connection, run_id, after, limit, newest=newest, last=last)
            count = _count(connection, run_id, after, last) if len(found) == limit else len(found)
        cursor = found[-1].event if found else after
        return wire.EventPage(run_id=run_id, events=found, cursor=cursor, left_out=count - len(found))


def add_events(connection: Connection, run_id: str, events: Sequence[NewEvent], now: float) -> int:
    """Add events in the caller's transaction; how many were new. At most `events_per_run`, the others are not kept.

    Two transactions that take the same number wait for each other, and the later one takes the next: numbers become
    visible in their order. Whoever writes events of several runs does so in the order of run_id.
    """
    return sum(_add(connection, run_id, event, now) for event in events)


def _add(connection: Connection, run_id: str, event: NewEvent, now: float) -> bool:
    mine = _EVENT.c.run_id == run_id
    known = select(_EVENT.c.event).where(mine, _EVENT.c.origin == event.origin)
    for _ in range(_TRIES):
        if connection.execute(known).first() is not None:
            return False
        number = (connection.execute(select(func.max(_EVENT.c.event)).where(mine)).scalar() or 0) + 1
        if number > wire.LIMITS["events_per_run"]:
            return False
        row = insert_into(connection, _EVENT).values(
            run_id=run_id,
            event=number,
            origin=event.origin,
            time=now,
            kind=event.kind,
            text=event.text,
            attempt=event.attempt,
            step=event.step,
            layers=to_json(list(event.layers[:MOST_LAYERS])),
        )
        if connection.execute(row.on_conflict_do_nothing().returning(_EVENT.c.event)).first() is not None:
            return True
    raise Damaged(
        f"the events of run {run_id!r} take no new one, {number} is taken but not the last: an index of the table "
        "`event` is damaged in the database, which collage-monitor archive verify makes again"
    )


def correct_event(connection: Connection, run_id: str, event: NewEvent) -> None:
    """Correct the step and text of a stored event."""
    mine = (_EVENT.c.run_id == run_id, _EVENT.c.origin == event.origin)
    update_rows(connection, _EVENT, {"step": event.step, "text": event.text}, *mine)


def read_events(
    connection: Connection, run_id: str, after: int, limit: int, *, newest: bool = False, last: int | None = None
) -> list[wire.Event]:
    """Events numbered above `after`, up to `last`, oldest first: the oldest of them, or the newest."""
    require_run(connection, run_id)
    order = _EVENT.c.event.desc() if newest else _EVENT.c.event
    statement = select(_EVENT).where(*_between(run_id, after, last)).order_by(order).limit(limit)
    found = connection.execute(statement.execution_options(yield_per=_ROWS_AT_ONCE))
    held = ((row, _EVENT_BYTES + _TEXT_COPIES * len(row.text)) for row in whole_rows(_EVENT, found))
    rows = list(held_rows(held))
    names = [name for name in wire.Event.__struct_fields__ if name != "layers"]
    return [
        wire.Event(layers=from_json(row.layers), **{name: getattr(row, name) for name in names})
        for row in (reversed(rows) if newest else rows)
    ]


def _between(run_id: str, after: int, last: int | None) -> list[ColumnElement[bool]]:
    found = [_EVENT.c.run_id == run_id, _EVENT.c.event > after]
    return found if last is None else [*found, _EVENT.c.event <= last]


def _count(connection: Connection, run_id: str, after: int, last: int | None) -> int:
    statement = select(func.count()).select_from(_EVENT).where(*_between(run_id, after, last))
    return connection.execute(statement).scalar_one()


def count_events(connection: Connection, run_id: str) -> tuple[int, int]:
    """How many events a run has, and the number of the newest."""
    statement = select(func.count(), func.coalesce(func.max(_EVENT.c.event), 0)).where(_EVENT.c.run_id == run_id)
    count, last = connection.execute(statement).one()
    return count, last


def _last_until(connection: Connection, run_id: str, until: float) -> int:
    mine = (_EVENT.c.run_id == run_id, _EVENT.c.time <= until)
    return connection.execute(select(func.max(_EVENT.c.event)).where(*mine)).scalar() or 0


def attempt_event(attempt: int, first_step: int, measured_from: int | None) -> NewEvent:
    """A launch; a later one hides what older ones reported from the step on from which it measures."""
    text = f"attempt {attempt} began at step {first_step}"
    if attempt > 1 and measured_from is not None:
        if measured_from != first_step:
            text += f" and measures from step {measured_from} on"
        text += ": older attempts' points from there on are hidden"
    return NewEvent(origin=f"attempt/{attempt}", kind="attempt", text=text, attempt=attempt, step=first_step)


def second_writer_event(role: str, attempt: int, first_step: int) -> NewEvent:
    """A process beside the training begins to log; one event per role, however often it is launched."""
    text = f"{role} logs beside the training, first at step {first_step}; its names begin with {role}/"
    return NewEvent(origin=f"second_writer/{role}", kind="attempt", text=text, attempt=attempt, step=first_step)


def conversion_event(attempt: int, conversion: wire.Conversion) -> NewEvent:
    """Weights that were given residuals, told once a run, whichever launches come after it."""
    origin = f"conversion/{conversion.step}/{conversion.target}"[:64]
    return NewEvent(origin=origin, kind="conversion", text=str(conversion), attempt=attempt, step=conversion.step)


def expectation_event(attempt: int, breach: wire.Breach) -> NewEvent:
    """An expectation that does not hold, one event per launch, as the first rank saw it."""
    origin = f"expectation/{attempt}/{breach.expectation}"[:64]
    return NewEvent(origin=origin, kind="expectation", text=breach.text, attempt=attempt, step=breach.step)


def resume_loss_event(attempt: int, loss: wire.ResumeLoss) -> NewEvent:
    """The losses of a resume, one event per launch, as the first rank saw them."""
    origin = f"resume_loss/{attempt}/{loss.kind}/{loss.step}"[:64]
    return NewEvent(origin=origin, kind="resume_loss", text=loss.text, attempt=attempt, step=loss.step)


def continuation_event(attempt: int, continuation: wire.Continuation) -> NewEvent:
    """Whether a launch began with the saved state, one event per launch, as the first rank saw it."""
    origin, step = f"continuation/{attempt}", continuation.step
    return NewEvent(origin=origin, kind="continuation", text=str(continuation), attempt=attempt, step=step)


def kept_otherwise(before: wire.WatchInfo, now: wire.WatchInfo) -> list[str]:
    """In words, what two launches of a run keep otherwise; nothing where either has no states yet."""
    earlier, later = before.fingerprint, now.fingerprint
    if earlier is None or later is None or not earlier.states or not later.states:
        return []
    pairs = {
        "optimizer": (before.optimizer, now.optimizer),
        "weights": (" and ".join(sorted(earlier.parameters)), " and ".join(sorted(later.parameters))),
        "strategy": (before.observed_strategy, now.observed_strategy),
        **{
            key: (earlier.states.get(key, "none"), later.states.get(key, "none"))
            for key in sorted(earlier.states.keys() | later.states.keys())
        },
    }
    return [f"{name} {old} → {new}" for name, (old, new) in pairs.items() if old != new]


def kept_otherwise_event(attempt: int, earlier: int, changes: Sequence[str]) -> NewEvent:
    """A launch that keeps weights or states differently from the one before, reported once."""
    text = f"attempt {attempt} keeps otherwise than attempt {earlier}: {'; '.join(changes)}"
    return NewEvent(origin=f"kept_otherwise/{attempt}", kind="kept_otherwise", text=text, attempt=attempt)


def rank_twice(stream_id: str, attempt: int, rank: int, process_id: int) -> NewEvent:
    """A second process on one rank of one launch."""
    return NewEvent(
        origin=f"rank_twice/{stream_id}",
        kind="rank_twice",
        text=f"process {process_id} also reports as rank {rank} of attempt {attempt}; the first one counts",
        attempt=attempt,
    )


def unknown_statistics_event(names: Sequence[str], attempt: int) -> NewEvent:
    """Statistics that the server lacks were declared; once a run for the same ones."""
    some = ", ".join(name[:80] for name in names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
    return NewEvent(
        origin=f"unknown_statistics/{blake2b(repr(names).encode(), digest_size=8).hexdigest()}",
        kind="unknown_statistics",
        text=f"{len(names)} statistic{'s' if len(names) > 1 else ''} unknown to this server left out: {some}",
        attempt=attempt,
    )


def count_event(
    name: str, old: float, new: float, *, stream_id: str, attempt: int, rank: int, step: int
) -> NewEvent | None:
    """A rank's count that has reached another power of two; None while it has not, or where it is no count."""
    if not 0 <= old < new <= 2**53 or (size := int(new).bit_length()) == int(old).bit_length():
        return None
    kind, text = _EVENT_OF_COUNT[name]
    return NewEvent(
        origin=f"{name}/{stream_id}/{size}",
        kind=kind,
        text=text.format(rank=rank, count=int(new), s="" if int(new) == 1 else "s"),
        attempt=attempt,
        step=step,
    )
