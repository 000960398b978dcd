"""The table of runs: pages of it, filtered and in order, of runs or of groups that open; saved views of it.

`api/run_table.py` asks it. Everything is one statement a page, on rows that are kept; nothing is evaluated here
(`tests/server/test_table.py`).
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from typing import Any, Final, get_args

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    String,
    case,
    cast,
    delete,
    exists,
    func,
    literal,
    literal_column,
    select,
)

from collage_monitor import wire
from collage_monitor.diagnosis import GRAVITY, NO_PROBLEM, gravity
from collage_monitor.seeds import mean_over_seeds
from collage_server.errors import Unprocessable
from collage_server.store import schema, server_tables
from collage_server.store.engine.database import Database
from collage_server.store.records import GroupQuery, RunRecord, TableQuery
from collage_server.store.row_checks import whole_of, whole_runs
from collage_server.store.row_crc import checks_of
from collage_server.store.row_helpers import insert_into, later
from collage_server.store.runs.configurations import entry_columns
from collage_server.store.runs.run_store import matching, read_records
from collage_server.store.runs.run_summary import DECODE_OVERVIEW

__all__ = ["GroupPage", "TablePage", "TableStore"]

_RUN: Final = schema.run
_SUMMARY: Final = schema.run_summary
_LISTED: Final = 20
"""Runs and names of a group that its row lists: as many as one comparison shows."""
_OF_GROUP: Final = ("created_at", "group", "health", "last_step", *schema.OVERVIEW_NUMBERS)
"""What is read of each run of a group: little, for a group may have thousands."""
_NOT_AGAINST: Final = NO_PROBLEM | {None}
_WORDS: Final = frozenset(column.key for column in wire.RUN_COLUMNS if column.kind == "word")
_NEWEST: Final = frozenset(column.key for column in wire.RUN_COLUMNS if column.kind in {"time", "count"})
_SEPARATOR: Final = "\x1f"
_NONE: Final = "\x1e"
"""ASCII's own separators: a group's key holds them, and no name that people write does."""
_NARROW: Final = f"INDEXED BY {schema.run_summary_narrow.name}"
"""SQLite would look up the unique key and then read each run's wide row: over thousands of runs twice the CPU."""

_TableRow = tuple[RunRecord, wire.Overview | None]


@dataclass(frozen=True)
class TablePage:
    """A page of the table: records with their overviews, how many runs there are, all and the live ones by health.

    `revision` changes whenever a row may read otherwise.
    """

    rows: list[_TableRow]
    total: int
    live: dict[str, int]
    revision: str
    healths: dict[str, int]
    worst: wire.WorstRun | None
    damaged: list[wire.DamagedRun]


@dataclass(frozen=True)
class GroupPage:
    """A page of groups and of the runs of open ones, which follow their group; `total` counts both."""

    rows: list[wire.RunGroup | _TableRow]
    total: int
    damaged: list[wire.DamagedRun]


_VIEW: Final = server_tables.saved_view
_MOST_VIEWS: Final = 200
"""Saved views of a project."""


