"""The images of the Compose file, made without a registry: ours by its Dockerfile, the others as stand-ins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from drills.containers.engine import HERE, ROOT

__all__ = ["make_images"]

_BASE = "localhost/debian:base"
# Manuals and translations would be half of the base.
_UNREAD = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt/archives")
_SLIM = "".join(f"path-exclude=/{folder}/*\n" for folder in _UNREAD[:3])


def make_images(engine, say):
    """The base, once; ours, from a checkout under umask 077; the stand-ins, under the names of `override.yml`."""
    engine.install_compose()
    _check_out(engine.checkout)
    if _BASE not in engine.podman("images", "--format", "{{.Repository}}:{{.Tag}}").split():
        _make_base(engine, say)
    _tell_pip(engine.folder / "pip.conf")
    with ThreadPoolExecutor() as both:
        for made in (both.submit(_make_ours, engine, say), both.submit(_make_stand_ins, engine, say)):
            made.result()


def _make_ours(engine, say):
    _build(engine, engine.checkout, "--tag", "collage-monitor")
    say("image collage-monitor, from the shipped Dockerfile")


def _make_stand_ins(engine, say):
    services = yaml.safe_load((HERE / "override.yml").read_text())["services"]
    for name in (service["image"] for service in services.values() if "image" in service):
        _build(engine, HERE, "--tag", name, "--target", re.sub(r".*/|:.*", "", name))
        say(f"image {name.removeprefix('localhost/')}, a stand-in")


def _check_out(folder):
    """The files of this checkout as a checkout under umask 077 has them: for their owner alone."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    before = os.umask(0o077)
    try:
        for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
    finally:
        os.umask(before)


def _make_base(engine, say):
    """A Debian with Python, from the mirror that apt uses."""
    asked = ["apt-get", "indextargets", "Created-By: Packages", "Origin: Debian", "--format"]
    lines = subprocess.check_output([*asked, "$(RELEASE) $(CODENAME) $(SITE) $(COMPONENT)"], text=True).splitlines()
    sources = [line.split() for line in lines]
    main = next(((suite, site) for suite, codename, site, _ in sources if suite == codename), None)
    if main is None:
        raise RuntimeError("apt knows no mirror of Debian: run apt-get update, on Debian")
    # /run is in memory: nothing is written twice.
    rootfs = Path("/run/rootfs")
    engine.run("debootstrap", "--variant=minbase", "--include=python3", main[0], rootfs, main[1])
    for folder in _UNREAD:
        shutil.rmtree(rootfs / folder)
        (rootfs / folder).mkdir()
    listed = "".join(f"deb {site} {suite} {component}\n" for suite, _, site, component in sources)
    (rootfs / "etc/apt/sources.list").write_text(listed)
    (rootfs / "etc/dpkg/dpkg.cfg.d/slim").write_text(_SLIM)
    engine.run("tar", "-C", rootfs, "-cf", "/run/rootfs.tar", ".")
    engine.podman("import", "--quiet", "/run/rootfs.tar", _BASE)
    say("a Debian with Python, by debootstrap")


def _tell_pip(file):
    """pip inside an image is configured as here; it finds files that the configuration names under /host."""
    lines = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True).splitlines()
    told = {}
    # What the environment says counts more than what a file says.
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        value = value.strip("'").replace("\\n", " ")
        told[key.rpartition(".")[2]] = re.sub(r"(?<![\w/.:])/(?=\w)|(?<=file://)/", "/host/", value)
    file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in told.items()))


def _build(engine, context, *arguments):
    mounts = ["--volume", "/:/host:ro", "--volume", f"{engine.folder / 'pip.conf'}:/etc/pip.conf:ro"]
    ways = ["--isolation", "chroot", "--network", "host", "--layers", "--build-arg", f"BASE_IMAGE={_BASE}"]
    engine.podman("build", *ways, *mounts, *arguments, context)
