"""A launcher and its ranks: each rank runs the named job, and leaves what it saw in the folder."""

import os
import pickle
import signal
import sys
import warnings
from importlib import import_module
from pathlib import Path

import torch
from collage_agent import error_guard
from torch import distributed


def main(job, folder):
    """Fork the ranks; when one fails, or this process is asked to end, all are ended."""
    # Imported once, before there are ranks.
    module, _, name = job.rpartition(".")
    see = getattr(import_module(f"tests.parallel.{module}"), name)
    ranks = set()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            run(job, see, folder)
            return
        ranks.add(pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while ranks:
            pid, status = os.wait()
            ranks.remove(pid)
            if status != 0:
                sys.exit(1)
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)


def run(job, see, folder):
    # The sharding wrappers warn about what they themselves do; the agent's own warnings stay errors in other tests.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    error_guard.raise_in_tests(True)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    try:
        seen = see(Path(folder))
        (Path(folder) / f"{job}-{rank}.pickle").write_bytes(pickle.dumps(seen))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
