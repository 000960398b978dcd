"""Starts a job in several processes, as a user would, and collects what the ranks saw."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SECONDS = 4 * PATIENCE_SECONDS


def launch(job, processes, folder, **environment):
    """What each rank returned, by rank. The job is ended with all its processes when it takes too long."""
    arguments = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(processes), "--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("-m", "tests.parallel.worker", job, str(folder)),
    ]
    log = folder / f"{job}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(SECONDS)
        finally:
            # The launcher ends its processes when it is asked to.
            process.terminate()
            process.wait()
    assert code == 0, log.read_text()[-8000:]
    return [pickle.loads((folder / f"{job}-{rank}.pickle").read_bytes()) for rank in range(processes)]
