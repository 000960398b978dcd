"""Damaged archived files: no wrong number is read, the file is named, and back-ups neither take nor keep damage."""

import json
import os
import random
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from collage_server.command.archive import _verified
from collage_server.command.archive import archive as archive_verb
from collage_server.command.backup import backup as backup_verb
from collage_server.errors import Busy, Damaged, DamagedFile, StoreUnusable
from collage_server.store import Selection, schema
from collage_server.store.archive.archive_reader import ArchiveReader
from collage_server.store.archive.archived_file import ArchivedFile
from collage_server.store.archive.file_storage import Folder
from collage_server.store.archive.logged_values import read_logged
from collage_server.store.archive.parquet import Rows, read_groups, read_layers
from collage_server.store.archive.segments import Verified
from collage_server.store.backup import back_up, newest_backup, restore, verify_backup
from collage_server.store.sealing import archive_plan
from sqlalchemy import select, update

from tests.server.migrated import put_migrated
from tests.server.reads import layer_points, model_points, scalar_points
from tests.server.samples import STATISTICS
from tests.server.store.life import CHUNK, filled
from tests.server.store.seen import plain
from tests.server.store.stores import ALL, NOW, archive_all, bits_of, finish, flip, paths
from tests.server.store.stores import opened as opened_store

pytestmark = pytest.mark.slow


def opened(folder):
    """A store with an archive beside it."""
    return opened_store(folder / "collage.sqlite", archive=Folder(folder / "archive"))


