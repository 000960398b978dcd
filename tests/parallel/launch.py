"""Starts a job in several processes, told what torchrun would tell them, and collects what the ranks saw."""

import json
import os
import pickle
from pathlib import Path

from tests.forking import TRAINING, fork
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SECONDS = 4 * PATIENCE_SECONDS


def told_to_all(processes):
    """The variables that torchrun gives to every rank."""
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def asked(request, name):
    """The values of this parameter in those tests of the module that run, by day a sample, as `ASKED` of a job."""
    own = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return json.dumps(sorted({given[name] for given in own if name in given}))


def among_asked(cases):
    """In a job: those of the named cases that were asked for."""
    return {name: cases[name] for name in json.loads(os.environ["ASKED"])}


def launch(job, processes, folder, **environment):
    """What each rank returned, by rank. The job is ended with all its processes when it takes too long."""
    shared = told_to_all(processes)
    log = folder / f"{job}.log"
    with log.open("ab") as output:
        worker = ("-m", "tests.parallel.worker", job, folder)
        launcher = fork(
            TRAINING, *worker, environment={**os.environ, **shared, **environment}, folder=ROOT, output=output
        )
    try:
        code = launcher.wait(SECONDS)
    finally:
        # It ends its processes when it is asked to.
        launcher.terminate()
        launcher.wait()
    assert code == 0, log.read_text()[-8000:]
    return [pickle.loads((folder / f"{job}-{rank}.pickle").read_bytes()) for rank in range(processes)]
