"""Configurations of runs: whether two differ only in seeds, which entries differ, and an entry in SQL.

A configuration's digest is stored, so what counts as a seed is fixed for rows that exist; the table of runs groups
by it (`tests/server/test_table.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Double, String, case, cast, func, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

__all__ = ["configuration_of", "differing", "entries", "entry_columns"]

_SEED: Final = re.compile(r"(.*[^a-z])?seed", re.IGNORECASE)
_LABEL: Final = re.compile(r"run_?(name|id)|(output|logging|log|save)_?(dir|path|folder)", re.IGNORECASE)
_LABELS_OF_RUN: Final = frozenset({"name", "id", "notes", "tags"})
"""Entries that name a run or say where it writes: no training depends on them. A data set has a name, too."""
_LONGEST: Final = 200


def configuration_of(project: str, config: Mapping[str, Any]) -> str:
    """The same for runs of one project whose configurations differ in nothing but seeds, names and places.

    A seed is an entry, at any depth, whose name is or ends with the word "seed".
    """
    text = json.dumps([project, _compared(config)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's entries that are compared, by their path: {"optimizer.lr": 0.001}."""
    return dict(_flattened(_compared(config), ""))


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The entries in which these configurations differ, in the order in which they first stand."""
    found = [entries(config) for config in configs]
    names = dict.fromkeys(name for config in found for name in config)
    return [name for name in names if any(_differs(config, found[0], name) for config in found[1:])]


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    return (name in one) != (name in other) or one.get(name) != other.get(name)


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _without(entry) for name, entry in config.items() if not _is_left_out(name, _LABELS_OF_RUN)}


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(entry) for name, entry in value.items() if not _is_left_out(name)}
    return [_without(entry) for entry in value] if isinstance(value, list) else value


def _is_left_out(name: str, labels: frozenset[str] = frozenset()) -> bool:
    return name in labels or _SEED.fullmatch(name) is not None or _LABEL.fullmatch(name) is not None


def _flattened(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from _flattened(entry, f"{path}.{name}" if path else str(name))
    elif path:
        plain = isinstance(value, int | float | bool) or value is None
        yield path, value if plain else _short(value if isinstance(value, str) else json.dumps(value, default=str))


def _short(text: str) -> str:
    """Long texts are told apart by their hash, which keeps an answer about many runs small."""
    if len(text) <= _LONGEST:
        return text
    told = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{text[: _LONGEST - 10]}… {told}"


def entry_columns(config: ColumnElement[str], path: str) -> tuple[ColumnElement[float], ColumnElement[str]]:
    """An entry as (its number, its text), null where it is none; true and false are words.

    Without a number or a text under names within names ("optimizer.lr"), the entry that is called so as a whole.
    """
    numbers: list[ColumnElement[Any]] = []
    texts: list[ColumnElement[Any]] = []
    for names in dict.fromkeys((tuple(path.split(".")), (path,))):
        kind = _Kind(config, *_places(names))
        found = _Entry(config, *_places(names))
        numbers.append(case((kind.in_(_NUMBERS), cast(found, Double))))
        # SQLite has no word for true and false but their kind.
        texts.append(case((kind.in_(("true", "false")), kind), (kind.in_(_WORDS), cast(found, String))))
    return _first(numbers), _first(texts)


_NUMBERS: Final = ("number", "integer", "real")
_WORDS: Final = ("string", "text", "boolean", *_NUMBERS)


def _first(columns: list[ColumnElement[Any]]) -> ColumnElement[Any]:
    return func.coalesce(*columns) if len(columns) > 1 else columns[0]


def _places(names: Sequence[str]) -> tuple[ColumnElement[str], ColumnElement[str]]:
    """Where an entry stands: as SQLite's paths have it, and as an array of PostgreSQL's."""
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    return literal("$" + "".join(f".{name}" for name in quoted)), literal("{" + ",".join(quoted) + "}")


class _Entry(FunctionElement[str]):
    """The entry of a configuration at a place."""

    inherit_cache = True
    on_sqlite, on_postgresql = "json_extract({}, {})", "({} #>> CAST({} AS TEXT[]))"


class _Kind(FunctionElement[str]):
    """What kind of value it is, as the database calls it."""

    inherit_cache = True
    on_sqlite, on_postgresql = "json_type({}, {})", "jsonb_typeof({} #> CAST({} AS TEXT[]))"


@compiles(_Entry, "sqlite")
@compiles(_Kind, "sqlite")
def _on_sqlite(element: _Entry | _Kind, compiler: Any, **options: Any) -> str:
    config, path, _ = (compiler.process(part, **options) for part in element.clauses)
    return element.on_sqlite.format(config, path)


@compiles(_Entry, "postgresql")
@compiles(_Kind, "postgresql")
def _on_postgresql(element: _Entry | _Kind, compiler: Any, **options: Any) -> str:
    config, _, place = (compiler.process(part, **options) for part in element.clauses)
    # PostgreSQL's jsonb has no character 0: a configuration with one gets no entries.
    document = f"CASE WHEN strpos({config}, '\\u0000') = 0 THEN CAST({config} AS JSONB) END"
    return element.on_postgresql.format(f"({document})", place)
