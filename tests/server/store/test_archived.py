"""The store's contract where all that is sealed becomes archived files: by day in few ways, by night in all.

By day SQLite with a folder, as if runs were over, and of PostgreSQL with a bucket the classes that read and take
late parts.
"""

from contextlib import closing
from itertools import count, product
from typing import Any

import pytest
from collage_server.store.archive.file_storage import Bucket, Folder
from collage_server.store.sealing import archive_plan, archiving

from tests.server.migrated import put_migrated
from tests.server.store.contract import StoreContract
from tests.server.store.laws import LawsContract
from tests.server.store.life import LifeContract
from tests.server.store.ranks import PartsContract, RanksContract, ReplicasContract
from tests.server.store.sealing import KilledContract, SealedContract, SealingContract
from tests.server.store.second_writers import SecondWritersContract
from tests.server.store.stores import archive_all, opened, reopening

pytestmark = pytest.mark.slow

WAYS = [*product(("sqlite", "postgresql"), ("folder", "bucket"), ("in groups", "at once"))]


@pytest.fixture
def open_again(request, tmp_path, monkeypatch):
    """Opens the same store, which archives all that is due once it has sealed; "at once": as when runs end."""
    backend, place, due = request.param
    monkeypatch.setattr(archive_plan, "_CHUNKS", {1: 2, 16: 2})
    if due == "at once":
        monkeypatch.setattr(archiving, "is_over", lambda *_: True)
    database = request.getfixturevalue("database") if backend == "postgresql" else put_migrated(tmp_path)
    bucket = request.getfixturevalue("bucket") if place == "bucket" else None
    caches = count()

    def open_store():
        # Another server has a cache of its own.
        cache = tmp_path / f"cache-{next(caches)}"
        store = opened(database, archive=Bucket(bucket, cache, 2**20) if bucket else Folder(tmp_path / "archive"))
        seal = store.sealing.seal

        def seal_and_archive(run_id, *arguments, **more):
            parts = seal(run_id, *arguments, **more)
            archive_all(store, run_id)
            return parts

        store.sealing.seal = seal_and_archive
        return store

    return open_store


@pytest.fixture
def store(open_again):
    with closing(open_again()) as store:
        yield store


@pytest.fixture
def reopen(store, open_again):
    yield from reopening(store, open_again)


def stored(*by_day, ways=WAYS):
    """The tests of a class in each of these ways, at night where they are not named."""
    marks = {way: () if way in by_day else pytest.mark.nightly for way in ways}
    given = [pytest.param(way, marks=marks[way], id=" ".join(way)) for way in ways]
    return pytest.mark.parametrize("open_again", given, indirect=True)


class FromFiles:
    """Of the contracts, what asks about rows that are files here; `test_archive_faults` stops halfway there."""

    test_a_run_without_layers_has_whole_chunks_and_no_rows_of_layers: Any = None
    test_the_newest_scalars_are_read_from_the_last_parts: Any = None
    test_an_interrupted_drop_is_finished: Any = None
    test_a_deleted_run_is_invisible_at_once_and_its_rows_go_in_slices: Any = None


@stored(("sqlite", "folder", "at once"))
class TestArchived(FromFiles, SealingContract, LifeContract):
    """Sealing, retention and deletion."""


@stored(("postgresql", "bucket", "in groups"))
class TestArchivedElsewhere(FromFiles, PartsContract, SealedContract):
    """Reports of a step in several parts, and what stands in chunks."""


@stored()
class TestArchivedRest(
    FromFiles, StoreContract, KilledContract, RanksContract, ReplicasContract, SecondWritersContract
):
    """What hardly seals, and ranks merged."""


@stored(("sqlite", "folder", "at once"), ways=WAYS[:2])
class TestArchivedLaws(LawsContract):
    """The store's life, with files."""

    lives = 4
