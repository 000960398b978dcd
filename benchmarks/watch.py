"""What watching costs: CPU of the agent's hooks over CPU of the training step, beside the usual ways of looking at
training.

A bf16 byte-level GPT of about 10 million parameters, one thread. One process trains it; rounds of each alternative
take turns, so that they meet the same machine.
"""

from __future__ import annotations

import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import truediv
from typing import Any

import torch
from collage_agent.handle import Watch, watch
from collage_agent.step.bucket import LOOK_EVERY
from collage_optim import CollageAdamW
from torch import nn
from torch.optim import Optimizer

from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._training import BATCH, CONTEXT, HistogramLoop, ItemLoop, Method, Training, hooks_timed
from benchmarks.deliver import handing_over

__all__ = ["ALTERNATIVES", "measure"]

EVERY_STEP_ROUND, DEFAULTS_ROUND = 4, 10
GATE_ROUNDS, ROUNDS = 4, 10
IDLE_RATIO, IDLE_MICROSECONDS, IDLE_CALLS, IDLE_ROUNDS = 15.0, 2.5, 2_000, 8
BUFFER_MEGABYTES = 64.0
REPORT_ROUNDS = 3
DEVICE_MEGABYTES, MEMORY_MEGABYTES = 32.0, 64.0
OWN_LIMIT, OWN_ROUNDS, OWN_LAYERS, OWN_WIDTH = 2.0, 9, 20, 512
MANY_TENSORS, MANY_ROUNDS = 20_000, 5
LOOK_ROUNDS, LOOK_CLIPPINGS = 3, 4.0
MANY_LIMITS = {"the first measured step": 2.0, "a later measured step": 2.0, "an unmeasured step": 1.2}
MEMORY_ROUNDS = 5


@dataclass(frozen=True)
class Alternative:
    """A way of watching, how many steps a round takes, and how many clippings a step it may cost.

    What share of a step that is depends on the machine: where it is fast at bf16 products, a step takes a quarter
    of the time, and the agent's part of it is as long.
    """

    name: str
    attach: Callable[[Training], Method]
    steps: int
    limit: float | None = None


@dataclass
class Rounds:
    """What the rounds of one alternative came to: hooks over the rest of the step, in norms, in clippings, in
    milliseconds."""

    ratios: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clippings: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)


ALTERNATIVES = (
    Alternative(
        "watch(), defaults: every 10th step, 4096 a tensor",
        lambda t: watch(t.model, t.optimizer),
        DEFAULTS_ROUND,
        0.4,
    ),
    Alternative(
        "watch(every=1, sample=2048, budget=None)",
        lambda t: watch(t.model, t.optimizer, every=1, sample=2048, budget=None),
        EVERY_STEP_ROUND,
        3.0,
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
        5.0,
    ),
    Alternative("a loop of .item() over whole tensors, every step", lambda t: ItemLoop(t.model, t.optimizer), 3),
    Alternative(
        "histograms of weights and gradients, every step", lambda t: HistogramLoop(t.model, t.optimizer), 3
    ),
)


def add_round(training: Training, alternative: Alternative, rounds: Rounds) -> None:
    """One round's ratios to the rest of the step, and to what looking at gradients and clipping them costs in it.

    Steps that are not measured are the optimizer's alone, by the last gradients: a watch does not see the rest,
    which counts as often as the round has steps.
    """
    whole = 1 if alternative.steps == DEFAULTS_ROUND else alternative.steps
    looks = ReferenceTimings(training)
    with hooks_timed(training.optimizer) as spent:
        for _ in range(alternative.steps - whole):
            training.optimizer.step()
        before, started = spent[0], time.process_time()
        for _ in range(whole):
            training.step(looks.take)
        rest = (time.process_time() - started - (spent[0] - before) - looks.seconds) / whole
    a_step = spent[0] / alternative.steps
    rounds.ratios.append(a_step / rest)
    rounds.norms.append(a_step / statistics.median(looks.norms))
    rounds.clippings.append(a_step / statistics.median(looks.clippings))
    rounds.milliseconds.append(1e3 * a_step)


