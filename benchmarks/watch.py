"""What watching costs: CPU of the agent's hooks over CPU of the training step, beside what people do today.

A bf16 byte-level GPT of about 10 million parameters, one thread. One process trains it; rounds of each alternative
take turns, so that they meet the same machine.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from collage_agent.watch import Watch, watch
from torch.optim import Optimizer

from benchmarks._gpt import BATCH, CONTEXT, Training
from benchmarks._harness import Figure, Options, main
from benchmarks._looking import HistogramLoop, ItemLoop, Method
from benchmarks._watching import further_figures

DEFAULT_ROUND, EVERY_STEP_ROUND = 10, 5
GATE_ROUNDS, ROUNDS = 8, 10
IDLE_MICROSECONDS, IDLE_CALLS, IDLE_ROUNDS = 2.0, 2_000, 8
BUFFER_MEGABYTES = 64.0


@dataclass(frozen=True)
class Alternative:
    """A way of watching, how many steps a round takes, and the ratio that it must keep."""

    name: str
    attach: Callable[[Training], Method]
    steps: int
    limit: float | None = None


ALTERNATIVES = (
    Alternative(
        "watch(), defaults: every 10th step, 4096 a tensor", lambda t: watch(t.model, t.optimizer), 10, 0.005
    ),
    Alternative(
        "watch(every=1, sample=2048, budget=None)",
        lambda t: watch(t.model, t.optimizer, every=1, sample=2048, budget=None),
        EVERY_STEP_ROUND,
        0.02,
    ),
    Alternative(
        "watch(every=1, sample=2048, budget=None, oracle=True)",
        lambda t: watch(t.model, t.optimizer, every=1, sample=2048, budget=None, oracle=True),
        EVERY_STEP_ROUND,
    ),
    Alternative(
        "watch(every=1, budget=None, oracle=True): every step, 4096 a tensor",
        lambda t: watch(t.model, t.optimizer, every=1, budget=None, oracle=True),
        EVERY_STEP_ROUND,
        0.035,
    ),
    Alternative("a loop of .item() over whole tensors, every step", lambda t: ItemLoop(t.model, t.optimizer), 3),
    Alternative(
        "histograms of weights and gradients, every step", lambda t: HistogramLoop(t.model, t.optimizer), 3
    ),
)


@contextmanager
def hooks_timed(optimizer: Optimizer) -> Iterator[list[float]]:
    """Add up the CPU seconds that the optimizer's step hooks take; the list's one entry is the sum."""
    spent = [0.0]
    hooks: Any = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    originals = [dict(table) for table in hooks]

    def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.thread_time()
            result = hook(*arguments)
            spent[0] += time.thread_time() - started
            return result

        return run

    for table in hooks:
        for key, hook in list(table.items()):
            table[key] = timed(hook)
    try:
        yield spent
    finally:
        for table, original in zip(hooks, originals, strict=True):
            table.clear()
            table.update(original)


def round_of(training: Training, alternative: Alternative, method: Method) -> tuple[float, float]:
    """(hooks over the rest of the step, hook milliseconds a step) of one round."""
    del method
    with hooks_timed(training.optimizer) as spent:
        started = time.process_time()
        for _ in range(alternative.steps):
            training.step()
        total = time.process_time() - started
    return spent[0] / (total - spent[0]), 1e3 * spent[0] / alternative.steps


def measure(options: Options) -> tuple[list[str], list[Figure]]:
    """Alternated rounds of every alternative; only the gated ones under --gate."""
    torch.set_num_threads(1)
    training = Training(options.seed)
    chosen = [entry for entry in ALTERNATIVES if entry.limit is not None or not options.gate]
    for _ in range(3):
        training.step()
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    ratios: dict[str, list[float]] = {entry.name: [] for entry in chosen}
    milliseconds: dict[str, list[float]] = {entry.name: [] for entry in chosen}
    steps: list[float] = []
    switched_on: list[str] = []
    for _ in range(rounds):
        started = time.process_time()
        training.step()
        steps.append(1e3 * (time.process_time() - started))
        for entry in chosen:
            method = entry.attach(training)
            _warm_up(training, method)
            ratio, spent = round_of(training, entry, method)
            method.remove()
            ratios[entry.name].append(ratio)
            milliseconds[entry.name].append(spent)
            if isinstance(method, Watch):
                switched_on = sorted(method.summary()["model"])
    notes = [
        f"bf16 GPT, {training.parameters / 1e6:.1f} M parameters, {BATCH} x {CONTEXT} tokens, AdamW, one thread, "
        f"step {statistics.median(steps):.0f} ms without hooks; {rounds} rounds, taking turns",
        f"statistics switched on: {', '.join(switched_on)}",
    ]
    figures = []
    for entry in chosen:
        figures.append(Figure(entry.name, "hook CPU / step CPU", tuple(ratios[entry.name]), entry.limit))
        figures.append(Figure("", "ms a step", tuple(milliseconds[entry.name])))
    figures.append(Figure("hooks of a step that is not measured", "µs", idle_hooks(training), IDLE_MICROSECONDS))
    figures.append(
        Figure("buffers kept, every step, 4096 a tensor, oracle", "MB", (buffers_kept(training),), BUFFER_MEGABYTES)
    )
    return notes, figures + further_figures(options, training)


def idle_hooks(training: Training) -> tuple[float, ...]:
    """Microseconds that both hooks take on a step that is not measured: the hooks alone, called in a loop."""
    method = watch(training.model, training.optimizer, every=10**9, budget=None)
    optimizer: Any = training.optimizer
    before = list(optimizer._optimizer_step_pre_hooks.values())
    after = list(optimizer._optimizer_step_post_hooks.values())
    found = []
    for _ in range(IDLE_ROUNDS):
        started = time.thread_time()
        for _ in range(IDLE_CALLS):
            for hook in (*before, *after):
                hook(optimizer, (optimizer,), {})
        found.append(1e6 * (time.thread_time() - started) / IDLE_CALLS)
    method.remove()
    return tuple(found)


def buffers_kept(training: Training) -> float:
    """Megabytes of tensors that watching every step with the oracle keeps between steps; temporaries are not."""
    training.step()
    known = _storages()
    method = watch(training.model, training.optimizer, every=1, budget=None, oracle=True)
    _warm_up(training, method)
    # Training makes new gradients in a step; only the weights' and states' addresses stay.
    training.optimizer.zero_grad()
    kept = _storages()
    method.remove()
    return sum(size for address, size in kept.items() if known.get(address) != size) / 1e6


def _storages() -> dict[int, int]:
    """Bytes of every living tensor's memory, by address."""
    gc.collect()
    tensors = [entry for entry in gc.get_objects() if issubclass(type(entry), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _warm_up(training: Training, method: Method) -> None:
    """Up to two measured steps: planning and first allocations happen once in a run and are not what is asked."""
    if not isinstance(method, Watch):
        training.step()
        return
    while method.step is None or method.step % method.options.every:
        training.step()
    for _ in range(2 * (method.options.every == 1)):
        training.step()


if __name__ == "__main__":
    raise SystemExit(main("benchmarks.watch", "What watching an optimizer costs.", measure))
