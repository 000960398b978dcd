"""A question is answered as it was asked: a parameter that the route does not have is refused, never left out."""

from __future__ import annotations

import typing
from collections import Counter

from starlette.requests import Request

from collage_server.errors import Unprocessable

__all__ = ["refuse_unknown_parameters"]


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