class ReferenceTimings:
    """CPU seconds of one `torch._foreach_norm` of all gradients, and of clipping them, where people clip.

    The norm comes first, and finds the gradients as the backward pass left them; the clipping, torch's own, finds
    them where the norm left them. It multiplies by 1: no gradient changes.
    """

    def __init__(self, training: Training) -> None:
        self.norms: list[float] = []
        self.clippings: list[float] = []
        self._parameters = list(training.model.parameters())

    @property
    def seconds(self) -> float:
        """The seconds of all norms and clippings together."""
        return sum(self.norms) + sum(self.clippings)

    def take(self) -> None:
        """One of each."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        started = time.thread_time()
        torch._foreach_norm(gradients)
        looked = time.thread_time()
        nn.utils.clip_grad_norm_(self._parameters, math.inf)
        self.norms.append(looked - started)
        self.clippings.append(time.thread_time() - looked)


def measure(options: Options) -> Measuring:
    """Alternated rounds of every alternative; only the gated ones under --gate."""
    torch.set_num_threads(1)
    training = Training(options.seed)
    chosen = [entry for entry in ALTERNATIVES if entry.limit is not None or not options.gate]
    for _ in range(3):
        training.step()
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    found = {entry.name: Rounds() for entry in chosen}
    steps: list[float] = []
    looks = ReferenceTimings(training)
    switched_on: list[str] = []
    for _ in range(rounds):
        started, looked = time.process_time(), looks.seconds
        training.step(looks.take)
        steps.append(1e3 * (time.process_time() - started - (looks.seconds - looked)))
        for entry in chosen:
            method = entry.attach(training)
            _warm_up(training, method)
            add_round(training, entry, found[entry.name])
            method.remove()
            if isinstance(method, Watch):
                switched_on = sorted(method.summary()["model"])
    notes = [
        f"bf16 GPT, {training.parameters / 1e6:.1f} M parameters, {BATCH} x {CONTEXT} tokens, AdamW, one thread, "
        f"step {statistics.median(steps):.0f} ms without hooks, a norm of its gradients "
        f"{1e3 * statistics.median(looks.norms):.2f} ms, clipping them "
        f"{1e3 * statistics.median(looks.clippings):.2f} ms; {rounds} rounds, taking turns",
        f"statistics switched on: {', '.join(switched_on)}",
    ]
    for entry in chosen:
        own = found[entry.name]
        yield Figure(entry.name, "clippings a step", tuple(own.clippings), entry.limit)
        yield Figure(entry.name, "hook CPU / step CPU", tuple(own.ratios))
        yield Figure(entry.name, "foreach norms a step", tuple(own.norms))
        yield Figure(entry.name, "ms a step", tuple(own.milliseconds))
    look = f"a look at whole gradients, every {LOOK_EVERY}th measured step"
    yield Figure(look, "clippings", tuple(whole_looks(training)), LOOK_CLIPPINGS)
    yield from idle_figures(training)
    buffers = (buffers_kept(training),)
    yield Figure("buffers kept, every step, 4096 a tensor, oracle", "MB", buffers, BUFFER_MEGABYTES)
    yield from many_tensors_figures()
    yield from further_figures(options, training)
    return notes


def whole_looks(training: Training) -> Iterator[float]:
    """The extra cost of a measured step that reads whole gradients and momenta, in clippings.

    The rounds of the alternatives hold no such step.
    """
    handle = watch(training.model, training.optimizer, every=1, sample=2048, budget=None)
    looks = ReferenceTimings(training)
    training.step(looks.take)
    with hooks_timed(training.optimizer) as spent:
        for _ in range(LOOK_ROUNDS):
            taken = []
            for _ in range(LOOK_EVERY):
                before = spent[0]
                training.optimizer.step()
                taken.append(spent[0] - before)
            looks.take()
            yield (taken[-1] - statistics.median(taken[:-1])) / looks.clippings[-1]
    handle.remove()


def many_tensors_figures() -> list[Figure]:
    """CPU of the optimizer's steps, watched every 10th, over those without a watch, with very many small tensors.

    The first measured step plans what later ones reuse.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 8, generator=generator).to(torch.bfloat16) for _ in range(MANY_TENSORS)]
    model = nn.ParameterList(weights)
    for parameter in model.parameters():
        parameter.grad = torch.randn(8, 8, generator=generator).to(torch.bfloat16)
    found: dict[str, list[float]] = {name: [] for name in MANY_LIMITS}
    for _ in range(MANY_ROUNDS):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.step()
        alone = [_step_seconds(optimizer) for _ in range(4)]
        handle = watch(model, optimizer, budget=None, first_step=1)
        steps = {number: _step_seconds(optimizer) for number in range(1, 31)}
        handle.remove()
        base = statistics.median(alone + [_step_seconds(optimizer) for _ in range(4)])
        measured = [steps.pop(number) / base for number in (1, 10, 20, 30)]
        unmeasured = statistics.median(steps.values()) / base
        for name, ratio in zip(
            MANY_LIMITS, (measured[0], statistics.median(measured[1:]), unmeasured), strict=True
        ):
            found[name].append(ratio)
    return [
        Figure(
            f"{name} of AdamW / without a watch, {MANY_TENSORS:,} tensors", "×", tuple(ratios), MANY_LIMITS[name]
        )
        for name, ratios in found.items()
    ]


def _step_seconds(optimizer: Optimizer) -> float:
    started = time.process_time()
    optimizer.step()
    return time.process_time() - started


