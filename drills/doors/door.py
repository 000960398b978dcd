"""A door: how one package's trainings are watched, and the two tiny trainings that show it.

A file of this folder with a `DOOR` is a door. `make doors` gives each real package an environment of its own under
`build/doors/`, on top of the project's. There it trains a sick setting (plain bf16 at a small rate) and a healthy
one (fp32), each with and without us: what they leave must be bit-identical, and the verdicts right.

Write a file: a `DOOR`, and a function `train(setting, watched, folder)`, which imports the package, trains at
least STEPS steps, and returns `Trained`. A package that cannot be installed here says why in `cannot`; then no
environment is made, and `held_by` names the test of a replica.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["SETTINGS", "STEPS", "Door", "Setting", "Trained", "digest", "run", "tokens"]

STEPS = 24
Setting = Literal["sick", "healthy"]
SETTINGS: tuple[Setting, ...] = ("sick", "healthy")
EXPECTED = {"sick": "losing updates", "healthy": "healthy"}


@dataclass(frozen=True)
class Door:
    """One row of the first table of docs/integrations.md, and what `make doors` installs for it.

    version: the one tried. lines: what a user writes. seen: what is then known. requirements: pip's, for the
    environment; none for a replica. held_by: the test that holds it in `make test`. cannot: why the real package is
    not run here. part: what of it `make doors` runs, where that is not all of a training.
    """

    package: str
    version: str
    lines: str
    seen: str
    held_by: str
    requirements: tuple[str, ...] = ()
    cannot: str = ""
    part: str = ""

    @property
    def kind(self) -> str:
        """real: the package itself is trained by `make doors`."""
        return "replica" if self.cannot else "real"


@dataclass(frozen=True)
class Trained:
    """What a training left: a digest of all its numbers, steps taken, and the verdicts of its watches."""

    digest: str
    steps: int
    health: Sequence[str]


def digest(tensors: Iterable[Any], *others: object) -> str:
    """Of tensors bit by bit, of other values as they are written, and of the random states."""
    import torch

    found = hashlib.sha256(repr((others, random.getstate())).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous().reshape(-1)
        found.update(local.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def numbers_of(model: Any, optimizer: Any) -> list[Any]:
    """Weights and optimizer states."""
    import torch

    states = [optimizer.state[key] for key in optimizer.state]
    return [*model.parameters(), *(value for state in states for value in state.values() if torch.is_tensor(value))]


def verdicts() -> list[str]:
    """Of each watch of the current run."""
    import collage_agent

    run = collage_agent.current_run()
    watches: Sequence[Any] = [] if run is None else [slot.watch for slot in run._slots.values()]
    return [watch.judgement().health for watch in watches]


def tokens(rows: int = 64, length: int = 16, vocabulary: int = 64) -> list[list[int]]:
    """Rows of random tokens, the same each time."""
    drawn = random.Random(3)
    return [[drawn.randrange(vocabulary) for _ in range(length)] for _ in range(rows)]


def run(train: Callable[[Setting, bool, Path], Trained]) -> None:
    """What a door's file does as a program: SETTING, whether watched, a folder and the file for the outcome."""
    setting, watched, folder, outcome = sys.argv[1:]
    sys.argv[1:] = []
    random.seed(0)
    trained = train(setting, watched == "watched", Path(folder))  # type: ignore[arg-type]
    Path(outcome).write_text(json.dumps(trained.__dict__))
    sys.stdout.flush()
    os._exit(0)  # Some packages leave threads behind that never end.
