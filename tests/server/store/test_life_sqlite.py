"""Retention and deletion on SQLite, and the space that both give back."""

from __future__ import annotations

import pytest
from collage_server.store import SqliteStore

from tests.server.store.contract import LIMITS, NOW
from tests.server.store.life import NEVER, LifeContract, filled
from tests.server.store.second_writers import SecondWritersContract
from tests.server.store.test_sqlite import reopen, store

pytestmark = pytest.mark.slow

__all__ = ["reopen", "store"]


class TestSqliteLife(LifeContract, SecondWritersContract):
    """The contract on SQLite, and who logs beside the training."""


def file_bytes(store):
    with store.writing():
        pass
    store.check()
    return store.path.stat().st_size


def emptied(store):
    slices = 0
    while store.release_space():
        slices += 1
    return slices


def test_deletion_gives_the_space_back_to_the_disk(tmp_path):
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0, limits=LIMITS)
    store.open()
    empty = store.sizes().used_bytes
    for number in range(4):
        filled(store, 8 * 32, f"r{number}")
    store.close()
    store.open()
    full, used = file_bytes(store), store.sizes().used_bytes
    for number in range(3):
        store.runs.delete(f"r{number}", NOW)
    left = store.sizes().used_bytes
    assert left - empty < 0.35 * (used - empty)
    assert file_bytes(store) == full
    emptied(store)
    store.close()
    assert (tmp_path / "collage.sqlite").stat().st_size <= left < full
    assert not store.path.with_name("collage.sqlite-wal").exists()


def test_retention_gives_the_space_back(tmp_path):
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0, limits=LIMITS)
    store.open()
    filled(store, 16 * 32)
    full = store.sizes().used_bytes
    assert store.retention.expire("r1", NEVER) == 30
    emptied(store)
    assert store.sizes().used_bytes < full
    store.close()


def test_space_is_returned_in_slices(tmp_path, monkeypatch):
    monkeypatch.setattr("collage_server.store.engine.database_files._PAGES_A_SLICE", 2)
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0, limits=LIMITS)
    store.open()
    filled(store, 8 * 32)
    store.runs.delete("r1", NOW)
    assert emptied(store) > 3
    assert not store.release_space()
    store.close()
