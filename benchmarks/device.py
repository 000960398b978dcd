"""What steps and watching cost on a CUDA device: time between events on the device, beside torch's own.

Bytes a step moves (read once, written once) over its time, beside a plain copy of as many bytes, say how far from
the memory's limit it is; a host that takes longer to hand a step over than the device to make it leaves the device
idle. A training step is that of a bf16 byte-level GPT of about 300 million parameters.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from collage_agent.handle import watch
from collage_agent.sample.sampling import draw
from collage_agent.step.gather import BlockLayout, Source, Staging
from collage_optim import CollageAdamW, StepTotals
from torch import nn

from benchmarks import optimizer as shapes_of
from benchmarks._harness import Figure, Measuring, Options, main
from benchmarks._training import Block

ROUNDS, CALLS, WARM_UP = 9, 10, 4
MODELS = {"85 M": (768, 12), "303 M": (1024, 24), "1.2 B": (2048, 24)}
LARGEST = "1.2 B"
"""Of which fewer steps are measured: all together would not fit a device of 80 GB."""
FORMS = (
    ("plus", True),
    ("split-master", True),
    ("split-master-16bit", True),
    ("split-master-8bit", True),
    ("coupled-8", True),
    ("plus", False),
)
ADDS_UP = ("split-master", "plus")
"""Strategies whose kernel is also taken with the totals of each step."""
FORMS_OF_LARGEST = (("split-master", True), ("split-master-8bit", True))
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 1024, 24, 16, 1024, 8
WATCHES: dict[str, dict[str, Any]] = {
    "watch(), defaults": {},
    "watch(every=1, sample=2048, budget=None)": {"every": 1, "sample": 2048, "budget": None},
    "watch(every=1, budget=None, oracle=True)": {"every": 1, "budget": None, "oracle": True},
}
WATCHES_OF_OURS: dict[str, dict[str, Any]] = {
    "split-master, watch(), defaults": {},
    "split-master, totals at every step: watch(every=1, casts=(), budget=None)": {
        "every": 1,
        "casts": (),
        "budget": None,
    },
}
DEFAULTS_ROUND, EVERY_STEP_ROUND = 100, 8
"""Steps of a round. Two of them are watched: at the defaults the first measures more often than the next."""
SAMPLE, COMPILED_WITHIN_SECONDS = 4096, 60


def milliseconds(work: Callable[[], object], calls: int) -> float:
    """The time of one call on the device."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def host_milliseconds(work: Callable[[], object], calls: int) -> float:
    """The time in which the host hands one call over to a device that is idle."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    found = (time.perf_counter() - begin) / calls * 1e3
    torch.cuda.synchronize()
    return found


def on_device(model: tuple[int, int], dtype: torch.dtype) -> list[nn.Parameter]:
    """A GPT's parameters with gradients, drawn there: on the host it would take minutes."""
    torch.manual_seed(0)
    found = []
    for shape in shapes_of.shapes(model):
        member = nn.Parameter((torch.randn(shape, device="cuda") * 0.02).to(dtype))
        member.grad = (torch.randn(shape, device="cuda") * 1e-3).to(dtype)
        found.append(member)
    return found


def master_step(model: tuple[int, int]) -> Callable[[], None]:
    """fp32 weights stepped by torch's fused AdamW, gradients cast up and weights cast down."""
    weights, masters = on_device(model, torch.bfloat16), on_device(model, torch.float32)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    gradients, lifted = ([member.grad for member in own if member.grad is not None] for own in (weights, masters))

    def step() -> None:
        torch._foreach_copy_(lifted, gradients)
        optimizer.step()
        torch._foreach_copy_([weight.data for weight in weights], [master.data for master in masters])

    return step


def bytes_moved(optimizer: torch.optim.Optimizer) -> int:
    """Weights and states read and written, gradients read."""
    moved = 0
    for group in optimizer.param_groups:
        for member in group["params"]:
            kept = [x for x in optimizer.state[member].values() if isinstance(x, torch.Tensor) and x.dim()]
            moved += 2 * sum(x.numel() * x.element_size() for x in (member, *kept))
            moved += member.grad.numel() * member.grad.element_size()
    return moved


def with_totals(optimizer: CollageAdamW) -> Callable[[], None]:
    """A step that adds up its totals in its kernel."""

    def step() -> None:
        optimizer.step_totals = StepTotals()
        optimizer.step()

    return step


