"""Archived files after the storm: none that a row names is missing, none stays that no row names.

Then retention and deletion, killed again and again until they get through.
"""

from __future__ import annotations

import time
from contextlib import closing

import httpx
import numpy as np
from collage_server.store import Selection, schema
from collage_server.store.archive.paths import run_of
from sqlalchemy import select, update

from drills.torture.clients import ask
from drills.torture.ledger import RANKS
from drills.torture.life import gone
from drills.torture.verify import _compare
from tests.server.reads import layer_points
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["end_archived"]

_TRIES = 3
_LATER = 1e5
"""Seconds: longer than files outlive their rows."""
_MOST_STEPS = 12
"""So many statements or files are passed at most before a life ends itself."""


def end_archived(lives):
    """What follows on a run that is over and verified; its server has ended. Findings go to `lives.findings`."""
    with closing(lives.store()) as store:
        store.open()
        while store.archiving.archive(lives.run_id):
            pass
        lives.orphans += len(_stored(store) - _named(store, schema.segment, schema.segment_gone))
        _compare(lives.ledger, store, lives.run_id)
        _check_files(lives, store)
    _expire(lives)
    _delete(lives)
    lives.findings += lives.ledger.findings


def _expire(lives):
    """All fine points go, and their sums stay."""
    place = [lives.folder, *([lives.url] if hasattr(lives, "url") else [])]
    for left in range(_TRIES, -1, -1):
        life = lives.births.start(
            "expire",
            [lives.run_id, *place],
            die=("archive", lives.random.randint(1, _MOST_STEPS)) if left else None,
            archive=lives.archive,
        )
        assert gone(life, PATIENCE_SECONDS)
        if left:
            lives.kills["expiry"] += life.returncode != 0
        elif life.returncode:
            lives.findings.append(f"retention ended with {life.returncode} ({lives.births.log})")
    with closing(lives.store()) as store:
        store.open()
        _compare_sums(lives, store)
        _check_files(lives, store)


def _delete(lives):
    """The run goes; its server is killed while its rows do."""
    for point in ["archive"] * _TRIES + [None]:
        die = (point, lives.random.randint(1, _MOST_STEPS)) if point else None
        life = lives.start(die=die)
        with httpx.Client(timeout=10.0, trust_env=False) as client:
            until(lambda life=life, client=client: gone(life, 0) or _is_deleted(client, lives), "the deletion")
        if point is None:
            with closing(lives.store()) as store:
                store.open()
                until(lambda store=store: not _of_run(_named(store, schema.segment), lives), "the end of its rows")
        if not gone(life, 0.2):
            life.kill()
            assert gone(life, PATIENCE_SECONDS)
        lives.kills["deletion"] += 1
    with closing(lives.store()) as store:
        store.open()
        _check_files(lives, store)
        if left := _of_run(_stored(store), lives):
            lives.findings.append(f"{len(left)} files of a deleted run stay, such as {min(left)}")


def _is_deleted(client, lives):
    try:
        return ask(client, lives.urls[0], "DELETE", f"/runs/{lives.run_id}") is not None
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.GONE:
            return True
        raise


def _check_files(lives, store):
    """Before the sweep nothing is missing, after it nothing is left over."""
    missing = _named(store, schema.segment) - _stored(store)
    if missing:
        lives.findings.append(f"{len(missing)} archived files are missing, such as {min(missing)}")
    with store.writing() as connection:
        # PostgreSQL goes by its own clock: as if the hour of what has gone were over.
        connection.execute(update(schema.segment_gone).values(gone_at=0.0))
    store.archiving.sweep(time.time() + _LATER)
    left = _stored(store) ^ _named(store, schema.segment)
    if left or _named(store, schema.segment_gone):
        lives.findings.append(f"after the sweep {len(left)} files are left over or gone: {sorted(left)[:1]}")


def _compare_sums(lives, store):
    """Sums over all points, whatever level they are at."""
    points = layer_points(store, lives.run_id, ["lost"], Selection())
    expected = sum((1 + rank) * lives.ledger.acknowledged[rank] for rank in range(RANKS))
    found = np.nansum(points.totals["lost"], axis=0)
    if points.counts.sum() != max(lives.ledger.acknowledged) or not np.allclose(
        found, 10.0 * expected * np.array([1, 2, 3]), rtol=1e-12
    ):
        lives.findings.append(
            f"after retention {points.counts.sum()} steps sum to {found}, and {expected} were sent"
        )
    if len(points.steps) == points.counts.sum() > 100:
        lives.findings.append("retention has dropped nothing")


def _of_run(paths, lives):
    """Those of the run that ends here: an imported one beside it keeps its own."""
    return {path for path in paths if run_of(path) == lives.run_id}


def _stored(store):
    return {file.path for file in store.archiving.files.stored()}


def _named(store, *tables):
    with store.reading() as connection:
        return {path for table in tables for path in connection.execute(select(table.c.path)).scalars()}