def first_of(store):
    """The path of the file of the first fine chunks."""
    return min(path for path in paths(store) if "/level=1/" in path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a store with a finished run, all of it in files of every kind."""
    folder = tmp_path_factory.mktemp("finished")
    put_migrated(folder)
    store = opened(folder)
    filled(store, 10 * CHUNK)
    finish(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_plan, "_CHUNKS", {1: 2, 16: 2})
        archive_all(store)
    store.close()
    return folder


@pytest.fixture
def store(finished, tmp_path):
    """A finished run."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    with closing(opened(tmp_path)) as store:
        yield store


@pytest.fixture
def files(store):
    """The footer of one archived file of each kind, by its path."""
    found = {path.split("/")[3]: (path, footer) for path, footer in store.finished.footers(paths(store)).items()}
    assert {*found} == {*(f"{what}={level}" for what in ("level", "model") for level in (1, 16, 256)), "logged"}
    return dict(found.values())


@pytest.fixture
def archive(tmp_path):
    """Where they lie."""
    return tmp_path / "archive"


def file_of(store, path):
    with store.reading() as connection:
        columns = (schema.segment.c.path, schema.segment.c.bytes, schema.segment.c.digest)
        return ArchivedFile(*connection.execute(select(*columns).where(schema.segment.c.path == path)).one())


def content_of(store, path, footer):
    """All numbers of a file, as the server reads them."""

    def of(source):
        if footer.contents.series:
            return [table.tolist() for _, table in read_logged(source, footer, footer.contents.series)]
        layers = footer.contents.layers
        found = {key: np.zeros((footer.contents.points, layers)) for key in footer.keys}
        read_layers(source, footer, np.arange(layers), [Rows(0, 0, footer.contents.points)], found)
        return {key: values.tobytes() for key, values in found.items()}

    return ArchiveReader(store.archiving.files).read(file_of(store, path), "its content", of)


def refused(store, path, footer, places):
    """How often a file with one of these bits flipped is refused; it is never read with another content."""
    file, times = store.archiving.files.folder / path, 0
    content, before = file.read_bytes(), content_of(store, path, footer)
    for damaged in bits_of(content, places):
        file.write_bytes(damaged)
        try:
            assert content_of(store, path, footer) == before, path
        except Damaged:
            times += 1
    return times


def test_a_flipped_bit_gives_no_wrong_number(store, files):
    generator = random.Random(1)
    for path, footer in files.items():
        size = (store.archiving.files.folder / path).stat().st_size
        places = [generator.randrange(8 * size) for _ in range(40)]
        assert refused(store, path, footer, places), path


def hit(file):
    """A bit of the first page."""
    flip(file, 40)


def cut(file, size=100):
    os.truncate(file, size)


def empty(file):
    cut(file, 0)


def zero(file):
    file.write_bytes(bytes(file.stat().st_size))


def in_turn(files, folder, *damages):
    """The path of a file of each kind, while it is damaged in a folder in each way."""
    for path in files:
        content = (folder / path).read_bytes()
        for damage in damages:
            damage(folder / path)
            yield path
            (folder / path).write_bytes(content)


def test_a_file_that_cannot_be_read_is_named(store, files, archive):
    for path in in_turn(files, archive, cut, empty, zero):
        with pytest.raises(Damaged, match=f"run r1: its content .* the archived file {path} is .* a copy"):
            content_of(store, path, files[path])
    for path in paths(store):
        (archive / path).unlink()
        (archive / path).mkdir()
    for ask in (layer_points, model_points, scalar_points):
        with pytest.raises(Damaged, match=r"run r1: (steps 1 to \d+|what attempt 1 logged as .'loss', 'tokens')"):
            ask(store, "r1", None, ALL)


def test_a_file_that_is_cut_while_it_is_read_does_not_end_the_server(store, files, archive):
    """A memory map of it would: SIGBUS, as for a bad sector or a share that went away."""
    for path, footer in files.items():

        def late(source, path=path, footer=footer):
            empty(archive / path)
            list(read_groups(source, footer, [[0]], footer.metadata.schema.names))

        with pytest.raises(DamagedFile):
            store.archiving.files.read(file_of(store, path), late)


@pytest.fixture
def backed_up(store, archive, tmp_path):
    """The function that makes another back-up, of a store that has one."""
    (tmp_path / "backups").mkdir()
    numbers = count()

    def once_more():
        return back_up(store.path, tmp_path / f"backups/{next(numbers)}", archive=archive)

    assert once_more().copied_files == len(paths(store))
    return once_more


def test_a_damaged_file_is_not_backed_up(store, files, archive, tmp_path):
    for number, path in enumerate(in_turn(files, archive, hit, cut, os.unlink)):
        target = tmp_path / f"backups{number}"
        target.mkdir()
        with pytest.raises(StoreUnusable, match=f"archived file {path} of run r1 .* or delete the run"):
            back_up(store.path, target / "one", archive=archive)
        assert not (target / "one").exists()
        assert not (target / "archive" / path).exists()


def test_a_copy_that_was_cut_is_made_again_and_a_good_one_kept(files, archive, backed_up, tmp_path):
    copies = tmp_path / "backups" / "archive"
    for path in in_turn(files, copies, hit, cut, os.unlink):
        made = backed_up()
        assert (made.copied_files, made.damaged_files) == (1, ())
        assert (copies / path).read_bytes() == (archive / path).read_bytes()
    for path in in_turn(files, archive, cut, os.unlink):
        content = (copies / path).read_bytes()
        made = backed_up()
        assert (made.copied_files, made.damaged_files) == (0, (path,))
        assert (copies / path).read_bytes() == content


def test_a_back_up_that_names_a_file_outside_its_folder_is_refused(backed_up, tmp_path):
    for path in ("../../escaped.parquet", "/escaped.parquet", "p/../../escaped.parquet"):
        file, new = tmp_path / "backups" / "0", tmp_path / "new"
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("UPDATE segment SET path = ? WHERE level = 0", (path,))
        with pytest.raises(StoreUnusable, match=f"names the file {path}, outside the archive"):
            restore(file, new / "it.sqlite", archive=new / "archive")
        assert not new.exists()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["level=256", "model=256", "logged"])
def test_no_flipped_bit_of_a_file_gives_a_wrong_number(store, files, archive, kind):
    [path] = [path for path in files if f"/{kind}/" in path]
    refused(store, path, files[path], range(8 * (archive / path).stat().st_size))


