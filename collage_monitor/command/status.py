"""`status`: whether a server is well, in a table for a person or as JSON for a monitor.

It reads `/health` and `/metrics` and judges nothing of the runs. Names of the checks and the exit status are fixed
for monitors (`tests/server/test_server_verbs.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from typing import Final

import click

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command.server import open_client, server_options
from collage_monitor.command.terminal import clock, printable
from collage_monitor.errors import NotAuthorised, ServerRefusal, ServerUnreachable

__all__ = ["status"]

_SAMPLE: Final = re.compile(r'^collage_server_(\w+)(?:\{\w+="([^"]*)"\})? (\S+)$', re.MULTILINE)
# Bounds of alerts about the server.
_LEAST_DISK: Final = 0.1
_LONGEST_ROUND_SECONDS: Final = 300.0
_LONGEST_AWAY_SECONDS: Final = 1800.0
_DAY_SECONDS: Final = 86_400.0
_LONGEST_BACKUP_SECONDS: Final = 8 * _DAY_SECONDS
_MOST_SKEW_SECONDS: Final = 60.0
_SHOWN_SECONDS: Final = 0.1
_MIB: Final = 2**20
_OWNERS: Final = ("bodies", "caches", "answers", "evaluations", "sealing")


@dataclass(frozen=True)
class Check:
    """One line; `ok` is None if its number says nothing about health, or may not be read with this token."""

    name: str
    ok: bool | None
    text: str


@click.command("status")
@server_options
def status(server_url: str, token: str | None, as_json: bool) -> None:
    """Say whether the server is well: status 0 if it is, 1 if not. Numbers need a token for every project."""
    with open_client(server_url, token) as client:
        checks = list(_checks(client))
    healthy = all(check.ok is not False for check in checks)
    if as_json:
        click.echo(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}))
    else:
        marks = {True: "ok", False: "NOT OK", None: "-"}
        for check in checks:
            click.echo(f"{check.name:<12}{marks[check.ok]:<8}{printable(check.text)}")
    raise SystemExit(0 if healthy else 1)


def _checks(client: Client) -> Iterator[Check]:
    try:
        ready = wire.decode_message(client.page("/readyz").content, wire.Health, wire.JSON)
    except (ServerUnreachable, ServerRefusal) as error:
        yield Check("server", False, str(error))
        return
    yield Check("server", ready.status == "ok", f"{client.server_url}, version {ready.version}: {ready.status}")
    for entry in ready.away:
        yield Check("away", False, f"{entry.name} does not answer, since {clock(entry.since)}")
    try:
        page = client.page("/metrics")
    except NotAuthorised as error:
        yield Check("numbers", None, f"not to be seen with this token: {error}")
        return
    now = parsedate_to_datetime(page.headers["Date"]).timestamp()
    found = {(name, label): float(value) for name, label, value in _SAMPLE.findall(page.text)}
    numbers = {name: value for (name, label), value in found.items() if not label}
    if "memory_limit_bytes" not in numbers:
        yield Check("numbers", None, "not to be seen with this token: it is for some projects, not for every one")
        return
    yield from _number_checks(numbers, now)
    held = {owner: found.get(("memory_bytes", owner), 0.0) for owner in _OWNERS}
    owned = ", ".join(f"{owner} {size / _MIB:.0f}" for owner, size in held.items())
    yield Check("memory", None, f"MiB of {numbers['memory_limit_bytes'] / _MIB:.0f}: {owned}")


def _number_checks(numbers: Mapping[str, float], now: float) -> Iterator[Check]:
    """Check the server's gauges; `now` is its machine's clock, stored times are by the database's."""
    skew = numbers.get("clock_skew_seconds")
    stored_now = now + (skew or 0.0)
    left = numbers.get("disk_left_ratio")
    has_room = left is not None and left >= _LEAST_DISK
    yield _check("disk", left, ok=has_room, text="{:.0%} of the room is left", absent="no bound known")
    oldest = numbers.get("oldest_unsealed_timestamp_seconds")
    waiting = "none waits" if oldest is None else f"the oldest was made {max(stored_now - oldest, 0.0):.0f} s ago"
    yield Check("journal", None, f"{numbers.get('journal_bytes', 0.0) / _MIB:.1f} MiB wait to be sealed; {waiting}")
    yield _age("sealer", numbers.get("sealer_round_timestamp_seconds"), stored_now, absent="no round yet")
    mine = {1.0: "this server", 0.0: "another server"}.get(numbers.get("alerts_lease_held", -1.0))
    evaluated = numbers.get("alerts_evaluated_timestamp_seconds")
    by = f", by {mine}" if mine else ""
    yield _age("alerts", evaluated, stored_now, absent="not evaluated here", more=by)
    away = numbers.get("archive_away_seconds")
    is_there = away is not None and away <= _LONGEST_AWAY_SECONDS
    yield _check("archive", away, ok=is_there, text="away for {:.0f} s", absent="nothing is archived")
    damaged = numbers.get("archive_damaged_files")
    yield _check(
        "files", damaged, ok=damaged == 0, text="{:.0f} archived files are damaged", absent="none verified"
    )
    rows = numbers.get("database_damaged_rows")
    yield _check("rows", rows, ok=rows == 0, text="{:.0f} rows of the database are damaged", absent="none checked")
    backed_up = numbers.get("backup_age_seconds")
    is_new = backed_up is not None and backed_up <= _LONGEST_BACKUP_SECONDS
    days = f"the newest is {(backed_up or 0.0) / _DAY_SECONDS:.1f} days old"
    yield _check("back-up", backed_up, ok=is_new, text=days, absent="none made by collage-monitor backup")
    near = skew is not None and abs(skew) <= _MOST_SKEW_SECONDS
    yield _check("clock", skew, ok=near, text=_in_words(skew or 0.0), absent="SQLite goes by the machine's")


def _in_words(skew: float) -> str:
    """Say by how much the database's clock differs from the server's."""
    if abs(skew) < _SHOWN_SECONDS / 2:
        return "the database's agrees with the server's"
    return f"the database's is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the server's"


def _check(name: str, value: float | None, *, ok: bool, text: str, absent: str) -> Check:
    return Check(name, None, absent) if value is None else Check(name, ok, text.format(value))


def _age(name: str, at: float | None, now: float, *, absent: str, more: str = "") -> Check:
    if at is None:
        return Check(name, None, absent)
    age = max(now - at, 0.0)
    return Check(name, age <= _LONGEST_ROUND_SECONDS, f"last round {age:.0f} s ago{more}")
