"""What keeps archived files: a folder, or a bucket with a local cache. Files are written once and never change.

A file's path is relative, and says what it holds: see `collage_server.store.archive.paths`.

All reading and writing of archived files goes through `ArchiveFiles`; a new kind of place implements the same
methods as `Folder` and `Bucket` (`tests/server/store/test_archive_files.py`).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, TypeVar

import obstore
import pyarrow
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore, from_url

from collage_server.errors import Busy, DamagedFile, StoreUnusable
from collage_server.store.archive.archived_file import ArchivedFile
from collage_server.store.archive.paths import MARK, SUFFIX, is_archived, is_copy, place_in, project_folder
from collage_server.store.engine.database_files import sync

__all__ = ["ArchiveFiles", "Bucket", "Folder", "StoredFile", "archive_files"]

_LOG: Final = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 30
_PAUSE_SECONDS: Final = 30.0
"""A bucket that failed is left alone for so long: whoever waits for it holds up readers or sealing."""
_OPENINGS: Final = 3
_STAGING: Final = ".staging"
_CLIENT: Final[Any] = {"timeout": "600s", "read_timeout": "20s", "connect_timeout": "5s", "allow_http": True}
_TRIES: Final[Any] = {"max_retries": 2, "retry_timeout": timedelta(seconds=5)}
_UPLOADS: Final = 4
"""Parts of 5 MiB of one file that are sent at a time: each must be taken within the read timeout."""
_LOG_CHARACTERS: Final = 600
"""A bucket names the path twice before it says why it refuses."""
_PRIVATE_FOLDER: Final = 0o700


_Found = TypeVar("_Found")


class StoredFile(NamedTuple):
    """A file that is there, and when it was written (Unix seconds)."""

    path: str
    modified_at: float


class ArchiveFiles(ABC):
    """Files by path. Every method may be called from any thread; it blocks, and raises Busy without an answer."""

    staging: Path
    """A local folder in which files are made."""
    address: str
    """The folder's path, or the bucket's URL."""
    options: Mapping[str, str]
    """What other libraries need to be told beside the environment to use the address."""

    def __init__(self) -> None:
        self.backups: Callable[[], Sequence[Path]] = tuple
        """Folders with copies of files, made by back-ups."""
        self.suspects: dict[str, ArchivedFile] = {}
        """Files by path that somebody could not read as they were written, until they are verified."""

    @abstractmethod
    def put(self, made: Path, path: str) -> None:
        """Keep a local file under the path, durably, and remove the local one."""

    @abstractmethod
    def local(self, file: ArchivedFile) -> Path:
        """The file on this machine's disk, to be opened now; fetched first where it lies elsewhere.

        Raises:
            DamagedFile: what was fetched differs from what was written.
        """

    @abstractmethod
    def whole(self, path: str) -> AbstractContextManager[Path]:
        """The file as it is stored, not a cached copy of it, on this machine's disk."""

    def read(self, file: ArchivedFile, of: Callable[[pyarrow.NativeFile], _Found]) -> _Found:
        """What `of` reads out of the file; it may be removed meanwhile. A missing or damaged one is healed first.

        Raises:
            DamagedFile: it is missing or damaged, and no good copy is known.
            Busy: what keeps it does not answer.
        """
        try:
            return self._read(file, of)
        except DamagedFile as error:
            _LOG.error("the archived file %s cannot be read: %s", file.path, " ".join(error.message.split()))
            self.suspects[file.path] = file
            if self.heal(file) is not None:
                raise
        return self._read(file, of)

    def _read(self, file: ArchivedFile, of: Callable[[pyarrow.NativeFile], _Found]) -> _Found:
        with self._opened(file) as source:
            if source.size() != file.size:
                raise DamagedFile(f"it has {source.size()} bytes instead of {file.size}")
            return of(source)

    def _opened(self, file: ArchivedFile) -> pyarrow.NativeFile:
        for _ in range(_OPENINGS):
            try:
                return pyarrow.OSFile(str(self.local(file)))
            except FileNotFoundError:
                continue  # A cache may drop it between the two.
            except OSError as error:
                raise DamagedFile(str(error)) from error
        raise DamagedFile("it is missing")

    def examine(self, file: ArchivedFile) -> str | None:
        """What is wrong with the file as it is stored; None if nothing. All of it is read.

        Raises:
            Busy: what keeps it does not answer.
        """
        try:
            with self.whole(file.path) as stored:
                return file.problem_of(stored)
        except (FileNotFoundError, DamagedFile):
            return "is missing"

    def heal(self, file: ArchivedFile) -> str | None:
        """Put a back-up's copy in the place of a missing or damaged file; what is wrong with it afterwards, if
        anything.

        Raises:
            Busy: what keeps it does not answer, or takes no files.
        """
        self._drop_cached(file.path)
        problem = self.examine(file)
        for folder in self.backups() if problem is not None else ():
            if file.problem_of(copy := place_in(folder, file.path)) is None:
                with self.new_file() as made:
                    shutil.copyfile(copy, made)
                    self.put(made, file.path)
                _LOG.warning("the archived file %s, which %s, was put back from %s", file.path, problem, folder)
                return self.examine(file)
        return problem

    @abstractmethod
    def _drop_cached(self, path: str) -> None:
        """Forget a local copy that cannot be read: the next reader fetches the file again."""

    @abstractmethod
    def delete(self, paths: Collection[str]) -> None:
        """Remove files; one that is not there is no error."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the place itself is there: a folder is made for the first file."""

    @abstractmethod
    def holds(self, path: str) -> bool:
        """Whether a file is there."""

    @abstractmethod
    def read_mark(self) -> bytes | None:
        """What the mark says; None where there is none."""

    @abstractmethod
    def write_mark(self, data: bytes) -> None:
        """Write the mark, unless one is there."""

    def stored(self) -> Iterator[StoredFile]:
        """Every archived file that is there."""
        return (file for file in self._listed() if is_archived(file.path))

    def copies(self, project: str) -> Iterator[StoredFile]:
        """Every copy of visible points that publishing has put beside a project's archived files."""
        found = self._listed(project_folder(project))
        return (file for file in found if is_copy(file.path))

    @abstractmethod
    def _listed(self, folder: str = "") -> Iterator[StoredFile]:
        """Every Parquet file that is there, or in a folder."""

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """A local path to write to, gone after the context unless it was put."""
        with self._usable():
            self.staging.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
            descriptor, name = tempfile.mkstemp(suffix=SUFFIX, dir=self.staging)
            os.close(descriptor)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Translates errors of a local or shared disk into this server's errors."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _log_and_busy(self.address, error) from error

    def sweep_staging(self, older_than_seconds: float) -> None:
        """Remove the unfinished files of a killed process."""
        for path in self.staging.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - older_than_seconds:
                    path.unlink()


