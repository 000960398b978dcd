"""The check of a release, from nothing but its three wheels: `python -m tools.release dist` after `make release`
has built them.

It builds all again: the bits must be the same. One environment without torch gets the server. Another one gets the
optimizers alone, then the agent, then everything; at each stage it is asked what it has, what it lacks, and whether
a strict script of a user is typed. In the end it goes through the quick start, as the README has it: a server and a
dashboard, a training that reports to them, and what terminal and page then say of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"collage_optim": "agent", "collage_monitor": ".", "collage_monitor_server": "server"}
"""What a wheel's name begins with, and the folder that it is built from."""
OURS = ("collage_optim", "collage_monitor", "collage_agent", "collage_demo", "collage_server", "collage_dashboard")
WEB = ("fastapi", "starlette", "uvicorn", "dash", "flask", "plotly", "sqlalchemy", "alembic", "pyarrow")
PORTS = {"--port": "17420", "--dashboard-port": "17421"}
BEFORE = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
data = [torch.randn(8, 64).bfloat16() for _ in range(60)]
class Answer:
    def __init__(self, out): self.loss = out.float().square().mean()
forward, model_of = model.forward, model
model.forward = lambda batch: Answer(forward(batch))
"""
"""Stands for the reader's own model and data, before the README's lines."""

OPTIMIZING = """
import torch
from collage_optim import STRATEGIES, CollageAdamW

model = torch.nn.Linear(8, 8).bfloat16()
optimizer: CollageAdamW = CollageAdamW(model.parameters(), lr=1e-5, strategy="coupled-8")
model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
exact: torch.Tensor = optimizer.stored_parameter(model.weight)
print(exact.dtype, sorted(STRATEGIES))
"""
"""A training with the optimizers alone, which mypy checks strictly."""

MISTYPED = """
import torch
from collage_optim import CollageAdamW

CollageAdamW(torch.nn.Linear(8, 8).parameters(), strateg="plus")
CollageAdamW(torch.nn.Linear(8, 8).parameters(), strategy=3)
"""
"""Two options that mypy must refuse."""

TYPED = """
import collage_agent as collage
import torch
from collage_agent.numerics import round_to, two_sum
from collage_agent.optim import STRATEGIES, CollageAdamW

model = torch.nn.Linear(8, 8).bfloat16()
optimizer: CollageAdamW = CollageAdamW(model.parameters(), lr=1e-5, strategy="light")
run: collage.Run = collage.init(project="typed", mode="offline")
handle: collage.Watch = collage.watch(model, optimizer, every=5, expect={"min_edq": 0.9})
collage.log({"loss": 1.0}, step=1)
collage.finish()
print(handle, handle.step, handle.judgement().health, sorted(STRATEGIES), run.run_id)
high, low = two_sum(torch.ones(2), torch.ones(2))
rounded: torch.Tensor = round_to(high + low, torch.bfloat16)
"""
"""A training that mypy checks strictly: a package whose types are not found is an error in it."""


def quick_start() -> str:
    """The first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None, "README.md has no Python block"
    return found[1]


def make(folder: Path) -> Path:
    """An environment with nothing in it; returns the folder of its programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def install(programs: Path, *wanted: str) -> None:
    """Install into the environment; torch comes first and pinned, from where TORCH_PIP_ARGS says."""
    pip = [
        str(programs / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    subprocess.run([*pip, *wanted], check=True)


def untyped(programs: Path, folder: Path, script: str = TYPED) -> str:
    """What mypy finds in a script by the packages that are installed beside this Python; "": nothing."""
    path = folder / "typed.py"
    path.write_text(script)
    # torch's own types take 20 seconds to read.
    settings = folder / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    beside = [f"--python-executable={programs / 'python'}", f"--cache-dir={folder / 'mypy'}"]
    command = [sys.executable, "-m", "mypy", f"--config-file={settings}", *beside, str(path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def rebuilt(dist: Path, place: Path) -> list[str]:
    """The files of `dist` that a second build makes otherwise."""
    for folder in DISTRIBUTIONS.values():
        command = [sys.executable, "-m", "build", "--outdir", str(place), str(ROOT / folder)]
        subprocess.run(command, check=True, capture_output=True)
    return [path.name for path in sorted(dist.iterdir()) if path.read_bytes() != (place / path.name).read_bytes()]


def present(programs: Path, place: Path, names: Iterable[str]) -> set[str]:
    """Those of the modules that can be imported there."""
    code = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name)])"
    return set(run(programs, place, "python", "-c", code, *names).split())


def run(programs: Path, folder: Path, *words: str, **more: str) -> str:
    """The output of the environment's program, in a folder and a home without anything from this checkout."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("COLLAGE_", "PYTHON", "XDG_"))
    }
    environment = {**kept, "HOME": str(folder), "OMP_NUM_THREADS": "1", **more}
    command = [str(programs / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def started(programs: Path, folder: Path) -> Iterator[dict[str, str]]:
    """`up`, and the addresses that it prints; it is stopped afterwards."""
    options = [word for pair in PORTS.items() for word in pair]
    command = [str(programs / "collage-monitor"), "up", "--json", *options]
    environment = {"HOME": str(folder), "PATH": os.environ["PATH"]}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("{")), "")
            if not line:
                sys.exit("up ended before it said where it is")
            yield json.loads(line)
        finally:
            process.terminate()


