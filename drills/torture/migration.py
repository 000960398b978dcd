"""Migrations killed at random statements until one gets through: from nothing, and from before the baseline."""

from __future__ import annotations

import json

import httpx

from drills.torture.life import gone
from tests.server.store.release import as_released, holds, read_release
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["end_in_migration"]

_STATEMENTS = {True: 14, False: 90}
"""About how many there are from that revision on, and from nothing."""
_TRIES = 4


def end_in_migration(lives, released):
    """A few kills of one database's migration; then a life gets through, and must answer as the release did."""
    if released:
        as_released(lives.store())
    by_command = "--database" in lives.arguments()
    for _ in range(_TRIES):
        die = ("migration", lives.random.randint(1, _STATEMENTS[released]))
        command = lives.arguments()[-2:]
        life = lives.births.start("migrate", command, die=die) if by_command else lives.start(die=die)
        if not gone(life, 5):
            life.kill()
            assert gone(life, PATIENCE_SECONDS)
        lives.kills["migration"] += 1
    if by_command:
        assert gone(lives.births.start("migrate", lives.arguments()[-2:]), PATIENCE_SECONDS)
    life = lives.start()
    _compare(lives, released)
    lives.kill(life, "migration")


def _compare(lives, released):
    with httpx.Client(base_url=lives.urls[0], timeout=PATIENCE_SECONDS, trust_env=False) as client:
        until(lambda: _ready(client), f"serving ({lives.births.log})")
        for path, known in read_release()["answers"].items() if released else ():
            if not path.startswith("/runs/r1/"):
                continue
            answer = json.loads(client.get(f"/api/v1{path}").content)
            if not holds(answer, known):
                lives.findings.append(f"after an interrupted migration {path} answers something else")


def _ready(client):
    try:
        return client.get("/readyz").is_success
    except httpx.HTTPError:
        return False
