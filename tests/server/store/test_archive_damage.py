"""Damaged archived files: no wrong number is read, the file is named, and back-ups neither take nor keep damage."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import closing
from itertools import count

import numpy as np
import pytest
from collage_server.errors import Busy, DamagedFile, StoreUnusable
from collage_server.store import SqliteStore, schema
from collage_server.store.archive.file_storage import Folder
from collage_server.store.archive.logged_values import read_logged
from collage_server.store.archive.parquet import Rows, read_groups, read_layers
from collage_server.store.backup import back_up, restore
from collage_server.store.sealing import archive_plan
from sqlalchemy import select

from collage_monitor import wire
from tests.server.migrated import put_migrated
from tests.server.reads import layer_points, model_points, scalar_points
from tests.server.samples import report
from tests.server.store.contract import LIMITS, NOW, StoreContract
from tests.server.store.seen import AFTER_SILENCE, ALL, seal_all


def opened(folder):
    """A store with an archive beside it."""
    archive = Folder(folder / "archive")
    store = SqliteStore(folder / "collage.sqlite", stale_after_seconds=600.0, limits=LIMITS, archive=archive)
    store.open()
    return store


def paths(store):
    with store.reading() as connection:
        return set(connection.execute(select(schema.segment.c.path)).scalars())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a store with a finished run, all of it in files of every kind."""
    folder = tmp_path_factory.mktemp("finished")
    put_migrated(folder)
    store = opened(folder)
    StoreContract.append(store, StoreContract.fill(store), *(report(i, i + 1) for i in range(10 * LIMITS.points)))
    seal_all(store)
    store.runs.update("r1", wire.RunUpdate(state="finished"), NOW)
    seal_all(store, now=AFTER_SILENCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_plan, "_CHUNKS", {1: 2, 16: 2})
        while store.archiving.archive("r1"):
            pass
    store.close()
    return folder


