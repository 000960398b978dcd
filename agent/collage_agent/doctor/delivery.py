"""Checks of the way to the server: data folder, token, server, clock, reports that wait."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import httpx

from collage_agent.doctor import Check
from collage_agent.transport.spool import waiting_spools
from collage_monitor.local import data_folder, find_token, server_address, token_path

__all__ = ["delivery_checks"]

_TIMEOUT_SECONDS: Final = 3.0
_CLOCK_SECONDS: Final = 30.0
_FREE_BYTES: Final = 2 * 2**30


def delivery_checks(environment: Mapping[str, str]) -> Iterator[Check]:
    """Every check of what happens to a report. Asks the server twice; writes nothing."""
    folder = data_folder(None, environment)
    yield _folder(folder)
    address = (environment.get("COLLAGE_SERVER_URL") or server_address(environment)).rstrip("/")
    token = environment.get("COLLAGE_TOKEN") or find_token(address, folder, environment)
    yield _token(folder, token)
    yield from _server(address, token, given=bool(environment.get("COLLAGE_SERVER_URL")))
    yield _spool(folder)


def _folder(folder: Path) -> Check:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(
            "data folder",
            "problem",
            f"{folder}: cannot be written; reports would be lost while the server is away",
            "set COLLAGE_DIR to a folder of yours",
        )
    free = shutil.disk_usage(there).free
    if free < _FREE_BYTES:
        return Check(
            "data folder",
            "note",
            f"{folder}: {free / 2**30:.1f} GiB are free; up to 1 GiB of reports may wait there for each process",
            "make room, or set COLLAGE_DIR",
        )
    return Check("data folder", "ok", f"{folder}, {free / 2**30:.0f} GiB free")


def _token(folder: Path, token: str | None) -> Check:
    path = token_path(folder)
    if path.exists() and os.name == "posix" and path.stat().st_mode & 0o077:
        return Check("token", "problem", f"{path} can be read by others", f"chmod 600 {path}")
    if token is None:
        return Check("token", "note", "none", "`collage-monitor up` makes one; for another server: COLLAGE_TOKEN")
    return Check("token", "ok", "there is one (hidden)")


def _server(address: str, token: str | None, *, given: bool) -> Iterator[Check]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(base_url=address, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            health = client.get("/healthz")
            runs = client.get("/api/v1/runs", params={"limit": 1}, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield Check(
            "server",
            "problem" if given else "note",
            f"nothing answers at {address} ({type(error).__name__}); reports are kept on disk until something does",
            "check the address" if given else "`collage-monitor up` starts a server on this machine",
        )
        return
    if not health.is_success:
        yield Check("server", "problem", f"{address} answers {health.status_code} to /healthz", "look at its log")
    elif runs.status_code in (401, 403):
        yield Check(
            "server",
            "problem",
            f"{address} {'refuses the' if token else 'asks for a'} token ({runs.status_code}): "
            "reports would wait on disk",
            "set COLLAGE_TOKEN to one that the server gave out, or COLLAGE_DIR to its data folder if it runs here",
        )
    elif not runs.is_success:
        yield Check(
            "server",
            "problem",
            f"{address} answers {runs.status_code} to /api/v1/runs; is it a Collage Monitor server?",
            "set COLLAGE_SERVER_URL",
        )
    else:
        yield Check("server", "ok", f"{address} answers")
    yield from _clock(health)


def _clock(answer: httpx.Response) -> Iterator[Check]:
    if "date" not in answer.headers:
        return
    try:
        ahead = time.time() - parsedate_to_datetime(answer.headers["date"]).timestamp()
    except ValueError:
        return
    if abs(ahead) > _CLOCK_SECONDS:
        yield Check(
            "clock",
            "note",
            f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's",
            "set it by NTP: curves over time would be shifted",
        )
    else:
        yield Check("clock", "ok", "agrees with the server's")


def _spool(folder: Path) -> Check:
    waiting = [path.stat().st_size for path in waiting_spools(folder)]
    if not waiting:
        return Check("waiting reports", "ok", "none")
    return Check(
        "waiting reports",
        "note",
        f"{len(waiting)} files, {sum(waiting) / 2**20:.1f} MiB, of runs whose server was away",
        "`collage-monitor replay` sends them, as does the next online run",
    )
