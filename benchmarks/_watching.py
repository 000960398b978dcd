"""What watching costs besides the hooks' CPU: whole steps and their tails, a report, memory, our own optimizers."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from collage_agent.optim import CollageAdamW
from collage_agent.watch import watch

from benchmarks._gpt import Training
from benchmarks._harness import Figure, Options
from benchmarks._looking import ItemLoop, Method, WandbWatch
from benchmarks.deliver import handed_over

__all__ = ["further_figures", "kept_on_device"]

REPORT_MILLISECONDS, REPORT_ROUNDS = 0.1, 3
DEVICE_MEGABYTES, MEMORY_MEGABYTES = 32.0, 64.0
BUDGET, WATCHED_STEPS = 0.01, 40
TAIL_ROUNDS, TAIL_STEPS, HEAVY_STEPS = 10, 10, 2


def further_figures(options: Options, training: Training) -> list[Figure]:
    """The gated figures, and without --gate whole steps beside what people do today."""
    reports = tuple(1e3 * handed_over() for _ in range(REPORT_ROUNDS))
    figures = [
        Figure("a report of 500 numbers, on the training thread", "ms", reports, REPORT_MILLISECONDS),
        Figure("buffers on the model's device, defaults", "MB", (kept_on_device(training),), DEVICE_MEGABYTES),
        Figure("process memory added by the agent, every 2nd step", "MB", memory_added(), MEMORY_MEGABYTES),
        Figure("our optimizer, defaults: agent CPU / rest", "ratio", (within_budget(options.seed),), BUDGET),
    ]
    return figures if options.gate else figures + whole_steps(training)


def within_budget(seed: int) -> float:
    """Agent CPU over the rest's, with our own optimizer."""
    training = Training(seed, lambda parameters: CollageAdamW(parameters, lr=2e-4, strategy="plus"))
    training.step()
    handle = watch(training.model, training.optimizer, budget=BUDGET)
    governor = handle._governor
    agent, process = governor.agent_cpu_seconds, time.process_time()
    for _ in range(WATCHED_STEPS):
        training.step()
    agent, process = governor.agent_cpu_seconds - agent, time.process_time() - process
    handle.remove()
    return agent / (process - agent)


def kept_on_device(training: Training, **options: Any) -> float:
    """Megabytes of tensors that a watch keeps where the model is, as it reports them itself."""
    handle = watch(training.model, training.optimizer, budget=None, **options)
    while handle.step is None or handle.step % handle.options.every:
        training.step()
    assert handle._last is not None
    kept = handle._last.scalars["agent_memory_bytes"]
    handle.remove()
    return float(kept) / 1e6


_MEMORY = """
import gc, os, sys
import torch
from benchmarks._gpt import Training

torch.set_num_threads(1)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

training = Training(0)
for _ in range(2):
    training.step()
before = resident()
if sys.argv[1] == "watched":
    import tempfile
    import collage_agent as collage
    from collage_agent.transport import MemoryTransport
    collage.init("memory", transport=MemoryTransport(), dir=tempfile.mkdtemp())
    collage.watch(training.model, training.optimizer, every=2, budget=None)
for _ in range(6):
    training.step()
print((resident() - before) / 1e6)
os._exit(0)
"""


def memory_added() -> tuple[float, ...]:
    """Megabytes that a process's resident memory grows by: the agent's import, run, watch and measured steps.

    What the same training without the agent grows by in as many steps is taken off. Linux only.
    """

    def grown(how: str) -> float:
        program = [sys.executable, "-c", _MEMORY, how]
        answer = subprocess.run(program, capture_output=True, text=True, check=True, timeout=600)
        return float(answer.stdout.splitlines()[-1])

    return (grown("watched") - grown("alone"),)


def whole_steps(training: Training) -> list[Figure]:
    """CPU that each way adds to a step, in turns with steps without it; and the tails of the steps' durations."""
    ways: dict[str, tuple[Callable[[], Method], int]] = {
        "watch(), defaults": (lambda: watch(training.model, training.optimizer), TAIL_STEPS),
        "a loop of .item(), every step": (lambda: ItemLoop(training.model, training.optimizer), HEAVY_STEPS),
        "wandb.watch of all, every step": (lambda: WandbWatch(training.model, training.optimizer), HEAVY_STEPS),
    }
    figures = []
    tails: dict[str, list[float]] = {"without": [], "watch(), defaults": []}
    for name, (attach, steps) in ways.items():
        added: list[float] = []
        for _ in range(TAIL_ROUNDS if steps == TAIL_STEPS else 3):
            alone, walls = _timed(training, steps)
            try:
                method = attach()
            except ImportError:
                break
            training.step()
            with_it, with_walls = _timed(training, steps)
            method.remove()
            added.append(with_it / alone - 1)
            if name in tails:
                tails["without"] += walls
                tails[name] += with_walls
        label = f"whole step with {name}, CPU added"
        figures.append(
            Figure(label if added else f"{label}: not installed", "ratio", tuple(added or [float("nan")]))
        )
    for name, walls in tails.items():
        percentiles = statistics.quantiles(walls, n=100)
        for percentile in (50, 99):
            label = f"step {name}, percentile {percentile} of {len(walls)}"
            figures.append(Figure(label, "ms", (1e3 * percentiles[percentile - 1],)))
    return figures


def _timed(training: Training, steps: int) -> tuple[float, list[float]]:
    """(CPU seconds, duration of each step in seconds)."""
    gc.collect()
    cpu, walls = time.process_time(), []
    for _ in range(steps):
        started = time.perf_counter()
        training.step()
        walls.append(time.perf_counter() - started)
    return time.process_time() - cpu, walls
