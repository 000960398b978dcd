"""The contract with archived files in a bucket, and with PostgreSQL beside either; `test_archived` has the rest.

On every run PostgreSQL with a bucket, in groups, and the classes that read and take late parts; at night everything
everywhere.
"""

from __future__ import annotations

from typing import Any

import pytest
from collage_server.store import PostgresqlStore, SqliteStore
from collage_server.store.archive.file_storage import Bucket, Folder
from collage_server.store.sealing import archive_plan

from tests.server.migrated import put_migrated
from tests.server.store import test_archived
from tests.server.store.contract import LIMITS, StoreContract, reopening
from tests.server.store.life import LifeContract
from tests.server.store.parts import PartsContract
from tests.server.store.ranks import RanksContract
from tests.server.store.replicas import ReplicasContract
from tests.server.store.sealed import SealedContract
from tests.server.store.sealing import KilledContract, SealingContract

pytestmark = pytest.mark.slow

_CACHE_BYTES = 2**20
_nightly = pytest.mark.nightly


@pytest.fixture(params=["in groups", pytest.param("at once", marks=_nightly)])
def due(request, monkeypatch):
    """When chunks become files."""
    monkeypatch.setattr(archive_plan, "_CHUNKS", {1: 2, 16: 2})
    if request.param == "at once":
        test_archived.archive_at_once(monkeypatch)


@pytest.fixture(
    params=[
        "bucket and postgresql",
        pytest.param("bucket and sqlite", marks=_nightly),
        pytest.param("folder and postgresql", marks=_nightly),
    ]
)
def opened(request, tmp_path, due):
    """Opens the same store, as often as it is called."""
    place, _, backend = request.param.partition(" and ")
    address = request.getfixturevalue("bucket" if place == "bucket" else "tmp_path")
    database = request.getfixturevalue("database") if backend == "postgresql" else put_migrated(tmp_path)
    caches = iter(range(100))

    def open_again():
        if place == "bucket":
            # Another server has a cache of its own.
            files: Any = Bucket(address, tmp_path / f"cache-{next(caches)}", _CACHE_BYTES)
        else:
            files = Folder(address / "archive")
        kind = PostgresqlStore if backend == "postgresql" else SqliteStore
        store: Any = kind(database, stale_after_seconds=600.0, limits=LIMITS, archive=files)
        store.open()
        store.sealing = test_archived.ArchivingSealing(store)
        return store

    return open_again


@pytest.fixture
def store(opened):
    store = opened()
    yield store
    store.close()


@pytest.fixture
def reopen(store, opened):
    yield from reopening(store, opened)


class TestArchivedElsewhere(test_archived.FromFiles, PartsContract, SealedContract):
    """Reports of a step in several parts, and what stands in chunks."""


@_nightly
class TestArchivedElsewhereRest(
    test_archived.FromFiles,
    StoreContract,
    SealingContract,
    KilledContract,
    LifeContract,
    RanksContract,
    ReplicasContract,
):
    """Everything else."""
