"""Archived files in a folder and in a bucket: the cache's bound, what is fetched how often, what a fault says."""

import os
import signal
import socketserver
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest import mock

import obstore
import pytest
from collage_server.errors import Busy, DamagedFile, StoreUnusable
from collage_server.publishing import publish
from collage_server.store.archive import file_storage
from collage_server.store.archive.archived_file import ArchivedFile, digest_of
from collage_server.store.archive.file_storage import Bucket, Folder, archive_files
from obstore.store import from_url

from collage_monitor.command.query import open_fleet
from tests.server import fleet
from tests.server.migrated import put_migrated
from tests.server.store.stores import NOW, opened, purge_all

SIZE = 1000
_KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}
_KEYS |= {"AZURE_STORAGE_ACCOUNT_NAME": "me", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}


@pytest.fixture
def archive(bucket, tmp_path):
    """A bucket whose cache holds three files."""
    return Bucket(bucket, tmp_path / "cache", 3 * SIZE)


@pytest.fixture
def other(archive, tmp_path):
    """The same bucket as another server sees it, which has nothing in its cache."""
    return Bucket(archive.address, tmp_path / "other", 3 * SIZE)


def keep(archive, name, content=b"x" * SIZE):
    """Put a file; what a database says of it."""
    path = f"p/run=r1/1/{name}.parquet"
    with archive.new_file() as made:
        made.write_bytes(content)
        file = ArchivedFile(path, len(content), digest_of(made))
        archive.put(made, path)
    return file


def read(archive, file):
    """What stands in a file."""
    return archive.read(file, lambda source: source.read())


def cached(archive):
    """What lies in the cache, by name."""
    return {path.stem: path for path in archive._cache.rglob("*.parquet")}


def fetching():
    """Counts what is fetched from the object store."""
    return mock.patch.object(obstore, "get", wraps=obstore.get)


def fetched(get):
    """Their paths."""
    return [call.args[1] for call in get.call_args_list]


def test_what_was_not_read_for_longest_leaves_the_cache_first(archive):
    paths = {name: keep(archive, name) for name in "abc"}
    for age, name in enumerate("abc"):
        os.utime(cached(archive)[name], (age, age))
    read(archive, paths["a"])
    oldest = "b"
    keep(archive, "d")
    assert set(cached(archive)) == {*"abcd"} - {oldest}
    assert sum(path.stat().st_size for path in cached(archive).values()) <= 3 * SIZE
    assert read(archive, paths[oldest]) == b"x" * SIZE
    assert len(cached(archive)) == 3


def test_a_file_that_is_sent_in_parts_comes_back_as_it_was(archive, other):
    content = os.urandom(12 * 2**20 + 7)
    assert read(other, keep(archive, "a", content)) == content


def test_a_file_that_is_being_read_can_leave_the_cache(archive):
    def slowly(source):
        for name in "bcd":
            keep(archive, name)
        assert "a" not in cached(archive)
        return source.read()

    assert archive.read(keep(archive, "a", b"a" * SIZE), slowly) == b"a" * SIZE


def test_threads_that_ask_for_one_file_fetch_it_once(archive, other):
    path = keep(archive, "a", b"a" * SIZE)
    together = threading.Barrier(8)

    def ask(_):
        together.wait()
        return read(other, path)

    with fetching() as get, ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {b"a" * SIZE}
    assert fetched(get) == [path.path]
    assert not other._fetching


def test_a_file_that_leaves_the_cache_before_it_is_opened_is_fetched_again(archive, monkeypatch):
    path, local = keep(archive, "a"), archive.local
    left = iter((True, True, False))

    def lost(asked):
        found = local(asked)
        if next(left):
            found.unlink()
        return found

    monkeypatch.setattr(archive, "local", lost)
    with fetching() as get:
        assert read(archive, path) == b"x" * SIZE
    assert fetched(get) == [path.path, path.path]


def test_a_cached_copy_that_cannot_be_read_is_fetched_again(archive):
    """One bad read of a bucket, or a bad block of the local disk, stayed for good."""

    def checked(source):
        content = source.read()
        if content != b"x" * SIZE:
            raise DamagedFile("a page is not as it was written")
        return content

    file = keep(archive, "a")
    for damage in (b"y" * SIZE, b"x" * (SIZE - 1), b""):
        cached(archive)["a"].write_bytes(damage)
        assert archive.read(file, checked) == b"x" * SIZE
    assert cached(archive)["a"].read_bytes() == b"x" * SIZE