class TableStore:
    """The table of runs, made from their overviews, and its saved views."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, query: TableQuery, now: float, stale_after_seconds: float) -> TablePage:
        """A page of the table of runs."""
        table = _Table(query, now, stale_after_seconds)
        with self._database.reading() as connection:
            live, healths, revision = table.counted(connection)
            worst = table.worst(connection) if not set(healths) <= {"", *NO_PROBLEM} else None
            rows, damaged = table.rows(connection, query.offset, query.limit) if query.limit else ([], [])
        return TablePage(rows, sum(healths.values()), live, revision, healths, worst, damaged)

    def groups(self, query: GroupQuery, now: float, stale_after_seconds: float) -> GroupPage:
        """A page of the table of runs in groups: each by the common values of its runs, the open ones with their
        runs."""
        table = _Table(query, now, stale_after_seconds)
        key = _key(query.by)
        with self._database.reading() as connection:
            counts = [(row.key, row.runs) for row in connection.execute(table.grouped(key))]
            opened = set(query.opened)
            total = len(counts) + sum(runs for found, runs in counts if found in opened)
            shown: list[tuple[str, int, int]] = []
            """Of each group within the page: its key, and which of its runs; -1 is the group itself."""
            place, end = 0, query.offset + query.limit
            for found, runs in counts:
                first = place
                place += 1 + (runs if found in opened else 0)
                if place > query.offset and first < end:
                    shown.append((found, max(query.offset - first, 0) - 1, min(end - first, place - first) - 1))
            wanted = [found for found, first, _ in shown if first < 0]
            groups = table.groups(connection, key, None if len(wanted) == len(counts) else wanted) if wanted else {}
            page = GroupPage([], total, [])
            for found, first, last in shown:
                if first < 0:
                    page.rows.append(groups[found])
                if last > max(first, 0):
                    rows, damaged = table.rows(connection, max(first, 0), last - max(first, 0), key == found)
                    page.rows.extend(rows)
                    page.damaged.extend(damaged)
            return page

    def filters(self, projects: Collection[str] | None) -> wire.RunFilters:
        """The values that runs can be filtered by, with how many runs have each."""
        mine = [] if projects is None else [_RUN.c.project.in_(sorted(projects))]

        def counted(column: ColumnElement[Any]) -> dict[str, int]:
            statement = select(column.label("value"), func.count().label("runs")).select_from(_RUN)
            if column.table is not _RUN:
                statement = statement.join(column.table, column.table.c.run_id == _RUN.c.run_id)
            statement = statement.where(*mine, column.is_not(None)).group_by(column).order_by(column)
            return {row.value: row.runs for row in connection.execute(statement)}

        with self._database.reading() as connection:
            return wire.RunFilters(
                **{name: counted(_RUN.c[name]) for name in ("project", "strategy", "group")},
                tag=counted(schema.run_tag.c.tag),
                health=counted(_SUMMARY.c.health),
            )

    def views(self, projects: Collection[str] | None) -> list[wire.SavedView]:
        """The saved views of these projects (None: of all), by project and name."""
        chosen = select(_VIEW).order_by(_VIEW.c.project, _VIEW.c.name)
        if projects is not None:
            chosen = chosen.where(_VIEW.c.project.in_(sorted(projects)))
        with self._database.reading() as connection:
            rows, _ = whole_of(connection, chosen, _VIEW)
            return [msgspec.convert(row, wire.SavedView, from_attributes=True) for row in rows]

    def save_view(self, view: wire.SavedView) -> None:
        """Save a view in place of the one of its name.

        Raises:
            Unprocessable: its project has as many as it may have.
        """
        with self._database.writing() as connection:
            own = _VIEW.c.project == view.project
            others = connection.execute(
                select(func.count()).select_from(_VIEW).where(own, _VIEW.c.name != view.name)
            ).scalar_one()
            if others >= _MOST_VIEWS:
                raise Unprocessable(
                    f"project {view.project!r} has {_MOST_VIEWS} saved views, the most; delete one of them first",
                    limit=_MOST_VIEWS,
                )
            stated = msgspec.structs.asdict(view)
            stated["checks"] = checks_of(_VIEW, stated)
            statement = insert_into(connection, _VIEW).values(stated)
            connection.execute(statement.on_conflict_do_update(index_elements=["project", "name"], set_=stated))

    def delete_view(self, project: str, name: str) -> None:
        """Delete a view; nothing where there is none of this name."""
        with self._database.freeing() as connection:
            connection.execute(delete(_VIEW).where(_VIEW.c.project == project, _VIEW.c.name == name))


class _Table:
    """The runs that a query leaves, and their order."""

    def __init__(self, query: TableQuery, now: float, stale_after_seconds: float) -> None:
        self._query = query
        sign = later(_RUN.c.updated_at, _SUMMARY.c.updated_at)
        self._state: ColumnElement[str] = case(
            (_RUN.c.state != "running", _RUN.c.state),
            (sign >= now - stale_after_seconds, literal("running")),
            else_=literal("stale"),
        )
        self._columns: dict[str, ColumnElement[Any]] = {
            **{name: (_RUN if name in _RUN.c else _SUMMARY).c[name] for name in get_args(wire.RunSort)},
            "state": self._state,
            "updated_at": sign,
        }
        equal = ((_SUMMARY.c.health, query.health), (self._state, query.state))
        conditions = [*matching(query), *(column == value for column, value in equal if value is not None)]
        conditions += [column_condition(text, self._columns, now) for text in query.where]
        if query.run_ids is not None:
            conditions.append(_RUN.c.run_id.in_(query.run_ids))
        self._base = select(_RUN.c.run_id).outerjoin(_SUMMARY, _SUMMARY.c.run_id == _RUN.c.run_id)
        self._base = self._base.where(*conditions).with_hint(_SUMMARY, _NARROW, "sqlite")

    def counted(self, connection: Connection) -> tuple[dict[str, int], dict[str, int], str]:
        """The live runs by health, all runs by health, and their revision.

        The revision is the newest change or report of any run, and the milliseconds at which overviews were made,
        added up: any that is made again, of whichever run, changes the sum.
        """
        health = func.coalesce(_SUMMARY.c.health, "").label("health")
        live = (self._state == "running").label("live")
        changed = func.max(later(self._columns["updated_at"], _RUN.c.changed_at)).label("changed_at")
        made = func.sum(cast(1000 * _SUMMARY.c.made_at, BigInteger)).label("made")
        counts = self._base.with_only_columns(live, health, func.count().label("runs"), changed, made)
        counts = counts.group_by(live, health)
        rows = connection.execute(counts).all()
        newest = max((row.changed_at for row in rows), default=0.0)
        revision = f"{newest} {sum(row.made or 0 for row in rows)}"
        healths: Counter[str] = Counter()
        for row in rows:
            healths[row.health] += row.runs
        return {row.health: row.runs for row in rows if row.live}, dict(healths), revision

    def worst(self, connection: Connection) -> wire.WorstRun | None:
        """The run with the gravest word against it, and of those the one with the lowest EDQ."""
        health, edq = _SUMMARY.c.health, _SUMMARY.c.edq_ratio
        grave = _grave(health).desc()
        chosen = self._base.where(health.in_(GRAVITY)).order_by(grave, edq.is_(None), edq, _RUN.c.run_id).limit(1)
        run_id = connection.execute(chosen).scalar()
        if run_id is None:
            return None
        name = connection.execute(select(_RUN.c.name).where(_RUN.c.run_id == run_id)).scalar_one()
        said = _overviews(connection, [run_id]).get(run_id)
        return wire.WorstRun(run_id=run_id, name=name, short=said.short) if said else None

    def rows(
        self, connection: Connection, offset: int, limit: int, *conditions: ColumnElement[bool]
    ) -> tuple[list[_TableRow], list[wire.DamagedRun]]:
        """Some of the runs, in order, and those of them that cannot be read."""
        column = self._sorted
        # Unknown values are last in either direction; among equals the newest is first.
        order = (column.is_(None), self._directed(column), _RUN.c.created_at.desc(), _RUN.c.run_id.desc())
        ordered = self._base.where(*conditions).order_by(*order).offset(offset).limit(limit)
        ids = list(connection.execute(ordered).scalars())
        records, damaged = whole_runs(partial(read_records, connection), ids) if ids else ({}, [])
        found = _overviews(connection, ids)
        return [(record, found.get(run_id)) for run_id, record in records.items()], damaged

    def grouped(self, key: ColumnElement[str]) -> Select[Any]:
        """Keys and sizes of all groups, in order: by the mean of a number, the newest time, the first word, the
        gravest health."""
        sort, column = self._query.sort, self._sorted
        greatest = sort == "health" or sort in _NEWEST
        value = func.max(column) if greatest else func.min(column) if sort in _WORDS else func.avg(column)
        named = key.label("key")
        columns: list[Any] = [named, func.count().label("runs")]
        chosen = self._base.with_only_columns(*columns).group_by(named)
        return chosen.order_by(value.is_(None), self._directed(value), named)

    def groups(
        self, connection: Connection, key: ColumnElement[str], keys: Sequence[str] | None
    ) -> dict[str, wire.RunGroup]:
        """These groups, or all, by key."""
        columns = [_RUN.c[name] if name in _RUN.c else self._columns[name] for name in ("run_id", *_OF_GROUP)]
        chosen = self._base.with_only_columns(key, *columns, self._state, self._columns["updated_at"])
        chosen = chosen if keys is None else chosen.where(key.in_(keys))
        members: dict[str, list[Sequence[Any]]] = defaultdict(list)
        for row in connection.execute(chosen).all():
            members[row[0]].append(row)
        names = ("key", "run_id", *_OF_GROUP, "state", "updated_at")
        found = {key: dict(zip(names, zip(*runs, strict=True), strict=True)) for key, runs in members.items()}
        worst = {key: of["run_id"][_worst(of["health"], of["edq_ratio"])] for key, of in found.items()}
        newest = {key: _newest(of["created_at"], of["run_id"]) for key, of in found.items()}
        said = _overviews(connection, list(worst.values()))
        named = _named(connection, [run_id for ids in newest.values() for run_id in ids])
        return {
            key: _group(key, of, [named[run_id] for run_id in newest[key]], said.get(worst[key]))
            for key, of in found.items()
        }

    @property
    def _sorted(self) -> ColumnElement[Any]:
        column = self._columns[self._query.sort]
        return _grave(column) if self._query.sort == "health" else column

    def _directed(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        return column.desc() if self._query.descending else column.asc()


def _grave(health: ColumnElement[str]) -> ColumnElement[int]:
    """How grave a health is, healthy the least; NULL if it is not known."""
    return case({word: -gravity(word) for word in (*GRAVITY, "unknown", "healthy")}, value=health)


_CONDITION: Final = re.compile(
    r"\s*(?P<name>.*?[^\s<>=!~])\s*(?P<sign><=|>=|!=|[<>=~])\s*(?P<value>\S.*?)\s*", re.DOTALL
)
_COMPARED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
_ALSO: Final = {
    "edq": "edq_ratio",
    "lost": "lost_update_ratio",
    "step": "last_step",
    "judgement": "health",
    "verdict": "health",
}
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_OF_CONFIGURATION: Final = "config."


def column_condition(text: str, columns: Mapping[str, ColumnElement[Any]], now: float) -> ColumnElement[bool]:
    """A condition on a column of the table, else on an entry of the configuration: "age < 2d", "lr > 1e-3".

    `~` finds a part of a text; runs without such an entry are left out, whatever is asked of it.

    Raises:
        Unprocessable: it reads otherwise, or the column is no number and has no order.
    """
    found = _CONDITION.fullmatch(text)
    if found is None or '"' in found["name"]:
        raise Unprocessable(
            f"{text!r} is no condition; write a column, one of < <= > >= = != ~, and a value: lr > 1e-3",
            field="where",
        )
    name, sign, value = found["name"], found["sign"], found["value"]
    column = _ALSO.get(name.lower(), name.lower())
    if column == "age":
        age = now - _RUN.c.created_at
        return _compared(age, sign, _seconds(value), text)
    if column == "tag":
        return _tagged(sign, value, text)
    if column in columns:
        is_word = column in _WORDS
        return _compared(columns[column], sign, value if is_word else _number(value), text)
    number, words = entry_columns(_RUN.c.config, name.removeprefix(_OF_CONFIGURATION))
    asked = _number(value)
    return (
        _compared(words, sign, value, text)
        if asked is None or sign == "~"
        else _compared(number, sign, asked, text)
    )


def _compared(column: ColumnElement[Any], sign: str, value: float | str | None, text: str) -> ColumnElement[bool]:
    if value is None:
        raise Unprocessable(
            f"{text!r} needs a number: 0.001, 1e-3, 50 %, or of an age 30m, 2h, 3d, 1w", field="where"
        )
    if sign == "~" and not isinstance(value, str):
        raise Unprocessable(f"{text!r} looks for a part of a number; ask with < <= > >= = or !=", field="where")
    if sign == "~":
        return column.icontains(value, autoescape=True)
    if isinstance(value, str) and sign not in {"=", "!="}:
        raise Unprocessable(f"{text!r} compares words, which have no order; ask with =, != or ~", field="where")
    found: ColumnElement[bool] = _COMPARED[sign](column, value)
    return found


def _tagged(sign: str, value: str, text: str) -> ColumnElement[bool]:
    tag = schema.run_tag.c
    alike = _compared(tag.tag, "=" if sign == "!=" else sign, value, text)
    found = exists().where(tag.run_id == _RUN.c.run_id, alike)
    return ~found if sign == "!=" else found


def _number(value: str) -> float | None:
    share = value.endswith("%")
    try:
        number = float(value.removesuffix("%"))
    except ValueError:
        return None
    return number / 100 if share else number


def _seconds(value: str) -> float | None:
    number = _number(value[:-1])
    return None if number is None or value[-1] not in _SECONDS else number * _SECONDS[value[-1]]


def _parts(by: wire.GroupBy) -> list[ColumnElement[Any]]:
    """The common values of a group's runs; strategy and dtype always, so that means make sense."""
    parts: dict[str, Sequence[ColumnElement[Any]]] = {
        "strategy": [],
        "group": [_RUN.c.group],
        "configuration": [func.coalesce(_RUN.c.treated_as, _RUN.c.configuration)],
    }
    return [_RUN.c.project, _RUN.c.strategy, _RUN.c.dtype, *parts[by]]


