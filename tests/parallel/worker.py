"""What each process of a parallel test does: run the named job, and leave what it saw in the folder."""

from __future__ import annotations

import pickle
import sys
import warnings
from importlib import import_module
from pathlib import Path

import torch
from collage_agent import guard
from torch import distributed


def main(job, folder):
    # The sharding wrappers warn about what they themselves do; the agent's own warnings stay errors in other tests.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    guard.raise_in_tests(True)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    try:
        module, _, name = job.rpartition(".")
        seen = getattr(import_module(f"tests.parallel.{module or 'jobs'}"), name)(Path(folder))
        (Path(folder) / f"{job}-{rank}.pickle").write_bytes(pickle.dumps(seen))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
