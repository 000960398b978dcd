"""A server in a process of its own, for benchmarks: the real store, or one that acknowledges without writing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from collage_server.app import create_app
from collage_server.settings import Settings
from collage_server.store import GroupOutcome, ReportGroup, SqliteStore

__all__ = ["NullStore", "serve"]


class NullStore(SqliteStore):
    """Keeps runs and streams as SQLite does, and acknowledges reports without writing them."""

    def append(self, groups: Sequence[ReportGroup], now: float) -> list[GroupOutcome]:
        """Accept everything."""
        return [GroupOutcome(len(group.reports), 0) for group in groups]


class _Announcing(uvicorn.Server):
    """Prints its port once it listens."""

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


def serve(kind: str, folder: Path) -> None:
    """Serve on a free port of loopback until terminated; `kind` is "sqlite" or "null"."""
    settings = Settings(folder=folder, port=0, no_auth=True)
    store = (NullStore if kind == "null" else SqliteStore)(
        folder / "collage.sqlite", stale_after_seconds=settings.stale_after_seconds
    )
    app = create_app(settings, store=store)
    _Announcing(uvicorn.Config(app, port=0, log_level="warning", access_log=False)).run()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
