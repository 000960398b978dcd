"""An application that answers /healthz and does nothing else: what the same machine costs any server."""

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

__all__ = ["app"]


async def _healthz(_request):
    return JSONResponse({"status": "ok"})


app = Starlette(routes=[Route("/healthz", _healthz)])