def steps_of(model: tuple[int, int], rounds: int) -> Measuring:
    """Every form of a step, alternated, beside torch's."""
    elements = sum(math.prod(shape) for shape in shapes_of.shapes(model))
    contenders: dict[str, Callable[[], object]] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}

    def add(name: str, made: torch.optim.Optimizer) -> None:
        contenders[name], optimizers[name] = made.step, made

    size = next(key for key, value in MODELS.items() if value == model)
    if size != LARGEST:
        add("torch bf16 foreach", torch.optim.AdamW(on_device(model, torch.bfloat16), lr=1e-4, foreach=True))
    add("torch bf16 fused", torch.optim.AdamW(on_device(model, torch.bfloat16), lr=1e-4, fused=True))
    contenders["torch fp32 master fused"] = master_step(model)
    for strategy, form in FORMS_OF_LARGEST if size == LARGEST else FORMS:
        members = on_device(model, torch.bfloat16)
        name = f"{strategy} {'kernel' if form else 'eager'}"
        add(name, CollageAdamW(members, lr=1e-4, strategy=strategy, compiled=form, seed=1))
        if form and strategy in ADDS_UP and size != LARGEST:
            adding = CollageAdamW(on_device(model, torch.bfloat16), lr=1e-4, strategy=strategy, seed=1)
            contenders[f"{name}, totals at every step"] = with_totals(adding)
    for step in contenders.values():
        for _ in range(WARM_UP):
            step()
    source = torch.empty(12 * elements // 4, device="cuda")
    target = torch.empty_like(source)
    contenders["a copy of 12 bytes a parameter"] = lambda: target.copy_(source)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    host: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            times[name].append(milliseconds(step, CALLS))
            host[name].append(host_milliseconds(step, CALLS))
    for name, found in times.items():
        yield Figure(f"{size}: {name}", "ms", tuple(found))
        yield Figure(f"{size}: {name}, the host's part", "ms", tuple(host[name]))
        ratios = [one / other for one, other in zip(found, times["torch fp32 master fused"], strict=True)]
        yield Figure(f"{size}: {name}, of torch's with an fp32 master", "", tuple(ratios))
        if name in optimizers:
            rate = bytes_moved(optimizers[name]) / 1e9 / (statistics.median(found) / 1e3)
            yield Figure(f"{size}: {name}", "GB/s", (rate,))
    copied = 24 * elements / 1e9 / (statistics.median(times["a copy of 12 bytes a parameter"]) / 1e3)
    yield Figure(f"{size}: a copy", "GB/s", (copied,))
    return []


def gathering(model: tuple[int, int], rounds: int) -> Measuring:
    """The sample of weights, gradients and two states: by one launch, and tensor by tensor, alternated."""
    members = on_device(model, torch.bfloat16)
    samples = [draw(str(place), own.numel(), own.element_size(), SAMPLE) for place, own in enumerate(members)]
    layout = BlockLayout(samples, members)
    moments: list[list[torch.Tensor]] = [[own.detach().clone() for own in members] for _ in ("first", "second")]
    columns: list[list[torch.Tensor]] = [
        [*members],
        [own.grad for own in members if own.grad is not None],
        *moments,
    ]
    sources = [Source(own, Staging(layout, torch.bfloat16), own is not columns[1]) for own in columns]
    deadline = time.monotonic() + COMPILED_WITHIN_SECONDS
    while not all(layout.launch(sources)):
        if time.monotonic() > deadline:
            return ["no kernel gathers samples here: the log says why"]
        time.sleep(0.1)

    def tensor_by_tensor() -> None:
        for own in sources:
            layout._copy(*own)

    contenders = {"one launch": lambda: layout.gather_all(sources), "tensor by tensor": tensor_by_tensor}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, gather in contenders.items():
            times[name].append(milliseconds(gather, CALLS))
    for name, found in times.items():
        yield Figure(f"a sample of {len(members)} tensors gathered, {name}", "ms", tuple(found[1:]))
    pairs = zip(*(found[1:] for found in times.values()), strict=True)
    yield Figure("a sample gathered, one launch of tensor by tensor", "", tuple(one / each for one, each in pairs))
    return []


def training(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Module, Any, Callable[[], None]]:
    """The model, its optimizer, and a step of training."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH), *(Block(WIDTH, HEADS) for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
    )
    model.append(nn.Linear(WIDTH, 256))
    model.to("cuda", torch.bfloat16)
    optimizer = make(model.parameters())
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1), device="cuda")

    def step() -> None:
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return model, optimizer, step


def watching(
    rounds: int, make: Callable[[Any], torch.optim.Optimizer], watches: dict[str, dict[str, Any]]
) -> Measuring:
    """A training step of this optimizer with and without a watch, alternated."""
    model, optimizer, step = training(make)
    yield Figure("parameters", "M", (sum(p.numel() for p in model.parameters()) / 1e6,))
    for _ in range(WARM_UP):
        step()
    yield Figure("a training step", "ms", (milliseconds(step, CALLS),))
    for name, options in watches.items():
        calls = EVERY_STEP_ROUND if options else DEFAULTS_ROUND
        times: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            bare = milliseconds(step, calls)
            handle = watch(model, optimizer, **options)
            for part in (f"{name}, first {calls} steps", f"{name}, next {calls} steps"):
                times.setdefault(part, []).append((milliseconds(step, calls), bare))
            handle.remove()
        for part, pairs in times.items():
            yield Figure(f"{part}, of a step without", "", tuple(watched / bare for watched, bare in pairs))
            yield Figure(f"{part}, more a step", "ms", tuple(watched - bare for watched, bare in pairs))
    return []


def measure(options: Options) -> Measuring:
    """All of it; one device."""
    if not torch.cuda.is_available():
        return ["no CUDA device here: nothing is measured"]
    rounds = options.rounds or ROUNDS
    for model in MODELS.values():
        yield from steps_of(model, rounds)
        torch.cuda.empty_cache()
    notes = yield from gathering(MODELS["303 M"], rounds)
    yield from watching(rounds, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), WATCHES)
    torch.cuda.empty_cache()
    yield from watching(
        rounds, lambda p: CollageAdamW(p, lr=1e-4, strategy="split-master", seed=1), WATCHES_OF_OURS
    )
    return [*notes, f"{torch.cuda.get_device_name()}, torch {torch.__version__}"]


if __name__ == "__main__":
    sys.exit(main("device", (__doc__ or "").splitlines()[0], measure))