def test_what_a_bucket_damaged_is_not_cached_and_comes_back_from_a_back_up(archive, other, tmp_path):
    file = keep(archive, "a")
    for damage in (b"y" * SIZE, b"x" * (SIZE - 1), None):
        obstore.delete(other._bucket, file.path)
        if damage is not None:
            obstore.put(other._bucket, file.path, damage)
        with pytest.raises(DamagedFile):
            read(other, file)
        assert not cached(other)
        assert [*other.suspects] == [file.path]
    copy = tmp_path / "copies" / file.path
    copy.parent.mkdir(parents=True)
    other.backups = lambda: [tmp_path / "none", tmp_path / "copies"]
    copy.write_bytes(b"z" * SIZE)
    with pytest.raises(DamagedFile):
        read(other, file)
    copy.write_bytes(b"x" * SIZE)
    assert read(other, file) == b"x" * SIZE
    assert other.examine(file) is None


@pytest.mark.parametrize("kind", ["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def test_a_missing_file_says_what_to_do(kind, tmp_path, request):
    archive = Folder(tmp_path) if kind == "folder" else request.getfixturevalue("archive")
    there = keep(archive, "there")
    none = "p/run=r1/1/none.parquet"
    with pytest.raises(DamagedFile, match="missing"):
        read(archive, ArchivedFile(none, SIZE, b""))
    archive.delete([none])
    assert len(read(archive, there)) == SIZE, "one that is missing says nothing of the others"


def test_a_bucket_that_does_not_answer_is_left_alone_for_a_while(archive, object_store, monkeypatch, request):
    """Whoever waits for it holds a reader's place: a few may, and the others are told at once."""
    path = keep(archive, "a")
    monkeypatch.setattr(file_storage, "_CLIENT", {**file_storage._CLIENT, "read_timeout": "1s"})
    monkeypatch.setattr(file_storage, "_PAUSE_SECONDS", 3600.0)
    other = request.getfixturevalue("other")
    object_store.signal(signal.SIGSTOP)
    try:
        with fetching() as get:
            for _ in range(3):
                with pytest.raises(Busy, match="log says why: older points wait for it; newer ones can be asked"):
                    read(other, path)
        assert fetched(get) == [path.path]
        with pytest.raises(Busy), other.new_file():
            pytest.fail("no file is made for a bucket that takes none")
    finally:
        object_store.signal(signal.SIGCONT)
    other._away_until = 0.0
    assert len(read(other, path)) == SIZE


def test_a_bucket_that_refuses_or_is_not_there_is_told_in_the_log(bucket, tmp_path, monkeypatch, caplog):
    with pytest.raises(Busy, match="the archive s3://no-such-bucket cannot be used"):
        list(Bucket("s3://no-such-bucket", tmp_path, SIZE).stored())
    assert "NoSuchBucket" in caplog.text, "no missing file"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    archive = Bucket(bucket, tmp_path, SIZE)
    file = ArchivedFile("a.parquet", SIZE, b"")
    for ask in (lambda: read(archive, file), lambda: list(archive.stored()), lambda: keep(archive, "a")):
        caplog.clear()
        archive._away_until = 0.0
        with pytest.raises(Busy, match="cannot be used now"):
            ask()
        assert "SignatureDoesNotMatch" in caplog.text


def test_what_is_stored_is_listed_with_its_age_and_goes_when_told(archive, tmp_path):
    for some in (archive, Folder(tmp_path / "folder")):
        paths = {keep(some, f"0-1-{name * 32}") for name in "ab"}
        with some.new_file():
            found = list(some.stored())
        assert {file.path for file in found} == {file.path for file in paths}
        assert all(abs(file.modified_at - Path(tmp_path).stat().st_mtime) < 600 for file in found)
        some.delete([*(file.path for file in paths), "p/run=r1/1/none.parquet"])
        assert list(some.stored()) == []
    assert cached(archive) == {}
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [".staging"]


def steps(monkeypatch):
    """Synchronisations and renames as they come: ("sync" or "rename", path)."""
    seen, sync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        seen.append(("sync", Path(f"/proc/self/fd/{descriptor}").resolve()))
        sync(descriptor)

    def renamed(path, target):
        seen.append(("rename", Path(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    return seen


def test_what_a_folder_keeps_is_on_the_disk_before_anybody_is_told(tmp_path, monkeypatch):
    archive = Folder(tmp_path / "archive")
    with archive.new_file() as made:
        made.write_bytes(b"1")
        seen = steps(monkeypatch)
        archive.put(made, "run/1/1/a.parquet")
    run = tmp_path / "archive" / "run"
    folders = (run / "1/1", run / "1", run, tmp_path / "archive")
    assert seen == [("sync", made), ("rename", run / "1/1/a.parquet"), *(("sync", folder) for folder in folders)]


def test_what_is_cached_was_on_the_disk_before_it_had_its_name(archive, other, monkeypatch):
    """A power cut would else leave a file of zeros, which would be read for ever."""
    path = keep(archive, "a")
    seen = steps(monkeypatch)
    read(other, path)
    assert [what for what, _ in seen] == ["sync", "rename"]


def test_a_folder_that_is_something_else_is_away(tmp_path):
    (tmp_path / "archive").write_text("no folder")
    with pytest.raises(Busy, match="cannot be used now"):
        keep(Folder(tmp_path / "archive"), "a")


class Listener(BaseHTTPRequestHandler):
    """Notes who asks for what, and breaks off after half of the answer."""

    asked: list[tuple[str, str]]

    def do_GET(self):
        """An object, cut off."""
        self.asked.append((self.path, self.headers.get("authorization") or ""))
        self.send_response(200)
        for name, value in (("Content-Length", "1000"), ("ETag", '"e"')):
            self.send_header(name, value)
        self.send_header("Last-Modified", self.date_time_string())
        self.end_headers()
        self.wfile.write(b"x" * 500)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def listener(monkeypatch):
    """(address, what is asked for) of a server that is no object store."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    asked: list[tuple[str, str]] = []
    kind = type("Own", (Listener,), {"asked": asked})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("url", "settings", "path", "signed"),
    [
        ("s3://b/folder", {"AWS_ENDPOINT_URL": "*", "AWS_REGION": "eu-1"}, "/b/folder", "Credential=me/ /eu-1/s3"),
        ("s3://b", {"AWS_ENDPOINT": "*", "AWS_DEFAULT_REGION": "eu-2"}, "/b", "Credential=me/ /eu-2/s3"),
        ("s3://b", {"AWS_ENDPOINT_URL_S3": "*"}, "/b", "Credential=me/"),
        ("az://c", {"AZURE_STORAGE_ENDPOINT": "*"}, "/c", "SharedKey me:"),
        ("gs://b", {"GOOGLE_BASE_URL": "*", "GOOGLE_SKIP_SIGNATURE": "true"}, "/b", ""),
    ],
)
def test_who_may_use_a_bucket_comes_from_the_environment(
    listener, tmp_path, monkeypatch, url, settings, path, signed
):
    address, asked = listener
    for name, value in (_KEYS | settings).items():
        monkeypatch.setenv(name, address if value == "*" else value)
    archive = archive_files(url, tmp_path, SIZE)
    assert isinstance(archive, Bucket)
    with pytest.raises(Busy, match="cannot be used now"):
        read(archive, ArchivedFile("object", SIZE, b""))
    assert asked[0][0] == f"{path}/object"
    assert all(part in asked[0][1] for part in signed.split())
    assert list(tmp_path.rglob("object")) == [], "half of a file is none"


def test_an_address_that_cannot_be_used_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    for address in ("ftp://host/folder", "gs://b", "az://"):
        with pytest.raises(StoreUnusable, match=f"the archive {address} cannot be used"):
            archive_files(address, tmp_path, SIZE)


def published_steps(archive):
    with open_fleet(archive) as connection:
        sql = "select run, count(*), sum(lost) from layers join runs using (project, run) group by run order by run"
        return connection.sql(sql).fetchall()


def test_a_bucket_holds_the_table_beside_the_files(bucket, tmp_path):
    """Published, asked, made anew, a run deleted; one of the runs resumed, so that a file of it is copied."""
    archive, runs = f"{bucket}/cold", fleet.FLEET[3:5]
    store = opened(put_migrated(tmp_path), archive=archive_files(archive, tmp_path / "cache", 2**30))
    fleet.fill(store, runs)
    fleet.archive_all(store, runs)
    assert publish(store, "p").runs == 2
    found = published_steps(archive)
    assert [(run, rows) for run, rows, _ in found] == [("light-3", 240), ("plain-wide", 240)]
    assert publish(store, "p").added == 0
    objects = from_url(archive, client_options={"allow_http": True})
    log = [entry["path"] for part in obstore.list(objects) for entry in part if "_delta_log" in entry["path"]]
    obstore.delete(objects, log)
    assert publish(store, "p").added > 0
    assert published_steps(archive) == found
    store.runs.delete("plain-wide", NOW)
    purge_all(store, 100)
    publish(store, "p")
    assert published_steps(archive) == found[:1]
    kept = [entry["path"] for part in obstore.list(objects) for entry in part]
    assert not any("plain-wide" in path and "visible-" in path for path in kept)
    store.close()
