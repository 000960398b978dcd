"""Each extra alone, in a clean environment: offered verbs work, and marked ones say what they need.

`python -m tools.packages dist` installs the wheels in dist/ with each extra, on each Python, with the newest and
with the lowest versions that are allowed, and prints a table. `python -m tools.packages --here` looks at the
environment that it runs in. A verb is *offered* if `collage-monitor -h` lists it without "needs"; it *works* if
a call of it gets as far as the network, a file or a service of its own. It needs uv; UV_FIND_LINKS or the like
says where torch is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

EXTRAS = ("", "client", "parquet", "query", "server", "archive", "dashboard", "agent", "integrations", "all")
WITH_TORCH = frozenset({"agent", "integrations", "all"})
WITH_SERVER = frozenset({"server", "dashboard", "archive", "all"})
NOWHERE = ("--server-url", "http://127.0.0.1:9")
SECONDS = 600.0
CALLS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("alerts", "list"), (NOWHERE, "no answer from")),
    **dict.fromkeys(("check", "export", "report", "show", "edit"), (("r", *NOWHERE), "no answer from")),
    "open": (("--print", "--dashboard-url", "http://d"), "http://d"),
    "status": (NOWHERE, "NOT OK"),
    "compare": (("r", "s", *NOWHERE), "no answer from"),
    "delete": (("r", "--yes", *NOWHERE), "no answer from"),
    "login": (("http://127.0.0.1:9", "--token", "t"), "no answer from"),
    "import": (("curve.csv", "--project", "p", *NOWHERE), "no answer from"),
    "archive query": (("select 1", "--archive", "."), "no published table"),
    "run": (("--print-environment",), "COLLAGE_ATTACH"),
    "sync": ((*NOWHERE, "--dir", "."), "nothing waits"),
    "doctor": ((), "torch"),
    "audit": (("last.pt",), "exp_avg"),
    "convert": (("last.pt", "--to", "plus"), "nothing was written"),
    "cure": (("last.pt", "--output", "cured.pt"), "last.pt"),
    "serve": (("--print-settings",), "memory"),
    "backup make": (("copy", "--dir", "data"), "archived files"),
    "backup restore": (("copy", "--dir", "other"), "archived files"),
    "setup team": (("--name", "a b"), "no host name"),
    "setup database": ((), "--database"),
    "token list": (("--offline", "--dir", "data"), "no tokens yet"),
    "archive publish": (("--dir", "data"), ""),
}
"""How each verb is called, and a word of its answer. Those of `STARTED` are started instead."""
STARTED = {
    "up": (("up", "--port", "17520", "--dashboard-port", "17521", "--dir", "data"), "Ctrl-C stops"),
    "serve dashboard": (("serve", "dashboard", "--port", "17522", *NOWHERE), "dashboard http"),
    "demo": (("demo", "--help"), "Train"),
    "serve mcp": (("serve", "mcp", "--help"), "assistant"),
}
LISTED = re.compile(r"(?:^|  )([a-z]{2,7})( \*)? {1,7}(?=[a-z])", re.MULTILINE)
"""A verb in the first-level help, and the mark of those that lack packages."""
BROKEN = re.compile(r"Traceback|ModuleNotFoundError|ImportError|not installed")
CHECKPOINT = """
import torch
model = torch.nn.Linear(64, 64).bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 64).bfloat16()).sum().backward()
optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""