def without_torch(wheels: Mapping[str, Path], place: Path) -> None:
    """The server, and `sync`, in an environment of their own."""
    programs = make(place / "server")
    install(programs, f"{wheels['collage_monitor']}[client]")
    assert "nothing waits" in run(programs, place, "collage-monitor", "sync", "--dir", str(place))
    install(programs, str(wheels["collage_monitor"]), str(wheels["collage_monitor_server"]))
    assert not present(programs, place, ["torch", "collage_optim"]), "the server brings torch"
    assert "memory" in run(programs, place, "collage-monitor", "serve", "--print-settings")
    print("the server is installed and starts, and `sync` sends, without torch")


def with_torch(wheels: Mapping[str, Path], place: Path) -> Path:
    """The optimizers alone, then the agent, then everything; returns the folder of its programs."""
    programs = make(place / "training")
    install(programs, *shlex.split(os.environ.get("TORCH_PIP_ARGS", "")), "torch", "numpy")
    install(programs, str(wheels["collage_optim"]))
    found = present(programs, place, OURS)
    assert found == {"collage_optim"}, f"the optimizers bring {found}"
    for script in (
        OPTIMIZING,
        *re.findall(r"```python\n(.*?)```", (ROOT / "agent" / "README.md").read_text(), re.DOTALL),
    ):
        (place / "optimizing.py").write_text(script)
        run(programs, place, "python", "-W", "error", "optimizing.py")
        if found_wrong := untyped(programs, place, script):
            sys.exit(f"collage-optim is not typed:\n{found_wrong}")
    refused = untyped(programs, place, MISTYPED)
    assert refused.count("error:") == 2, f"mypy accepts an option that does not exist: {refused}"
    print("collage-optim stands on torch alone, and is typed")
    install(programs, f"{wheels['collage_monitor']}[agent]", str(wheels["collage_optim"]))
    found = present(programs, place, (*OURS, *WEB))
    assert found == {"collage_optim", "collage_monitor", "collage_agent", "collage_demo"}, (
        f"the agent brings {found}"
    )
    if found_wrong := untyped(programs, place):
        sys.exit(f"the agent is not typed:\n{found_wrong}")
    done = subprocess.run(
        [programs / "collage-monitor", "up"], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.stderr.rstrip().endswith("pip install collage-monitor-server"), done.stderr
    print("the agent brings no web framework and no server, and is typed")
    install(programs, f"{wheels['collage_monitor']}[all]", *(str(wheel) for wheel in wheels.values()))
    return programs


def quick_start_passes(programs: Path, place: Path) -> None:
    """A server and a dashboard, a training that reports to them, and what terminal and page say of it."""
    where = run(programs, place, "python", "-c", "import collage_agent; print(collage_agent.__file__)").strip()
    assert where.startswith(str(place)), f"the agent comes from {where}, not from the wheel"
    (place / "train.py").write_text(BEFORE + quick_start())
    with started(programs, place) as addresses:
        said = run(programs, place, "python", "train.py")
        assert "losing updates" in said or "% of" in said, f"no verdict: {said}"
        listed = run(programs, place, "collage-monitor", "list")
        assert "bf16 fine-tune" in listed, listed
        shown = run(programs, place, "collage-monitor", "show", "bf16 fine-tune")
        assert shown.startswith("bf16 fine-tune: "), shown
        page = addresses["dashboard_url"]
        with urllib.request.urlopen(page) as answer:
            assert answer.status == 200
    print(f"{said.strip()}\n\n{shown.partition(chr(10))[0]}\n{page} answered")


def main(folder: str) -> None:
    """Check what is in the folder; the first thing that fails ends it with 1."""
    dist, begun = Path(folder).resolve(), time.monotonic()
    wheels = {path.name.partition("-")[0]: path for path in sorted(dist.glob("*.whl"))}
    assert wheels.keys() == DISTRIBUTIONS.keys(), f"{dist} has {', '.join(wheels)}"
    with tempfile.TemporaryDirectory(prefix="collage-release-") as name:
        place = Path(name)
        if others := rebuilt(dist, place / "again"):
            sys.exit(f"a second build makes other bits: {', '.join(others)}")
        print(f"a second build makes the same bits of {len(list(dist.iterdir()))} files")
        without_torch(wheels, place)
        quick_start_passes(with_torch(wheels, place), place)
        print(f"the release passed from its wheels in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1])
