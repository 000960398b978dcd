"""Query parameters that several routes share; a question is answered as it was asked, or refused."""

from __future__ import annotations

import typing
from collections import Counter
from typing import Annotated, Literal

from fastapi import Path, Query
from pydantic import StringConstraints
from starlette.requests import Request

from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import metric
from collage_server.errors import Unprocessable

__all__ = [
    "AxisName",
    "FirstStep",
    "LastStep",
    "LayerName",
    "MetricKey",
    "MetricKeys",
    "ModuleType",
    "Pattern",
    "PointCount",
    "Rank",
    "RunId",
    "checked_metric",
    "refuse_unknown_parameters",
]

_MOST_POINTS = 10_000

RunId = Annotated[str, Path(max_length=64)]
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
AxisName = Annotated[Literal["step", "tokens", "time"], Query()]
MetricKeys = Annotated[
    list[Annotated[str, StringConstraints(max_length=512)]],
    Query(
        min_length=1,
        max_length=20,
        description="A metric's key, or the name of a logged scalar; repeat it: the further ones stand in `more`.",
    ),
]


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
    """A dependency of routes: a filter that is misspelt would else give the picture without it.

    Raises:
        Unprocessable: the query names a parameter that the route does not declare, or one twice that it takes once.
    """
    known = {parameter.alias: parameter for parameter in request.scope["route"].dependant.query_params}
    for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
        if times > 1 and name in known and typing.get_origin(known[name].field_info.annotation) is not list:
            raise Unprocessable(f"{name} stands {times} times in the question; give it once", field=name)
        if name not in known:
            raise Unprocessable(
                f"{name!r} is no parameter of this route; it takes {', '.join(sorted(known)) or 'none'}",
                field=name,
            )