class Folder(ArchiveFiles):
    """Files in a folder, which servers on several machines may share."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.address = str(folder)
        self.options = {}
        self.staging = folder / _STAGING

    def put(self, made: Path, path: str) -> None:
        """Rename it: the file's bytes and its entry are on the disk when this returns."""
        target = place_in(self.folder, path)
        with self._usable():
            target.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
            sync(made)
            made.rename(target)
            for folder in (target.parent, *target.parent.parents):
                sync(folder)
                if folder == self.folder:
                    break

    def local(self, file: ArchivedFile) -> Path:
        """Where it is."""
        return place_in(self.folder, file.path)

    @contextmanager
    def whole(self, path: str) -> Iterator[Path]:
        """Where it is."""
        yield place_in(self.folder, path)

    def delete(self, paths: Collection[str]) -> None:
        """Remove files, and the folders that are empty then."""
        for path in paths:
            target = place_in(self.folder, path)
            target.unlink(missing_ok=True)
            with suppress(OSError):
                for folder in target.relative_to(self.folder).parents:
                    if folder != Path():
                        (self.folder / folder).rmdir()

    def _drop_cached(self, path: str) -> None:
        """Nothing: no copy is kept of a folder's files."""

    def exists(self) -> bool:
        """Whether the folder has been made: the first file does."""
        return self.folder.exists()

    def holds(self, path: str) -> bool:
        """Whether a file is there."""
        return place_in(self.folder, path).exists()

    def read_mark(self) -> bytes | None:
        """What the mark says; None where there is none, or no folder."""
        try:
            with self._usable():
                return (self.folder / MARK).read_bytes()
        except FileNotFoundError:
            return None

    def write_mark(self, data: bytes) -> None:
        """Write the mark, unless one is there, and make the folder; two servers at once may both write it."""
        mark = self.folder / MARK
        with self._usable():
            self.folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
            if mark.exists():
                return
            # Written whole. If two databases begin here at once, the first to read the mark again is refused.
            descriptor, made = tempfile.mkstemp(dir=self.folder, prefix="_")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            sync(Path(made))
            Path(made).replace(mark)
            sync(self.folder)

    def _listed(self, folder: str = "") -> Iterator[StoredFile]:
        for path in (self.folder / folder).rglob(f"*{SUFFIX}"):
            if path.parent != self.staging:
                with suppress(FileNotFoundError):
                    yield StoredFile(path.relative_to(self.folder).as_posix(), path.stat().st_mtime)