def test_a_flipped_bit_of_what_the_database_says_of_a_file_is_found(store):
    """Of its place, its size, its digest and its footer."""
    path = first_of(store)
    before = plain(layer_points(store, "r1", None, ALL))
    generator, told = random.Random(2), 0
    with closing(sqlite3.connect(store.path)) as connection:
        names = ("first_chunk", "last_chunk", "bytes", "digest", "footer", "path")
        asked = f"SELECT rowid, {', '.join(names)} FROM segment WHERE path = ?"
        [[row, *kept]] = connection.execute(asked, (path,))
        for name, value in 20 * [*zip(names, kept, strict=True)]:
            if isinstance(value, int):
                damaged = value ^ 1 << generator.randrange(31)
            else:
                data = value.encode() if isinstance(value, str) else value
                [damaged] = bits_of(data, [generator.randrange(8 * len(data))])
            cast = "CAST(? AS TEXT)" if isinstance(value, str) else "?"
            store._reader._footers = type(store._reader._footers)(2**25)
            with connection:
                connection.execute(f"UPDATE segment SET {name} = {cast} WHERE rowid = ?", (damaged, row))
            try:
                assert plain(layer_points(store, "r1", None, ALL)) == before, (name, damaged)
            except Busy:
                told += 1
            with connection:
                connection.execute(f"UPDATE segment SET {name} = ? WHERE rowid = ?", (value, row))
    assert told > 80