def _key(by: wire.GroupBy) -> ColumnElement[str]:
    """What the runs of a group have in common, as one text."""
    # A literal: with a parameter, GROUP BY is a different expression and each key is made twice.
    separator, none = (literal_column(f"'{character}'", String) for character in (_SEPARATOR, _NONE))
    first, *others = _parts(by)
    key: ColumnElement[str] = first
    for column in others:
        key = key + separator + func.coalesce(column, none)
    return key


def _worst(healths: Sequence[str | None], edq: Sequence[float | None]) -> int:
    """Which run speaks for its group: runs with problems, then unknown ones, then the lowest EDQ."""
    standing = {health: (health in _NOT_AGAINST, health == "healthy") for health in set(healths)}
    first = min(standing.values())
    values = [
        value or 0.0 if standing[health] == first else math.inf for health, value in zip(healths, edq, strict=True)
    ]
    return values.index(min(values))


def _newest(created: Sequence[float], ids: Sequence[str]) -> list[str]:
    return [run_id for _, run_id in nlargest(_LISTED, zip(created, ids, strict=True))]


def _named(connection: Connection, ids: Sequence[str]) -> dict[str, Any]:
    """The names of these runs and their strategies, by id."""
    columns = (_RUN.c.run_id, _RUN.c.name, _RUN.c.project, _RUN.c.strategy, _RUN.c.dtype)
    return {row.run_id: row for row in connection.execute(select(*columns).where(_RUN.c.run_id.in_(ids)))}


