"""The store's contract where all that is sealed becomes archived files at once, and what archiving alone does.

What hardly seals or is read of files in a bucket by day (`test_archived_elsewhere`) is left to the night.
"""

from __future__ import annotations

from typing import Any

import pytest
from collage_server.store import SqliteStore
from collage_server.store.archive.file_storage import Folder
from collage_server.store.sealing import archive_plan, archiving

from tests.server.migrated import put_migrated
from tests.server.store.contract import LIMITS, StoreContract, reopening
from tests.server.store.laws import LawsContract
from tests.server.store.life import LifeContract
from tests.server.store.parts import PartsContract
from tests.server.store.ranks import RanksContract
from tests.server.store.replicas import ReplicasContract
from tests.server.store.sealed import SealedContract
from tests.server.store.sealing import KilledContract, SealingContract
from tests.server.store.second_writers import SecondWritersContract

pytestmark = pytest.mark.slow

_nightly = pytest.mark.nightly


class ArchivingSealing:
    """Sealing that archives at once what it has sealed."""

    def __init__(self, store):
        self._sealing, self._archiving = store.sealing, store.archiving

    def __getattr__(self, name):
        return getattr(self._sealing, name)

    @property
    def limits(self):
        """When the journal becomes chunks."""
        return self._sealing.limits

    @limits.setter
    def limits(self, limits):
        self._sealing.limits = limits

    def seal(self, run_id, *arguments, **more):
        """Seal, then archive all that is due."""
        parts = self._sealing.seal(run_id, *arguments, **more)
        while self._archiving.archive(run_id):
            pass
        return parts


def opened(path):
    """A store of which `seal` archives, too."""
    store = SqliteStore(path, stale_after_seconds=600.0, limits=LIMITS, archive=Folder(path.parent / "archive"))
    store.open()
    vars(store)["sealing"] = ArchivingSealing(store)
    return store


def archive_at_once(monkeypatch):
    """Whatever is sealed becomes a file, as if the run were over."""
    monkeypatch.setattr(archiving, "is_over", lambda *_: True)


@pytest.fixture(params=[pytest.param("in groups", marks=_nightly), "at once"])
def store(tmp_path, request, monkeypatch):
    monkeypatch.setattr(archive_plan, "_CHUNKS", {1: 2, 16: 2})
    if request.param == "at once":
        archive_at_once(monkeypatch)
    store = opened(put_migrated(tmp_path))
    yield store
    store.close()


@pytest.fixture
def reopen(store):
    yield from reopening(store, lambda: opened(store.path))


class FromFiles:
    """Of the contracts, what asks about rows that are files here; `test_archive_faults` stops halfway there."""

    test_a_run_without_layers_has_whole_chunks_and_no_rows_of_layers: Any = None
    test_the_newest_scalars_are_read_from_the_last_parts: Any = None
    test_an_interrupted_drop_is_finished: Any = None
    test_a_deleted_run_is_invisible_at_once_and_its_rows_go_in_slices: Any = None


class TestArchived(FromFiles, SealingContract, LifeContract):
    """Sealing, retention and deletion."""


@_nightly
class TestArchivedRest(
    FromFiles,
    StoreContract,
    KilledContract,
    PartsContract,
    RanksContract,
    ReplicasContract,
    SealedContract,
    SecondWritersContract,
):
    """What stands in chunks, what hardly seals, and ranks merged."""


class TestArchivedLaws(LawsContract):
    """The store's life, with files."""

    lives = 4
