"""Tables of a server's answers, for pandas, Polars and whatever else reads Arrow. Needs the extra `parquet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from collage_monitor import wire
from collage_monitor.errors import CollageError

__all__ = ["load_pyarrow", "plain_number", "run_columns", "table_of"]

_ABOUT: Final = (
    *("run_id", "name", "project", "group", "tags", "state", "strategy", "observed_strategy", "dtype", "seed"),
    *("created_at", "updated_at", "last_step", "configuration"),
)


def load_pyarrow() -> Any:
    """Import the library when a frame is requested; raises `CollageError` if it is not installed."""
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise CollageError("a frame needs pyarrow: pip install 'collage-monitor[parquet]'") from error
    return pyarrow


def table_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a table with every column that one of them has, in the order first seen."""
    pyarrow = load_pyarrow()
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: pyarrow.array(_alike([row.get(name) for row in rows])) for name in names})


def _alike(values: list[Any]) -> list[Any]:
    """A column's values, as text if one column cannot hold their types."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        return values
    return [value if value is None else str(value) for value in values]


def run_columns(row: wire.RunRow, paths: Sequence[str]) -> dict[str, Any]:
    """A run's row by column, with the entries of its configuration at `paths`; see `Client.runs_frame`."""
    said = row.overview or wire.Overview(run_id=row.run_id, health="not judged yet")
    about = {name: getattr(row, name) for name in _ABOUT}
    judged = {"health": said.health, "headline": said.headline, "first_step": said.first_step}
    numbers = {key: plain_number(value) for key, value in said.numbers.items()}
    logged = {name: wire.from_number(scalar.value) for name, scalar in row.scalars.items()}
    config = {f"config.{path}": _plain_entry(row.config.get(path)) for path in paths}
    return {**about, **judged, "judged_step": said.last_step, **numbers, **logged, **config}


def _plain_entry(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def plain_number(value: wire.Number | None) -> float | None:
    """The float behind a number of an answer; None stays None: undefined."""
    return None if value is None else wire.from_number(value)
