"""Answers /healthz, decodes reports and does nothing else: what a machine costs any server."""

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from collage_monitor import wire

__all__ = ["app"]


async def _healthz(_request):
    return JSONResponse({"status": "ok"})


async def _take(request):
    batch = wire.decode_batch(await request.body(), wire.MSGPACK)
    return JSONResponse({"accepted": len(batch.reports)})


app = Starlette(routes=[Route("/healthz", _healthz), Route("/reports", _take, methods=["POST"])])
