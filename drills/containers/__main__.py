"""`python -m drills.containers`: the shipped docker-compose.yml, run by podman-compose, as a team uses it.

Each stage runs in namespaces of its own, so that it leaves no process, mount, network or port behind, however it
ends. The images stay in build/containers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from drills.containers.engine import ContainerEngine
from drills.containers.images import make_images
from drills.containers.walk import walk
from tests.system import find_chromium

_PROGRAMS = ("aardvark-dns", "debootstrap", "git", "ip", "iptables", "netavark", "podman", "runc", "unshare")
_PLACES = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/podman"
_STAGES = {"images": [], "walk": ["--net"]}


def main():
    """A line for each thing seen; ends with 1 where one is not as it should be."""
    if os.geteuid():
        sys.exit("containers need root here: run `sudo make containers`")
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PLACES) is None]
    if absent or find_chromium() is None:
        sys.exit(f"not installed: {', '.join(absent) or 'chromium'}; `make containers` installs all on Debian")
    for stage, more in _STAGES.items():
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *more]
        done = subprocess.run([*alone, sys.executable, "-m", "drills.containers", stage], check=False)
        if done.returncode:
            sys.exit(done.returncode)


def run_stage(stage):
    """Within namespaces of its own."""
    begun = time.monotonic()
    names = Path("/etc/resolv.conf")
    resolver, place = names.read_text(), names.resolve()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    if not place.exists():
        # The host's file is a link into /run.
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(resolver)

    def say(text):
        sys.stdout.write(f"{time.monotonic() - begun:5.0f} s  {text}\n")
        sys.stdout.flush()

    {"images": make_images, "walk": walk}[stage](ContainerEngine(), say)


if __name__ == "__main__":
    run_stage(sys.argv[1]) if sys.argv[1:] else main()
