"""An archived file as the database describes it, and whether a file on a disk is that file.

Whoever fetches, copies, restores or verifies a file asks `problem_of`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from collage_server.errors import Damaged, DamagedFile
from collage_server.store.archive.parquet import check_pages, read_footer
from collage_server.store.archive.paths import run_of

__all__ = ["ArchivedFile", "damaged_file", "digest_of"]

_RETRY_SECONDS = 30


class ArchivedFile(NamedTuple):
    """A file as the database describes it; `digest` (SHA-256) is None for one of a server without digests."""

    path: str
    size: int
    digest: bytes | None

    def problem_of(self, file: Path) -> str | None:
        """What distinguishes a local file from this one; None if it is the same. All of it is read."""
        try:
            size = file.stat().st_size
            if size != self.size:
                return f"has {size} bytes instead of {self.size}"
            if self.digest is None:
                check_pages(file, read_footer(file))
            elif digest_of(file) != self.digest:
                return "differs from what was written"
        except FileNotFoundError:
            return "is missing"
        except (OSError, DamagedFile) as error:
            return f"cannot be read ({error})"
        return None


def digest_of(file: Path) -> bytes:
    """The SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def damaged_file(file: ArchivedFile, what: str) -> Damaged:
    """The answer where a file is missing or damaged; what: its content that was asked for."""
    return Damaged(
        f"run {run_of(file.path)}: {what} cannot be read, because the archived file {file.path} is missing or "
        "damaged (the server's log says which), and no back-up that this server knows has it: put it back from a "
        "copy, or ask for other steps",
        retry_after_seconds=_RETRY_SECONDS,
    )