@dataclass(frozen=True)
class Environment:
    """A folder of programs, and the folder in which they are called."""

    programs: Path
    folder: Path

    def run(self, *words: str, seconds: float = SECONDS) -> str:
        """Run a program without the caller's settings, and return what it prints."""
        command = [str(self.programs / words[0]), *words[1:]]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._variables(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return done.stdout + done.stderr

    def started(self, word: str, *words: str) -> str:
        """The output of a running program up to the word, or to its end; then it is stopped."""
        command = [str(self.programs / "collage-monitor"), *words]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            said = ""
            assert process.stdout is not None
            for line in process.stdout:
                said += line
                if word in line:
                    break
            process.terminate()
        return said

    def _variables(self) -> dict[str, str]:
        foreign = ("COLLAGE_", "PYTHON", "XDG_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "HOME": str(self.folder), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def prepare(environment: Environment) -> None:
    """The files that calls need."""
    (environment.folder / "curve.csv").write_text("step,loss\n1,4.0\n")
    # Where the server's packages are, this makes the database that back-ups are of.
    environment.run("collage-monitor", *("token", "list", "--offline", "--dir", "data"))
    if (environment.programs / "collage-monitor").exists() and "torch" in environment.run(
        "python", "-m", "pip", "list"
    ):
        environment.run("python", "-c", CHECKPOINT)


def faults(environment: Environment) -> Iterator[str]:
    """Every difference between the offered and the working verbs, one per line."""
    found = _listed(environment)
    if len(found) < 25:
        yield f"help lists {len(found)} verbs: {', '.join(found)}"
    called = {verb.partition(" ")[0] for verb in (*CALLS, *STARTED)}
    yield from (f"{verb}: no call of it is known here; add one to CALLS" for verb in found if verb not in called)
    for verb in (*CALLS, *STARTED):
        yield from _fault(environment, verb, marked=found.get(verb.partition(" ")[0], False))


def _fault(environment: Environment, verb: str, *, marked: bool) -> Iterator[str]:
    if verb in STARTED:
        words, wanted = STARTED[verb]
        said = environment.started(wanted, *words)
    else:
        words, wanted = CALLS[verb]
        said = environment.run("collage-monitor", *verb.split(), *words)
    if "pip install " in said and (marked or " " in verb):
        return
    if marked and verb != "demo" and " " not in verb:
        yield f"{verb} is marked, but says {said.strip()[-200:]!r}"
    elif BROKEN.search(said) or wanted not in said:
        yield f"{verb} is offered, but says {said.strip()[-300:]!r}"


def offered(environment: Environment) -> int:
    """How many verbs the help offers."""
    return sum(not mark for mark in _listed(environment).values())


def _listed(environment: Environment) -> dict[str, bool]:
    """The verbs of the help, and whether each is marked as lacking something."""
    return {verb: bool(mark) for verb, mark in LISTED.findall(environment.run("collage-monitor", "-h"))}


def installed(folder: Path, wheels: Mapping[str, Path], extra: str, python: str, bound: str) -> str | None:
    """Make the environment; returns the reason if that fails, else None. wheels: by how their names begin."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        sys.exit("uv is needed: pip install uv")
    subprocess.run([uv, "venv", "--quiet", "--seed", "--python", python, str(folder)], check=True)
    install = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        str(folder / "bin" / "python"),
        "--only-binary",
        ":all:",
    ]
    resolution = ["--resolution", "lowest-direct" if bound == "lowest" else "highest"]
    if extra in WITH_TORCH:
        # A pin takes the build for CPUs where one is offered; a range would take the one for CUDA.
        subprocess.run([*install, "torch==2.13.0", "numpy"], check=True)
    wheel = wheels["collage_monitor"]
    wanted = [f"{wheel}[{extra}]" if extra else str(wheel)]
    # The others of the same version, from here and not from an index.
    wanted += [str(wheels["collage_optim"])] * (extra in {"agent", "all"})
    wanted += [str(wheels["collage_monitor_server"])] * (extra in WITH_SERVER)
    done = subprocess.run([*install, *resolution, *wanted], capture_output=True, text=True, check=False)
    return done.stderr.strip()[-500:] if done.returncode else None


def matrix(wheels: Mapping[str, Path], extras: Sequence[str], pythons: Sequence[str], bounds: Sequence[str]) -> int:
    """A line a cell; 1 if one of them has a fault."""
    bad = 0
    print(f"{'extra':<14}{'python':<10}{'bound':<9}{'offered':>8}  differences")
    for extra, python, bound in itertools.product(extras, pythons, bounds):
        with tempfile.TemporaryDirectory(prefix="collage-packages-") as name:
            begun, place = time.monotonic(), Path(name)
            why = installed(place / "environment", wheels, extra, python, bound)
            environment, count = Environment(place / "environment" / "bin", place), 0
            if why is None:
                prepare(environment)
                found, count = list(faults(environment)), offered(environment)
            else:
                found = [f"not installed: {why}"]
            bad += bool(found)
            said = "; ".join(found) or f"none ({time.monotonic() - begun:.0f} s)"
            print(f"{extra or 'none':<14}{python:<10}{bound:<9}{count:>8}  {said}", flush=True)
    return int(bad > 0)


def main() -> int:
    """Check this environment, or all that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("dist", nargs="?", help="folder with the wheels")
    parser.add_argument("--here", action="store_true", help="the environment that runs this")
    parser.add_argument("--extras", default=",".join(EXTRAS), help="commas between them; empty for none")
    parser.add_argument(
        "--pythons", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="versions or paths"
    )
    parser.add_argument("--bounds", default="newest,lowest")
    given = parser.parse_args()
    if given.here:
        with tempfile.TemporaryDirectory(prefix="collage-packages-") as name:
            environment = Environment(Path(sys.executable).parent, Path(name))
            prepare(environment)
            found = list(faults(environment))
            print(*(found or [f"{offered(environment)} verbs are offered, and work"]), sep="\n")
            return int(bool(found))
    wheels = {path.name.partition("-")[0]: path for path in Path(given.dist).resolve().glob("*.whl")}
    return matrix(wheels, given.extras.split(","), given.pythons.split(","), given.bounds.split(","))


if __name__ == "__main__":
    sys.exit(main())