def _group(
    key: str, of: Mapping[str, Sequence[Any]], newest: Sequence[Any], worst: wire.Overview | None
) -> wire.RunGroup:
    """The group of the runs with these values by name, in one order each; `newest`: those that its row lists."""
    numbers = {
        name: mean_over_seeds([value for value in of[name] if value is not None])
        for name in schema.OVERVIEW_NUMBERS
    }
    return wire.RunGroup(
        key=key,
        project=newest[0].project,
        strategy=newest[0].strategy,
        dtype=newest[0].dtype,
        groups=sorted({name for name in of["group"] if name is not None})[:_LISTED],
        runs={run.run_id: run.name for run in newest},
        count=len(of["run_id"]),
        states=Counter(of["state"]),
        healths=Counter(health or "unknown" for health in of["health"]),
        health=worst.health if worst else "unknown",
        headline=worst.headline if worst else "Not evaluated yet.",
        numbers={
            name: wire.GroupValue(value=found.value, count=found.count, spread=found.spread)
            for name, found in numbers.items()
            if found is not None
        },
        last_step=max((step for step in of["last_step"] if step is not None), default=None),
        updated_at=max(of["updated_at"]),
    )


def _overviews(connection: Connection, ids: Sequence[str]) -> dict[str, wire.Overview]:
    there = (_SUMMARY.c.run_id.in_(ids), _SUMMARY.c.overview.is_not(None))
    rows = whole_of(connection, select(_SUMMARY).where(*there), _SUMMARY)[0] if ids else []
    return {row.run_id: DECODE_OVERVIEW(row.overview) for row in rows}
