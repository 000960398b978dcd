"""A training that logs a thousand rows of its own to a tracker while a mirror writes beside it; what it sent."""

import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import collage_agent as collage
import torch
from collage_agent.transport import MemoryTransport

from collage_monitor.statistics import finished
from collage_monitor.wire import StreamCreate, array_from_bytes

ROWS = 1_000
SERIES = 15


@dataclass
class Mirrored:
    """A finished training: what its reports say by step, its weights, and what became of the mirror's rows."""

    edq: dict
    weights: dict
    counts: dict
    reports: list
    run_id: str


def train(mirrors, log_row, *, steps=ROWS, every=1, mode="online", after=lambda step: None, directory=None):
    """Plain bf16 AdamW on a tiny model: each step is measured, and each logs a row of the training's own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    transport = MemoryTransport()
    run = collage.init("door", "mirrored", mirrors=mirrors, transport=transport, mode=mode, dir=directory)
    collage.watch(model, optimizer, every=every, budget=None)
    for step in range(1, steps + 1):
        loss = model(torch.randn(8, 16, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log_row(step, {"loss": float(loss.detach()), "own/step": step})
        after(step)
    collage.finish()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Mirrored(_edq_of(transport), weights, run.mirrors.counts, transport.reports, run.run_id)


def _edq_of(transport):
    """EDQ of the model by step, from what was sent."""
    (stream,) = {
        message.stream_id: message for message in transport.messages if isinstance(message, StreamCreate)
    }.values()
    found = {}
    for report in transport.reports:
        if report.model is not None:
            model = array_from_bytes(report.model, (report.statistic_count,))
            totals = dict(zip(stream.statistics, model, strict=False))
            found[report.step] = float(finished("edq_ratio", totals, ()))
    return found


def checked_rows(rows, trained, step_name, prefix):
    """How many of the rows are ours; each has the number that was sent of its step, and few series."""
    ours = [row for row in rows if step_name in row]
    for row in ours:
        series = [name for name, value in row.items() if name.startswith(prefix) and isinstance(value, int | float)]
        assert len(set(series) - {step_name}) <= SERIES, series
        assert abs(row[f"{prefix}edq_ratio"] - trained.edq[row[step_name]]) <= 1e-6
    steps = [row[step_name] for row in ours]
    assert steps == sorted(set(steps)), "each once, in order"
    return len(ours)


def same_training(one, other):
    """Weights are bit-identical."""
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def children(name):
    """Process ids below this process whose program is called so."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                program = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and name in program:
                found.append(int(entry.name))
    return found


def kill(name):
    """End this process's children of that name, as a machine out of memory would; how many there were."""
    found = children(name)
    for process in found:
        os.kill(process, signal.SIGKILL)
    return len(found)


def say(line):
    """A line of what a door has shown."""
    sys.stdout.write(f"{line}\n")


@contextmanager
def inside(folder):
    """In this folder, with the variables of no tracker."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