def idle_figures(training: Training) -> list[Figure]:
    """The cost of the hooks on a step that is not measured, in a loop, alternating with hooks that do nothing."""
    method = watch(training.model, training.optimizer, every=10**9, budget=None)
    optimizer: Any = training.optimizer
    optimizer.step()  # The first step of an optimizer that has states is measured.
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    empty = [lambda *arguments: None for _ in hooks]
    ours, nothing = [], []
    for _ in range(IDLE_ROUNDS):
        ours.append(_microseconds(hooks, optimizer))
        nothing.append(_microseconds(empty, optimizer))
    method.remove()
    name = "a hook of a step that is not measured"
    return [
        Figure(f"{name} / one that does nothing", "×", tuple(map(truediv, ours, nothing)), IDLE_RATIO),
        Figure(name, "µs", tuple(ours), IDLE_MICROSECONDS),
    ]


def _microseconds(hooks: Sequence[Callable[..., Any]], optimizer: Optimizer) -> float:
    """The cost of one hook, on average over all of them."""
    started = time.thread_time()
    for _ in range(IDLE_CALLS):
        for hook in hooks:
            hook(optimizer, (optimizer,), {})
    return 1e6 * (time.thread_time() - started) / IDLE_CALLS / len(hooks)


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
    """Up to two measured steps: planning and first allocations happen once in a run and are not measured.

    The optimizer steps by the last gradients: a watch does not see forward and backward.
    """
    training.step()
    if not isinstance(method, Watch):
        return
    while method.step is None or method.step % method.options.every:
        training.optimizer.step()
    for _ in range(2 * (method.options.every == 1)):
        training.optimizer.step()


def further_figures(options: Options, training: Training) -> Iterator[Figure]:
    """The memory of a watch, and its cost beside our own optimizer."""
    yield handing_over(REPORT_ROUNDS)[0]
    device = kept_on_device(training)
    yield Figure("buffers on the model's device, defaults", "MB", (device,), DEVICE_MEGABYTES)
    memory = tuple(memory_added() for _ in range(MEMORY_ROUNDS))
    yield Figure("process memory added by the agent, every 2nd step", "MB", memory, MEMORY_MEGABYTES)
    yield from beside_own_optimizers(options.seed)


def beside_own_optimizers(seed: int) -> Iterator[Figure]:
    """A measured step beside our own optimizers over one beside torch's AdamW: whole layers, alike, in turns."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Callable[[Any], Optimizer]] = {
        "torch's AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "plus": lambda parameters: CollageAdamW(parameters, lr=1e-3, strategy="plus"),
        "split-master": lambda parameters: CollageAdamW(parameters, lr=1e-3, strategy="split-master"),
    }
    optimizers, watches = {}, []
    for name, make in made.items():
        weights = [torch.randn(OWN_WIDTH, OWN_WIDTH, generator=generator) * 0.02 for _ in range(OWN_LAYERS)]
        model = nn.ParameterList([weight.to(torch.bfloat16) for weight in weights])
        for parameter in model.parameters():
            parameter.grad = torch.randn(OWN_WIDTH, OWN_WIDTH, generator=generator).to(torch.bfloat16)
        optimizers[name] = make(model.parameters())
        watches.append(watch(model, optimizers[name], every=1, budget=None))
        for _ in range(3):
            optimizers[name].step()
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(OWN_ROUNDS):
        for name, optimizer in optimizers.items():
            with hooks_timed(optimizer) as spent:
                optimizer.step()
            taken[name].append(spent[0])
    base = taken.pop("torch's AdamW")
    for name, seconds in taken.items():
        ratios = tuple(map(truediv, seconds, base))
        yield Figure(f"a measured step beside {name} / beside torch's AdamW", "ratio", ratios, OWN_LIMIT)


def kept_on_device(training: Training, **options: Any) -> float:
    """Megabytes of tensors that a watch keeps where the model is, as it reports them itself."""
    handle = watch(training.model, training.optimizer, budget=None, **options)
    training.step()
    while handle.step is None or handle.step % handle.options.every:
        training.optimizer.step()
    assert handle._last is not None
    kept = handle._last.scalars["agent_memory_bytes"]
    handle.remove()
    return float(kept) / 1e6


_MEMORY = """
import gc, os, sys
import torch
from benchmarks._training import Training

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


def memory_added() -> float:
    """Megabytes that a process's resident memory grows by: the agent's import, run, watch and measured steps.

    The growth of the same training without the agent, in as many steps, is subtracted. Both vary between processes
    by 10 MB and more, depending on the memory that the allocator keeps. Linux only.
    """

    def grown(how: str) -> float:
        program = [sys.executable, "-c", _MEMORY, how]
        answer = subprocess.run(program, capture_output=True, text=True, check=True, timeout=600)
        return float(answer.stdout.splitlines()[-1])

    return grown("watched") - grown("alone")


if __name__ == "__main__":
    raise SystemExit(main("benchmarks.watch", "What watching an optimizer costs.", measure))
