"""What the agent costs in the first steps of a training, beside the same training without it.

`python -m benchmarks.first_steps`: each round is a process of its own with two trainings of one seed that take
turns, step by step. One is watched at the defaults and keeps its reports on disk, as without a server. The
beginning costs more than later steps: the first measured step plans what the others reuse, and `init`, `watch` and
`finish` count in full. Importing the agent does not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import collage_agent as collage
import torch

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._training import BATCH, CONTEXT, Training, hooks_timed

__all__ = ["STEPS", "Beginning", "begin", "measure"]

STEPS, ROUNDS, GATE_ROUNDS, WARM_UP = 60, 7, 3, 3
SHARE_ALLOWED = 0.1


@dataclass
class Beginning:
    """CPU seconds of the first steps: of the watched training, of the other one, and of the agent.

    agent: the optimizer's hooks, `init`, `watch` and `finish`, and the threads that deliver; part of `watched`.
    """

    watched: float
    alone: float
    agent: float


def begin(steps: int, seed: int) -> Beginning:
    """Take the first steps of two trainings in turns, the watched one first at every other step."""
    torch.set_num_threads(1)
    other = Training(seed + 1)
    for _ in range(WARM_UP):
        other.step()
    watched, alone = Training(seed), Training(seed)
    spent = {"setting up": 0.0, "watched": 0.0, "alone": 0.0}

    def timed(name: str, work: Callable[[], object]) -> None:
        started = time.thread_time()
        work()
        spent[name] += time.thread_time() - started

    process, thread = time.process_time(), time.thread_time()
    with tempfile.TemporaryDirectory(prefix="collage-first-steps-") as folder:
        timed("setting up", lambda: collage.init("first steps", mode="offline", dir=folder))
        timed("setting up", lambda: collage.watch(watched.model, watched.optimizer))
        with hooks_timed(watched.optimizer) as hooks:
            for step in range(steps):
                pair = [("watched", watched), ("alone", alone)]
                for name, training in pair if step % 2 else reversed(pair):
                    timed(name, training.step)
        timed("setting up", collage.finish)
    delivering = (time.process_time() - process) - (time.thread_time() - thread)
    own = spent["setting up"] + delivering
    return Beginning(spent["watched"] + own, spent["alone"], hooks[0] + own)


def measure(options: Options) -> Measuring:
    """Rounds in processes of their own: only there is the agent's first step the first."""
    rounds: list[Beginning] = []
    for _ in range(options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)):
        code = f"from benchmarks.first_steps import show; show({STEPS}, {options.seed})"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        rounds.append(Beginning(**json.loads(done.stdout.splitlines()[-1])))
    name = f"the first {STEPS} steps"
    yield Figure(
        f"{name}, the agent / the training without it", "", tuple(x.agent / x.alone for x in rounds), SHARE_ALLOWED
    )
    yield Figure(f"{name}, watched / without the agent", "×", tuple(x.watched / x.alone for x in rounds))
    yield Figure("a step without the agent", "ms", tuple(1e3 * x.alone / STEPS for x in rounds))
    return [f"bf16 GPT, {BATCH} x {CONTEXT} tokens, AdamW, one thread, CPU time; {len(rounds)} rounds"]


def show(steps: int, seed: int) -> None:
    """Print one beginning as JSON, behind the verdict that the agent prints."""
    print(json.dumps(asdict(begin(steps, seed))))


if __name__ == "__main__":
    raise SystemExit(main("benchmarks.first_steps", "What the agent costs in a training's first steps.", measure))