class Bucket(ArchiveFiles):
    """Files in an object store, with a cache of at most so many bytes on this machine's disk.

    A file is fetched as a whole once, and compared with its digest. It never changes, so the cache is never stale.
    Those not read for longest go first.
    """

    def __init__(self, url: str, cache: Path, cache_bytes: int) -> None:
        super().__init__()
        self.address = url.rstrip("/")
        self.options = {"allow_http": "true", "timeout": "60s", "connect_timeout": "5s"}
        self._cache = cache
        self._cache_bytes = cache_bytes
        self.staging = cache / _STAGING
        self._lock = Lock()
        self._fetching: dict[str, Lock] = defaultdict(Lock)
        self._away_until = 0.0
        try:
            self._bucket: ObjectStore = from_url(url, client_options=_CLIENT, retry_config=_TRIES)
        except (BaseError, ValueError) as error:
            raise StoreUnusable(f"the archive {url} cannot be used: {error}") from error

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """A local path to write to; Busy at once where the bucket has just failed to take a file."""
        with self._answering():
            pass
        with super().new_file() as made:
            yield made

    def put(self, made: Path, path: str) -> None:
        """Upload it and keep it in the cache."""
        with self._answering():
            obstore.put(self._bucket, path, made, max_concurrency=_UPLOADS)
        with self._usable():
            self._keep(made, path)

    def local(self, file: ArchivedFile) -> Path:
        """The cached file, fetched if it is not there."""
        path, cached = file.path, place_in(self._cache, file.path)
        with self._lock:
            mine = self._fetching[path]
        try:
            with mine, self._usable():
                try:
                    os.utime(cached)
                except FileNotFoundError:
                    self._fetch(file)
        finally:
            with self._lock:
                self._fetching.pop(path, None)
        return cached

    def delete(self, paths: Collection[str]) -> None:
        """Remove files from the bucket and the cache."""
        with self._answering():
            for path in paths:
                with suppress(FileNotFoundError):
                    obstore.delete(self._bucket, path)
                self._drop_cached(path)

    def _drop_cached(self, path: str) -> None:
        place_in(self._cache, path).unlink(missing_ok=True)

    def exists(self) -> bool:
        """Buckets are made by whoever owns them."""
        return True

    def holds(self, path: str) -> bool:
        """Whether a file is there."""
        with self._answering():
            try:
                obstore.head(self._bucket, path)
            except FileNotFoundError:
                return False
            return True

    def read_mark(self) -> bytes | None:
        """What the mark says; None where there is none."""
        with self._answering():
            try:
                return bytes(obstore.get(self._bucket, MARK).bytes())
            except FileNotFoundError:
                return None

    def write_mark(self, data: bytes) -> None:
        """Write the mark, unless one is there; where the store cannot tell, the last one to write it stays."""
        with self._answering(), suppress(AlreadyExistsError):
            obstore.put(self._bucket, MARK, data, mode="create")

    def _listed(self, folder: str = "") -> Iterator[StoredFile]:
        with self._answering():
            for some in obstore.list(self._bucket, prefix=folder or None):
                for found in some:
                    path = str(found["path"])
                    if path.endswith(SUFFIX):
                        yield StoredFile(path, found["last_modified"].timestamp())

    @contextmanager
    def whole(self, path: str) -> Iterator[Path]:
        """A copy of what the bucket holds now, gone after the context unless it was kept."""
        with super().new_file() as made:
            with made.open("wb") as file:
                for piece in self._pieces(path):
                    file.write(piece)
            yield made

    def _fetch(self, file: ArchivedFile) -> None:
        with self.whole(file.path) as made:
            problem = file.problem_of(made)
            if problem is not None:
                raise DamagedFile(f"what the bucket holds {problem}")
            self._keep(made, file.path)

    def _pieces(self, path: str) -> Iterator[obstore.Bytes]:
        with self._answering(path):
            yield from obstore.get(self._bucket, path).stream(min_chunk_size=2**20)

    def _keep(self, made: Path, path: str) -> None:
        cached = place_in(self._cache, path)
        size = made.stat().st_size
        # Sync the file: if a power cut damaged it, the damage would be read for ever.
        sync(made)
        with self._lock:
            self._make_room(size)
            cached.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
            made.rename(cached)

    def _make_room(self, size: int) -> None:
        """Remove the least recently read files. Readers that have opened a file can finish."""
        held = []
        for cached in self._cache.rglob(f"*{SUFFIX}"):
            if cached.parent != self.staging:
                with suppress(FileNotFoundError):
                    found = cached.stat()
                    held.append((found.st_mtime, found.st_size, cached))
        excess = sum(bytes_ for _, bytes_, _ in held) + size - self._cache_bytes
        for _, bytes_, cached in sorted(held):
            if excess <= 0:
                return
            cached.unlink(missing_ok=True)
            excess -= bytes_

    @contextmanager
    def _answering(self, path: str | None = None) -> Iterator[None]:
        """Translates errors of an object store into this server's errors; `path`: the requested file."""
        if time.monotonic() < self._away_until:
            raise _busy_error(self.address)
        try:
            yield
        except FileNotFoundError as error:
            if path is not None:
                raise DamagedFile("it is missing") from error
            raise self._failed(error) from error
        except (BaseError, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> Busy:
        self._away_until = time.monotonic() + _PAUSE_SECONDS
        return _log_and_busy(self.address, error)


def _log_and_busy(address: str, error: Exception) -> Busy:
    # The error's own text names hosts and addresses: it goes to the log only.
    _LOG.warning("the archive %s cannot be used now: %s", address, " ".join(str(error).split())[:_LOG_CHARACTERS])
    return _busy_error(address)


def _busy_error(address: str) -> Busy:
    return Busy(
        f"the archive {address} cannot be used now, the server's log says why: older points wait for it; newer "
        "ones can be asked for by their steps",
        retry_after_seconds=_RETRY_SECONDS,
    )


def archive_files(address: str, cache: Path, cache_bytes: int) -> ArchiveFiles:
    """Files at an address: a folder's path, or the URL of a bucket, and of a folder in it: `s3://BUCKET/FOLDER`.

    Who may use a bucket, and where it is, comes from the environment, as obstore reads it:

    - `s3://`: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN; AWS_REGION or AWS_DEFAULT_REGION;
      AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or AWS_ENDPOINT for other makes than Amazon's. Without a key: a web
      identity (AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN), else the machine's own role. ~/.aws and AWS_PROFILE are
      not read.
    - `gs://`: GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, the path of a key's file, or
      GOOGLE_SERVICE_ACCOUNT_KEY, the key itself.
    - `az://`: AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or
      AZURE_CLIENT_ID, AZURE_CLIENT_SECRET and AZURE_TENANT_ID.

    Raises:
        StoreUnusable: no such kind of address, or its settings cannot be read.
    """
    if "://" not in address:
        return Folder(Path(address).expanduser().absolute())
    return Bucket(address, cache, cache_bytes)
