"""Ballast: a file that holds disk space for what must work on a full disk."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Final

__all__ = ["Ballast"]

_LOG: Final = logging.getLogger(__name__)
_PIECE: Final = bytes(2**20)


class Ballast:
    """`size` bytes of the disk, kept in the file `path`; of 0 there is no file.

    Who else fills the disk leaves these. `release` gives them to the database, `keep` takes them again.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    @property
    def bytes(self) -> int:
        """What the file takes now."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def keep(self) -> None:
        """Take the space, if the disk has twice of it: what was just released is not taken away again."""
        if self.bytes >= self._size or shutil.disk_usage(self._path.parent).free < 2 * self._size:
            return
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                _allocate(descriptor, self._size)
            finally:
                os.close(descriptor)
        except OSError as error:
            _LOG.warning("%s cannot hold %d bytes for a full disk: %s", self._path, self._size, error)
            self.release()

    def release(self) -> None:
        """Give the space back if the disk has less than that left."""
        if self.bytes and shutil.disk_usage(self._path.parent).free < self._size:
            os.truncate(self._path, 0)


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for start in range(0, size, len(_PIECE)):
        os.write(descriptor, _PIECE[: size - start])