def test_the_rest_of_a_run_answers_while_a_file_is_damaged(store, archive):
    """And what somebody could not read is verified first."""
    rest = Selection(first_step=2 * CHUNK + 1)
    before = plain(layer_points(store, "r1", None, rest))
    first = first_of(store)
    flip(archive / first, (archive / first).stat().st_size // 3)
    told = f"run r1: steps 1 to {2 * CHUNK} cannot be read, because the archived file {first} is missing or damaged"
    with pytest.raises(Damaged, match=told):
        layer_points(store, "r1", None, ALL)
    assert plain(layer_points(store, "r1", None, rest)) == before
    assert len(model_points(store, "r1", None, ALL).steps) == 10 * CHUNK
    [row] = store.archiving.verification.suspects()
    assert store.archiving.verification.verify(row, NOW).path == first
    assert store.archiving.verification.suspects() == []


def test_a_damaged_file_is_healed_from_the_newest_back_up(store, files, archive, backed_up, tmp_path, caplog):
    newest = newest_backup(tmp_path)
    assert newest is not None
    store.archiving.files.backups = lambda: [Path(newest.archive)]
    for path in in_turn(files, archive, cut, empty, zero, os.unlink):
        good = (tmp_path / "backups" / "archive" / path).read_bytes()
        assert content_of(store, path, files[path])
        assert (archive / path).read_bytes() == good
        assert f"{path}, which" in caplog.text


def verified(store, now=0.0):
    """The outcome of verifying every file."""
    verification = store.archiving.verification
    return {row.path: verification.verify(row, now) for row in verification.due(float("inf"), 100)}


def test_verifying_finds_what_nobody_has_read_and_heals_it(store, archive, backed_up, tmp_path):
    assert {outcome.problem for outcome in verified(store).values()} == {None}
    flipped, gone, *_ = sorted(paths(store))
    hit(archive / flipped)
    (archive / gone).unlink()
    found = verified(store, NOW)
    problems = {flipped: "differs from what was written", gone: "is missing"}
    assert {path: outcome.problem for path, outcome in found.items() if outcome.problem} == problems
    assert store.archiving.verification.problems() == problems
    assert backed_up().damaged_files == (flipped, gone)
    assert store.archiving.verification.due(NOW, 100) == []
    store.archiving.files.backups = lambda: [tmp_path / "backups" / "archive"]
    found = verified(store, NOW + 1)
    assert {path for path, outcome in found.items() if outcome.healed} == {flipped, gone}
    assert store.archiving.verification.problems() == {}


def test_a_file_of_before_there_were_digests_gets_one_when_it_is_verified(store, archive):
    known = {path: file_of(store, path) for path in paths(store)}
    with store.writing() as connection:
        connection.execute(update(schema.segment).values(digest=None, checks=None, checked_at=None))
    flipped = min(known)
    hit(archive / flipped)
    found = verified(store)
    assert found[flipped].problem
    known[flipped] = known[flipped]._replace(digest=None)
    assert {path: file_of(store, path) for path in known} == known
    assert plain(layer_points(store, "r1", None, Selection(first_step=9 * CHUNK)))


def test_rows_stay_until_their_file_was_read_back(tmp_path, monkeypatch):
    """A disk that does not keep what is written to it takes no number with it."""
    put_migrated(tmp_path)
    store = opened(tmp_path)
    filled(store, 10 * CHUNK)
    before, put = plain(layer_points(store, "r1", STATISTICS, ALL)), Folder.put

    def put_badly(self, made, path):
        put(self, made, path)
        hit(self.folder / path)

    monkeypatch.setattr(archive_plan, "_CHUNKS", {1: 2, 16: 2})
    monkeypatch.setattr(Folder, "put", put_badly)
    with pytest.raises(Busy, match="does not keep files as they are written"):
        store.archiving.archive("r1")
    assert paths(store) == set()
    assert plain(layer_points(store, "r1", STATISTICS, ALL)) == before
    store.close()


def test_a_back_up_is_verified_and_its_restore_tried_and_a_damaged_copy_is_not_restored(
    store, files, archive, backed_up, tmp_path
):
    file, new = tmp_path / "backups" / "0", tmp_path / "new"
    count = len(paths(store))
    assert verify_backup(file, with_archive=True).archived_files == count
    tried = restore(file, new / "collage.sqlite", archive=new / "archive", dry_run=True)
    assert (tried.archived_files, tried.copied_files) == (count, count)
    assert not new.exists()
    for number, path in enumerate(in_turn(files, tmp_path / "backups" / "archive", hit, cut, os.unlink)):
        new = tmp_path / f"new{number}"
        into = partial(restore, file, new / "it", archive=new / "archive")
        for ask in (partial(verify_backup, file, with_archive=True), partial(into, dry_run=True), into):
            with pytest.raises(StoreUnusable, match=f"archived file {path} of run r1 is missing or damaged"):
                ask()
        assert not (new / "it").exists()
        assert not (new / "archive" / path).exists()
    with pytest.raises(StoreUnusable, match="exists"):
        restore(file, store.path, archive=archive, dry_run=True)


def told(verb, *arguments):
    """(exit status, what a verb prints, or the error that the command prints)."""
    result = CliRunner().invoke(verb, [*map(str, arguments)])
    return result.exit_code, result.output or str(result.exception)


def test_the_verbs_name_what_is_damaged_and_heal_it(store, archive, tmp_path):
    """In the order in which a person meets it; the server is not running, or serves meanwhile."""
    data = ("--dir", tmp_path)
    count, flipped = len(paths(store)), min(paths(store))
    copy = tmp_path / "copies" / "one"
    copy.parent.mkdir()
    assert f"{count} files, " in told(archive_verb, "verify", "--again", *data)[1]
    assert told(archive_verb, "verify", *data)[1].startswith("0 files, "), "an interrupted call goes on"
    hit(archive / flipped)
    status, text = told(archive_verb, "verify", "--again", "--run", "r1", *data)
    assert status == 1
    assert f"{count} files, " in text
    assert f"{flipped} of run r1 differs from what was written" in text
    status, text = told(backup_verb, "make", copy, *data)
    assert status == 1
    assert f"archived file {flipped} of run r1 is missing or damaged" in text
    hit(archive / flipped)
    assert told(backup_verb, "make", copy, *data)[0] == 0
    good = told(backup_verb, "verify", copy, *data)[1]
    assert f"{count} archived files, all of them good" in good
    tried = told(backup_verb, "restore", copy, "--dry-run", "--dir", tmp_path / "new")[1]
    assert f"{count} archived files, {count} of them would be copied" in tried
    hit(archive / flipped)
    status, text = told(archive_verb, "verify", "--again", "--json", *data)
    assert (status, json.loads(text)["healed"], json.loads(text)["damaged"]) == (0, 1, [])
    hit(tmp_path / "copies" / "archive" / flipped)
    assert told(backup_verb, "verify", copy, *data)[0] == 1


def test_files_that_cannot_be_noted_as_verified_are_read_once():
    """Their rows are damaged, so that they stay due."""
    rows = [SimpleNamespace(path=path) for path in "ab"]
    unnoted = mock.Mock(due=lambda *_: rows, verify=lambda row, _: Verified(row.path, "r1", 1, None, healed=False))
    assert [file.path for file in _verified(unnoted, [], NOW)] == ["a", "b"]
