"""Training programs that know nothing of the agent, run as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from collage_monitor.environment import launch_variables
from tests.forking import TRAINING as IMPORTED
from tests.forking import command, run_forked
from tests.waiting import PATIENCE_SECONDS

__all__ = ["TRAINING", "bootstrap", "launched", "python", "write"]

TRAINING = """
import hashlib, random, sys
import torch

torch.manual_seed(0)
random.seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 80), torch.nn.Dropout(0.1), torch.nn.Linear(80, 3)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(20):
    optimizer.zero_grad()
    loss = (model(torch.randn(16, 30).bfloat16()).float() - 1).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + repr((losses, random.getstate())).encode())
for tensor in tensors:
    digest.update(tensor.detach().double().numpy().tobytes())
print("digest", digest.hexdigest())
"""


def write(folder, text, name="train.py"):
    path = folder / name
    path.write_text(text)
    return path


def launched(folder, *program, options=(), watched=True, forked=True, **variables):
    """The finished process of a program, under `collage-monitor run` or without it.

    forked: the command starts forked, from a process that has imported it; the program really starts in its place.
    """
    start = [*command("run", *options, "--")] if watched else []
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COLLAGE_")}
    environment |= {"COLLAGE_MODE": "offline", "COLLAGE_DIR": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    environment |= variables
    if watched and forked:
        return run_forked(IMPORTED, *start[1:], *program, environment=environment, folder=folder)
    return subprocess.run(
        [*start, *map(str, program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
        cwd=folder,
    )


def python(*arguments):
    return [sys.executable, *map(str, arguments)]


def bootstrap():
    """The folder in front of PYTHONPATH."""
    return Path(launch_variables({})["PYTHONPATH"])
