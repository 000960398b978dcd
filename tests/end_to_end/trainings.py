"""Training processes, started and waited for."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tests.forking import TRAINING, fork

__all__ = ["Outcome", "start_training", "train"]

SCRIPT = Path(__file__).with_name("training.py")


@dataclass(frozen=True)
class Outcome:
    """How a training ended: its exit status, what it printed last, and its standard error."""

    status: int
    result: dict
    errors: str


def start_training(*arguments, **settings):
    """A training process; settings are COLLAGE_ variables without their prefix."""
    chosen = {f"COLLAGE_{name.upper()}": str(value) for name, value in settings.items()}
    return fork(TRAINING, SCRIPT, *arguments, environment={**os.environ, **chosen})


def train(*arguments, **settings):
    """A whole training."""
    process = start_training(*arguments, **settings)
    output, errors = process.communicate()
    lines = output.splitlines()
    result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return Outcome(process.returncode, result, errors)
