"""The check of a release, from nothing but its wheel: `python -m tools.release dist` after `python -m build`.

It installs the wheel with all extras in an environment of its own, and checks a typed training against it. Then it
goes through the quick start, as the README has it: a server and a dashboard, a training that reports to them, and
what terminal and page then say of it.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
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


def install(folder: Path, wheel: Path, extras: str) -> Path:
    """An environment with the wheel; torch comes first and pinned, from where TORCH_PIP_ARGS says."""
    venv.create(folder, with_pip=True)
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    if "agent" in extras or "all" in extras:
        subprocess.run([*pip, *shlex.split(os.environ.get("TORCH_PIP_ARGS", "")), "torch", "numpy"], check=True)
    subprocess.run([*pip, f"{wheel}[{extras}]"], check=True)
    return folder / "bin"


def untyped(programs: Path, folder: Path) -> str:
    """What mypy finds in TYPED by the packages that are installed beside this Python; "": nothing."""
    script = folder / "typed.py"
    script.write_text(TYPED)
    # torch's own types take 20 seconds to read.
    settings = folder / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    beside = [f"--python-executable={programs / 'python'}", f"--cache-dir={folder / 'mypy'}"]
    command = [sys.executable, "-m", "mypy", f"--config-file={settings}", *beside, str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


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


def main(folder: str) -> None:
    """Go through the quick start; the first thing that fails ends it with 1."""
    (wheel,) = Path(folder).resolve().glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="collage-release-") as name:
        place, begun = Path(name), time.monotonic()
        programs = install(place / "environment", wheel, "all")
        print(f"installed {wheel.name} in {time.monotonic() - begun:.0f} s")
        where = run(programs, place, "python", "-c", "import collage_agent; print(collage_agent.__file__)").strip()
        assert where.startswith(str(place)), f"the agent comes from {where}, not from the wheel"
        if found := untyped(programs, place):
            sys.exit(f"the wheel is not typed:\n{found}")
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
        print(f"the quick start passed from {wheel.name} in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1])
