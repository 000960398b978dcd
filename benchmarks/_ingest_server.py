"""A server in a process of its own, for benchmarks: the real store, or one that acknowledges without writing.

`python -m benchmarks._ingest_server KIND FOLDER [DATABASE]` prints its address. Nothing is sealed until a line
arrives on standard input; the CPU seconds that sealing took are printed when all is sealed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from collage_server.app import make_store
from collage_server.command.serve import Server
from collage_server.settings import Settings
from collage_server.store import GroupOutcome, ReportGroup, SqliteStore, Store
from collage_server.store.journal.reports import SqlJournal

__all__ = ["KINDS", "NullStore", "serve"]

KINDS: Final = ("sqlite", "null", "single", "postgresql")
"""`single` commits each request on its own, instead of all that wait."""
_NEVER: Final = 1e6


class _NullJournal(SqlJournal):
    """Acknowledges reports without writing them."""

    def append(self, groups: Sequence[ReportGroup], now: float) -> list[GroupOutcome]:
        """Accept everything."""
        return [GroupOutcome(len(group.reports), 0) for group in groups]


class NullStore(SqliteStore):
    """Keeps runs and streams as SQLite does, and acknowledges reports without writing them."""

    def __init__(self, path: Path, *, stale_after_seconds: float) -> None:
        super().__init__(path, stale_after_seconds=stale_after_seconds)
        self.journal = _NullJournal(self, self.journal.driver)


def _seal_when_told(store: Store) -> None:
    for _ in sys.stdin:
        started = time.thread_time()
        for run_id in store.journal.runs():
            while store.sealing.seal(run_id, time.time()):
                pass
        print(time.thread_time() - started, flush=True)


def serve(kind: str, folder: Path, database: str | None = None) -> None:
    """Serve on a free port of loopback until terminated."""
    settings = Settings(
        folder=folder,
        database=database,
        port=0,
        no_auth=True,
        seal_interval_seconds=_NEVER,
        commit_bytes=1 if kind == "single" else Settings.commit_bytes,
    )
    store = make_store(settings)
    if kind == "null":
        store = NullStore(folder / "collage.sqlite", stale_after_seconds=settings.stale_after_seconds)
    threading.Thread(target=_seal_when_told, args=(store,), daemon=True).start()
    Server(settings, store, as_json=True).run()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4])
