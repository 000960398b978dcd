"""A question is answered as it was asked: a parameter that the route does not have is refused, never left out."""

from __future__ import annotations

from starlette.requests import Request

from collage_server.errors import Unprocessable

__all__ = ["refuse_unknown_parameters"]


async def refuse_unknown_parameters(request: Request) -> None:
    """A dependency of routes: a filter that is misspelt would else give the picture without it.

    Raises:
        Unprocessable: the query names a parameter that the route does not declare.
    """
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    for name in request.query_params:
        if name not in known:
            raise Unprocessable(
                f"{name!r} is no parameter of this route; it takes {', '.join(sorted(known)) or 'none'}",
                field=name,
            )
