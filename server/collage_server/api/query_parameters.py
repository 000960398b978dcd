"""Query parameters that several routes share; a question is answered exactly as asked, or refused.

Names, bounds and refusals are fixed by the HTTP page (`docs/api/http.md`, `tests/server/test_matrix.py`). A
parameter that a route does not know is refused, never ignored.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import Depends, Path, Query
from fastapi.dependencies.models import Dependant
from pydantic import StringConstraints
from starlette.requests import Request

from collage_monitor import wire
from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import metric
from collage_server.auth.bearer import principal_of
from collage_server.errors import NotFound, Unprocessable
from collage_server.queries.curves import AxisName
from collage_server.store import RunFilter, Snapshot, TableQuery

__all__ = [
    "AxisName",
    "Filter",
    "FirstStep",
    "Id",
    "LONGEST_ID",
    "LastStep",
    "LayerChoice",
    "LayerName",
    "MetricKey",
    "MetricKeys",
    "ModuleType",
    "Pattern",
    "PointCount",
    "Rank",
    "RunFilters",
    "TablePart",
    "checked_metric",
    "refuse_unknown_parameters",
]

_MOST_POINTS = 10_000
LONGEST_ID: Final = 64
"""Characters of a run's, stream's, token's or incident's id, at most."""
Id = Annotated[str, Path(max_length=LONGEST_ID)]
MetricKey = Annotated[str, Query(max_length=512, description="A metric's key, or the name of a logged scalar.")]
LayerName = Annotated[str | None, Query(max_length=512, description="One layer, by its exact name.")]
Pattern = Annotated[
    str | None,
    Query(max_length=200, description="Layers whose names match this glob (* ? [seq]), merged into one."),
]
ModuleType = Annotated[
    str | None,
    Query(
        max_length=512, description="Layers of one module type (Linear, Embedding …); with a pattern, both hold."
    ),
]
Rank = Annotated[int | None, Query(ge=0, le=2**31, description="One rank alone; default: all merged.")]
FirstStep = Annotated[int | None, Query(alias="from", ge=0, le=2**53)]
LastStep = Annotated[int | None, Query(alias="to", ge=0, le=2**53)]
PointCount = Annotated[int, Query(ge=1, le=_MOST_POINTS, description="At most so many points; 1 merges all.")]
MetricKeys = Annotated[
    list[Annotated[str, StringConstraints(max_length=512)]],
    Query(
        min_length=1,
        max_length=20,
        description="A metric's key, or the name of a logged scalar; repeat it: the further ones stand in `more`.",
    ),
]
Filter = Annotated[str | None, Query(max_length=512)]
Conditions = Annotated[
    list[Annotated[str, StringConstraints(max_length=512)]],
    Query(
        default_factory=list,
        max_length=20,
        description="Conditions that all hold, on columns and entries of configurations: `lr > 1e-3`, `age < 2d`.",
    ),
]


async def _run_filter(
    request: Request,
    project: Filter = None,
    strategy: Filter = None,
    group: Filter = None,
    tag: Filter = None,
    state: Literal["running", "finished", "failed", "stale"] | None = None,
    q: Filter = None,
) -> RunFilter:
    """The requested runs that the caller may see."""
    return RunFilter(
        project=project,
        projects=principal_of(request).projects,
        strategy=strategy,
        group=group,
        tag=tag,
        state=state,
        q=q,
    )


RunFilters = Annotated[RunFilter, Depends(_run_filter)]


async def _table_part(
    filters: RunFilters,
    health: Filter = None,
    sort: wire.RunSort = "updated_at",
    descending: bool = True,
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
    limit: Annotated[int, Query(ge=0, le=500)] = 50,
    *,
    where: Conditions,
) -> TableQuery:
    order: dict[str, Any] = {"sort": sort, "descending": descending, "offset": offset, "limit": limit}
    return TableQuery(**vars(filters), health=health, where=where, **order)


TablePart = Annotated[TableQuery, Depends(_table_part)]


def checked_metric(key: str) -> str:
    """The key, if the catalogue has it.

    Raises:
        Unprocessable: it has not, or the label is missing or not wanted.
    """
    try:
        metric(key)
    except CatalogueError as error:
        raise Unprocessable(str(error), field="metric") from error
    return key


async def refuse_unknown_parameters(request: Request) -> None:
    """A dependency of routes: otherwise a misspelt filter would be ignored silently.

    Raises:
        Unprocessable: the query names a parameter that the route does not declare, or one twice that it takes once.
    """
    known = {parameter.alias: parameter for parameter in _query_parameters(request.scope["route"].dependant)}
    for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
        if times > 1 and name in known and typing.get_origin(known[name].field_info.annotation) is not list:
            raise Unprocessable(f"{name} stands {times} times in the question; give it once", field=name)
        if name not in known:
            raise Unprocessable(
                f"{name!r} is no parameter of this route; it takes {', '.join(sorted(known)) or 'none'}",
                field=name,
            )


def _query_parameters(dependant: Dependant) -> Iterator[Any]:
    """The parameters of a route and of its dependencies."""
    yield from dependant.query_params
    for other in dependant.dependencies:
        yield from _query_parameters(other)


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """The requested layers of a run: one, a glob, or a module type; without any, the whole model."""

    layer: str | None = None
    pattern: str | None = None
    module_type: str | None = None

    @property
    def label(self) -> str | None:
        """Its name in an answer; None for the whole model."""
        return next(filter(None, (self.layer, self.pattern, self.module_type)), None)

    def names(self, snapshot: Snapshot, run_id: str) -> tuple[str, ...] | None:
        """The layers of a run; None without a glob or a module type.

        Raises:
            NotFound: there is no such layer.
            Unprocessable: a layer beside them.
        """
        if self.pattern is None and self.module_type is None:
            return None
        if self.layer is not None:
            field = "pattern" if self.pattern is not None else "module_type"
            raise Unprocessable(f"give layer or {field}, not both", field=field)
        entries = snapshot.layers(run_id)
        if self.module_type is not None:
            entries = _of_type(run_id, entries, self.module_type)
        chosen = tuple(entry.name for entry in entries if fnmatch.fnmatchcase(entry.name, self.pattern or "*"))
        if not chosen:
            raise NotFound(
                f"no layer of run {run_id!r} matches {self.pattern!r}; GET /api/v1/runs/{run_id}/layers lists them",
                field="pattern",
            )
        return chosen


def _of_type(run_id: str, entries: Sequence[wire.Layer], module_type: str) -> list[wire.Layer]:
    found = [entry for entry in entries if entry.module_type == module_type]
    if not found:
        types = ", ".join(sorted({entry.module_type or "''" for entry in entries})) or "none"
        raise NotFound(
            f"no layer of run {run_id!r} is of module type {module_type!r}; its types are {types}",
            field="module_type",
        )
    return found
