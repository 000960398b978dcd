"""/healthz and /readyz: whether the process answers, and whether it can work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import __version__, wire
from collage_server.api.responses import answer, describes
from collage_server.app_state import app_state_of
from collage_server.errors import Busy

__all__ = ["router"]

router = APIRouter(tags=["operation"])


@router.get("/healthz", **describes(wire.Health))
async def healthz() -> Response:
    """The process answers."""
    return answer(wire.Health(status="ok", version=__version__))


@router.get("/readyz", **describes(wire.Health))
def readyz(request: Request) -> Response:
    """Ready: the database answers and the writer runs; `status` shows if the server is read-only, `away` what it
    depends on and does not answer."""
    app_state = app_state_of(request)
    if not app_state.writer.running:
        raise Busy("the writer does not run; the server is starting or going down", retry_after_seconds=1)
    try:
        app_state.store.check()
    except Exception as error:
        raise Busy(f"the database does not answer ({type(error).__name__})", retry_after_seconds=5) from error
    reason = app_state.guard.reason
    status = "ok" if reason is None else f"read-only: {reason}"
    away = [
        wire.AwayDependency(name=entry.name, since=entry.away_since)
        for entry in app_state.dependencies
        if entry.away_since is not None
    ]
    return answer(wire.Health(status=status, version=__version__, away=away))
