"""A disk that can be filled: a small file system where mounting is allowed, else a limit on file sizes."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from pathlib import Path

__all__ = ["SmallDisk"]

_BLOCK = bytes(2**16)


class SmallDisk:
    """`folder` on a tmpfs of `mebibytes`; without the right to mount, a process's RLIMIT_FSIZE stands in."""

    def __init__(self, folder, mebibytes):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0777", "tmpfs", str(self.folder)]
        try:
            self.mounted = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            self.mounted = False
        self.how = f"tmpfs of {mebibytes} MiB, filled" if self.mounted else "RLIMIT_FSIZE of the server"
        self._ballast = self.folder / "ballast"

    def fill(self, pid):
        """No byte more; without a mount, for this process alone."""
        if not self.mounted:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            return
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while file.write(_BLOCK):
                pass

    def free(self, pid):
        """Room again."""
        if self.mounted:
            self._ballast.unlink(missing_ok=True)
            return
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def close(self):
        """Unmount."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)
