"""Migrations killed at random statements until one gets through."""

from __future__ import annotations

import httpx

from drills.torture.life import gone
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["end_in_migration"]

_STATEMENTS = 90
"""About how many there are."""
_TRIES = 4


def end_in_migration(lives):
    """Kill one database's migration a few times; then a life must get through."""
    by_command = "--database" in lives.arguments()
    for _ in range(_TRIES):
        die = ("migration", lives.random.randint(1, _STATEMENTS))
        command = lives.arguments()[-2:]
        life = lives.births.start("migrate", command, die=die) if by_command else lives.start(die=die)
        if not gone(life, 5):
            life.kill()
            assert gone(life, PATIENCE_SECONDS)
        lives.kills["migration"] += 1
    if by_command:
        assert gone(lives.births.start("migrate", lives.arguments()[-2:]), PATIENCE_SECONDS)
    life = lives.start()
    with httpx.Client(base_url=lives.urls[0], timeout=PATIENCE_SECONDS, trust_env=False) as client:
        until(lambda: _ready(client), f"serving ({lives.births.log})")
    lives.kill(life, "migration")


def _ready(client):
    try:
        return client.get("/readyz").is_success
    except httpx.HTTPError:
        return False