@pytest.fixture
def kinds(finished, tmp_path):
    """(store, path and footer of one file of each kind) of a finished run."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    store = opened(tmp_path)
    found = {path.split("/")[3]: (path, footer) for path, footer in store.finished.footers(paths(store)).items()}
    assert {*found} == {*(f"{what}={level}" for what in ("level", "model") for level in (1, 16, 256)), "logged"}
    yield store, [*found.values()]
    store.close()


def content_of(store, path, footer):
    """All numbers of a file, as the server reads them."""
    with store.archiving.files.open(path) as source:
        if footer.contents.series:
            return [table.tolist() for _, table in read_logged(source, footer, footer.contents.series)]
        layers = footer.contents.layers
        found = {key: np.zeros((footer.contents.points, layers)) for key in footer.keys}
        read_layers(source, footer, np.arange(layers), [Rows(0, 0, footer.contents.points)], found)
        return {key: values.tobytes() for key, values in found.items()}


def test_a_flipped_bit_gives_no_wrong_number(kinds):
    store, files = kinds
    generator = random.Random(1)
    for path, footer in files:
        file = store.archiving.files.folder / path
        content, before, refused = file.read_bytes(), content_of(store, path, footer), 0
        for _ in range(40):
            damaged, place = bytearray(content), generator.randrange(8 * len(content))
            damaged[place // 8] ^= 1 << place % 8
            file.write_bytes(damaged)
            try:
                found = content_of(store, path, footer)
            except Busy:
                refused += 1
            else:
                assert found == before, (path, place)
        assert refused, path


def flip(file):
    """Flip a bit of the first page."""
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)


def cut(file):
    os.truncate(file, 100)


def empty(file):
    os.truncate(file, 0)


def zero(file):
    file.write_bytes(bytes(file.stat().st_size))


def in_turn(kinds, folder, *damages):
    """The path of a file of each kind, while it is damaged in a folder in each way."""
    for path, _ in kinds[1]:
        content = (folder / path).read_bytes()
        for damage in damages:
            damage(folder / path)
            yield path
            (folder / path).write_bytes(content)


def test_a_file_that_cannot_be_read_is_named(kinds, tmp_path):
    store, footers = kinds[0], dict(kinds[1])
    for path in in_turn(kinds, tmp_path / "archive", cut, empty, zero):
        told = f"archived file {path} of run r1 cannot be read, the server's log says why: .* from a back-up"
        with pytest.raises(Busy, match=told):
            content_of(store, path, footers[path])
    for path in paths(store):
        (tmp_path / "archive" / path).unlink()
        (tmp_path / "archive" / path).mkdir()
    for ask in (layer_points, model_points, scalar_points):
        with pytest.raises(Busy, match="of run r1 cannot be read"):
            ask(store, "r1", None, ALL)


def test_a_file_that_is_cut_while_it_is_read_does_not_end_the_server(kinds, tmp_path):
    """A memory map of it would: SIGBUS, as for a bad sector or a share that went away."""
    for path, footer in kinds[1]:
        with kinds[0].archiving.files.open(path) as source:
            empty(tmp_path / "archive" / path)
            with pytest.raises(DamagedFile):
                list(read_groups(source, footer, [[0]], footer.metadata.schema.names))


@pytest.fixture
def backed_up(kinds, tmp_path):
    """The function that makes another back-up, of a store that has one."""
    (tmp_path / "backups").mkdir()
    numbers = count()

    def once_more():
        return back_up(kinds[0].path, tmp_path / f"backups/{next(numbers)}", archive=tmp_path / "archive")

    assert once_more().copied_files == len(paths(kinds[0]))
    return once_more


def test_a_damaged_file_is_not_backed_up(kinds, tmp_path):
    for number, path in enumerate(in_turn(kinds, tmp_path / "archive", flip, cut, os.unlink)):
        target = tmp_path / f"backups{number}"
        target.mkdir()
        with pytest.raises(StoreUnusable, match=f"archived file {path} of run r1 .* or delete the run"):
            back_up(kinds[0].path, target / "one", archive=tmp_path / "archive")
        assert not (target / "one").exists()
        assert not (target / "archive" / path).exists()


def test_a_copy_that_was_cut_is_made_again_and_a_good_one_kept(kinds, backed_up, tmp_path):
    archive, copies = tmp_path / "archive", tmp_path / "backups" / "archive"
    for path in in_turn(kinds, copies, cut, os.unlink):
        made = backed_up()
        assert (made.copied_files, made.damaged_files) == (1, ())
        assert (copies / path).read_bytes() == (archive / path).read_bytes()
    for path in in_turn(kinds, archive, cut, os.unlink):
        content = (copies / path).read_bytes()
        made = backed_up()
        assert (made.copied_files, made.damaged_files) == (0, (path,))
        assert (copies / path).read_bytes() == content


def test_a_damaged_copy_is_not_restored(kinds, backed_up, tmp_path):
    for number, path in enumerate(in_turn(kinds, tmp_path / "backups" / "archive", flip, cut, os.unlink)):
        new = tmp_path / f"new{number}"
        with pytest.raises(StoreUnusable, match=f"archived file {path} of run r1 .* from another back-up"):
            restore(tmp_path / "backups" / "0", new / "collage.sqlite", archive=new / "archive")
        assert not (new / "collage.sqlite").exists()
        assert not (new / "archive" / path).exists()


def test_a_back_up_that_names_a_file_outside_its_folder_is_refused(backed_up, tmp_path):
    for path in ("../../escaped.parquet", "/escaped.parquet", "p/../../escaped.parquet"):
        with closing(sqlite3.connect(tmp_path / "backups" / "0")) as connection, connection:
            connection.execute("UPDATE segment SET path = ? WHERE level = 0", (path,))
        with pytest.raises(StoreUnusable, match=f"names the file {path}, outside the archive"):
            restore(tmp_path / "backups" / "0", tmp_path / "x" / "it.sqlite", archive=tmp_path / "x" / "archive")
        assert not (tmp_path / "x").exists()
